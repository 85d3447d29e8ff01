"""Each lever trains the same as the plain value: float8 by emulation, and Liger by a stand-in for its kernels."""

import sys
from types import MethodType, ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional
from worker_knobs import knob_values, llama, worker_knobs

from trainfast_runner.worker.catalog import LEVERS
from trainfast_runner.worker.data.samples import IGNORED_LABEL
from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.levers import actual_fields
from trainfast_runner.worker.levers.float8 import actual, convert
from trainfast_runner.worker.levers.head_loss import FusedHeadLoss
from trainfast_runner.worker.model.build import build_model
from trainfast_runner.worker.model.model_config import resolve_config
from trainfast_runner.worker.model.optimizer import Objective
from trainfast_runner.worker.model.weights import init_weights, outermost_blocks

SIZES = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 128}
OTHER_NAMES = {
    "gpt2": {"n_embd": 64, "n_layer": 5, "n_head": 4},
    "distilbert": {"dim": 64, "n_layers": 5, "n_heads": 4, "hidden_dim": 128},
    "opt": {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4},
}
GROUPED = {"num_key_value_heads": 2}
MORE = {
    "mixtral": {**GROUPED, "num_local_experts": 4},
    **dict.fromkeys(("mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "smollm3"), GROUPED),
    "gemma2": {**GROUPED, "head_dim": 16},
    "gemma3_text": {**GROUPED, "head_dim": 16},
}
MORE["modernbert"] = {"cls_token_id": 0, "sep_token_id": 0}
MASKED, SEQ2SEQ = ("bert", "roberta", "distilbert", "modernbert"), ("t5",)
SPECIAL_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)


def objective_of(family):
    return "masked-lm" if family in MASKED else "seq2seq" if family in SEQ2SEQ else "causal-lm"


def one_step(family, **knobs):
    """The model after a forward and a backward of fixed samples, and its summed loss."""
    fields = {**OTHER_NAMES.get(family, SIZES), **MORE.get(family, {})}
    fields |= {} if family in SEQ2SEQ else SPECIAL_TOKENS
    config, objective = resolve_config({"family": family, "vocab_size": 512, **fields}), objective_of(family)
    for name in [name for name in vars(config) if "drop" in name and isinstance(getattr(config, name), float)]:
        setattr(config, name, 0.0)
    asked = worker_knobs(**knobs)
    model = build_model(config, objective, asked, torch.device("cpu"))
    init_weights(model, 0, torch.device("cpu"))
    tokens = torch.randint(1, 512, (3, 20), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][:, 3] = IGNORED_LABEL
    if objective == "seq2seq":
        batch["decoder_input_ids"] = tokens.roll(1, 1)
    loss = Objective(objective, asked).loss_sum(model, batch)
    loss.backward()
    return model, loss.item()


def assert_equal(model, plain, within):
    for (name, parameter), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=within, atol=within, msg=name)


@pytest.mark.parametrize("family", LEVERS["loss"]["chunked"].families)
def test_chunked_loss_gives_the_loss_and_the_gradients_of_the_whole_logits(family):
    plain, expected = one_step(family)
    model, loss = one_step(family, loss="chunked")
    assert loss == pytest.approx(expected, rel=LEVERS["loss"]["chunked"].tolerance)
    assert_equal(model, plain, 1e-4)
    assert (actual_fields(model)["loss_function"], actual_fields(plain)["loss_function"]) == ("chunked", "full")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mixtral", "gemma2", "t5"])
@pytest.mark.parametrize(("value", "layers"), [("full", 5), ("every-2", 3), ("every-4", 2), ("selective", 5)])
def test_checkpointing_trains_the_same(family, value, layers):
    plain, expected = one_step(family)
    model, loss = one_step(family, checkpointing=value)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_equal(model, plain, 1e-5)
    ran = actual_fields(model)
    assert (ran["checkpointing"], ran["checkpointed_layers"]) == (value, layers + (family == "t5" and layers == 5))


def test_partial_checkpointing_is_refused_where_it_would_be_another_and_each_lever_is_a_knob():
    with pytest.raises(InvalidInput, match="needs more layers than the 3 that the model"):
        build_model(
            resolve_config({"family": "llama", **SIZES, "vocab_size": 512, "num_hidden_layers": 3}),
            "causal-lm",
            worker_knobs(checkpointing="every-4"),
            torch.device("meta"),
        )
    for entry in LEVERS.values():
        assert knob_values()[entry.name] == entry.plain == entry.values[0].name
        assert entry["of another version"].name == entry.plain


TOKENS = torch.randint(0, 1024, (4, 32), generator=torch.Generator().manual_seed(1))


