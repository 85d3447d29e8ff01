"""Each lever trains the same as the plain value, on each model type that its entry names; float8 by emulation."""

import pytest
import torch
from torch.nn import functional
from worker_knobs import knob_values, llama, worker_knobs

from trainfast_runner.worker.catalog import LEVERS
from trainfast_runner.worker.data.samples import IGNORED_LABEL
from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.levers import actual_fields
from trainfast_runner.worker.levers.float8 import actual, convert
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


def test_partial_checkpointing_is_refused_where_it_would_be_another_one():
    with pytest.raises(InvalidInput, match="needs more layers than the 3 that the model"):
        build_model(
            resolve_config({"family": "llama", **SIZES, "vocab_size": 512, "num_hidden_layers": 3}),
            "causal-lm",
            worker_knobs(checkpointing="every-4"),
            torch.device("meta"),
        )


def test_each_lever_is_a_knob_whose_first_value_is_the_plain_one():
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


def test_float8_learns_as_bf16_does_and_not_the_same():
    plain, float8 = list(losses(is_float8=False)), list(losses(is_float8=True))
    assert (float8[0], float8) == (pytest.approx(plain[0], rel=2e-2), pytest.approx(plain, rel=5e-2))
    assert float8[-1] < 0.95 * float8[0]
    assert float8 != plain, "the products are other numbers"


def test_a_model_whose_sizes_float8_cannot_have_is_refused():
    fields = llama(hidden_size=24, intermediate_size=40, num_attention_heads=2)
    model = build_model(resolve_config(fields), "causal-lm", worker_knobs(), torch.device("meta"))
    with pytest.raises(InvalidInput, match="no linear layer of llama has sizes that are multiples of 16"):
        convert(model, outermost_blocks(model))