def losses(is_float8, steps=8):
    """Losses of a small llama with weights in bf16, whose products are in bf16 or in emulated float8."""
    knobs = worker_knobs(precision="bf16-pure")
    model = build_model(resolve_config(llama()), "causal-lm", knobs, torch.device("cpu"))
    if is_float8:
        convert(model, outermost_blocks(model), emulate=True)
        assert actual(model) == {"float8_layers": 14}, "seven in each of two blocks, and not the head"
        assert type(model.lm_head) is torch.nn.Linear
    init_weights(model, 7, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        logits = model(input_ids=TOKENS).logits.float()
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def test_float8_learns_as_bf16_does_and_refuses_sizes_that_it_cannot_have():
    plain, float8 = list(losses(is_float8=False)), list(losses(is_float8=True))
    assert (float8[0], float8) == (pytest.approx(plain[0], rel=2e-2), pytest.approx(plain, rel=5e-2))
    assert float8[-1] < 0.95 * float8[0]
    assert float8 != plain, "the products are other numbers"
    fields = llama(hidden_size=24, intermediate_size=40, num_attention_heads=2)
    model = build_model(resolve_config(fields), "causal-lm", worker_knobs(), torch.device("meta"))
    with pytest.raises(InvalidInput, match="no linear layer of llama has sizes that are multiples of 16"):
        convert(model, outermost_blocks(model))


class FusedLoss(nn.Module):
    """Computes what LigerFusedLinearCrossEntropyLoss of liger-kernel 0.8 computes, from the same arguments."""

    def __init__(self, ignore_index=-100, reduction="mean", softcap=None):
        super().__init__()
        self.arguments = {"ignore_index": ignore_index, "reduction": reduction}
        self.softcap = softcap

    def forward(self, lin_weight, _input, target, bias=None):
        assert lin_weight.dtype == _input.dtype
        logits = functional.linear(_input, lin_weight, bias).float()
        logits = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return functional.cross_entropy(logits, target, **self.arguments)


@pytest.fixture
def package(monkeypatch):
    """Stand-ins for the two modules that the worker imports; returns the calls of the first."""
    calls = []
    transformers = ModuleType("liger_kernel.transformers")

    def norm(self, states):
        return type(self).forward(self, states)

    norm.__module__ = "liger_kernel.transformers.rms_norm"

    def apply(model, **kwargs):
        calls.append(kwargs)
        if model.config.model_type == "llama":
            model.model.norm.forward = MethodType(norm, model.model.norm)

    transformers._apply_liger_kernel_to_instance = apply
    fused = ModuleType("liger_kernel.transformers.fused_linear_cross_entropy")
    fused.LigerFusedLinearCrossEntropyLoss = FusedLoss
    for module in (ModuleType("liger_kernel"), transformers, fused):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def built(fields=None, objective="causal-lm", **knobs):
    asked = worker_knobs(**knobs)
    model = build_model(resolve_config(fields or llama()), objective, asked, torch.device("cpu"))
    init_weights(model, 7, torch.device("cpu"))
    return model, Objective(objective, asked)


def test_its_kernels_take_the_models_place_and_never_the_loss(package):
    model, _ = built(kernels="liger")
    assert package == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    assert (actual_fields(model)["kernels"], actual_fields(model)["loss_function"]) == ("liger", "full")
    assert actual_fields(built()[0])["kernels"] == "off"
    with pytest.raises(InvalidInput, match="liger-kernel has no kernels for qwen2"):
        built(llama(family="qwen2"), kernels="liger")


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_its_loss_is_the_full_one_with_soft_cap_and_bias(package, family, is_autocast):
    more = {"num_key_value_heads": 4, "head_dim": 16} if family == "gemma2" else {}
    more |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if family == "bert" else {}
    objective = "masked-lm" if family == "bert" else "causal-lm"
    tokens = torch.randint(0, 1024, (2, 32), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, ::3] = -100
    found = []
    for loss in ("full", "liger", "chunked"):
        model, task = built(llama(family=family, **more), objective, loss=loss)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            value = task.loss_sum(model, {"input_ids": tokens, "labels": labels})
        value.backward()
        gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        found.append((value, gradients))
        assert actual_fields(model)["loss_function"] == loss
    assert isinstance(model.forward, FusedHeadLoss) is False
    (full, gradient), *others = found
    for value, its_gradient in others:
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, full, rtol=2e-3 if is_autocast else 1e-6, atol=0)
        tolerance = 5e-2 * gradient.abs().max() if is_autocast else 1e-4
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-3, atol=float(tolerance))
