"""Adapters: the base is that of `method=full`, only they are trained, and what ran is on record."""

import pytest
import torch
from worker_knobs import gpt2, llama, trace_uncached, worker_knobs

from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.levers import lora
from trainfast_runner.worker.model.build import build_model, check_adapters
from trainfast_runner.worker.model.flops import flops_per_sample
from trainfast_runner.worker.model.model_config import resolve_config
from trainfast_runner.worker.model.weights import init_weights

pytestmark = pytest.mark.xdist_group("one-process")

CPU = torch.device("cpu")
BERT = llama(family="bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
FAMILIES = {"llama": (llama(), "causal-lm"), "gpt2": (gpt2(), "causal-lm"), "bert": (BERT, "masked-lm")}
T5 = {"family": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 512}
IDS = torch.arange(64).reshape(2, 32)
SHORT = {"steps": 3, "batch_size": 4}


def built(family, **knobs):
    model, objective = FAMILIES[family]
    made = build_model(resolve_config(model), objective, worker_knobs(**knobs), CPU)
    init_weights(made, 7, CPU)
    return made


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_does_not_depend_on_the_method(family):
    full, adapted = built(family), built(family, method="lora", lora_targets="all")
    weights = {name.replace(".base_layer", ""): value for name, value in adapted.state_dict().items()}
    assert all(torch.equal(value, weights[name]) for name, value in full.state_dict().items())
    assert torch.equal(full(input_ids=IDS).logits, adapted(input_ids=IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_give_the_logits_of_the_adapters(family):
    model = built(family, method="lora", lora_targets="all", lora_rank=4)
    for name, parameter in trained(model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    before = model(input_ids=IDS).logits
    for _, layer in lora.adapted_layers(model):
        layer.merge(safe_merge=True)
    merged = model(input_ids=IDS).logits
    assert not torch.allclose(before, built(family)(input_ids=IDS).logits, atol=1e-3)
    torch.testing.assert_close(merged, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_get_gradients_with_checkpointing_too(family, method):
    model = built(family, method=method, checkpointing="full")
    model(input_ids=IDS).logits.square().mean().backward()
    assert all("lora_" in name and parameter.grad is not None for name, parameter in trained(model).items())
    assert lora.actual(model)["method"] == method


def test_four_bits_are_the_matrices_of_the_blocks_and_a_classifiers_head_stays_whole():
    full, adapted = built("gpt2"), built("gpt2", method="qlora")
    quantized = [p for p in adapted.parameters() if getattr(p, "quant_state", None) is not None]
    assert sum(parameter.whole_numel for parameter in quantized) == 2 * 12 * 64 * 64
    assert adapted.transformer.wte.weight.dtype == adapted.lm_head.weight.dtype == torch.float32
    expected, ran = full(input_ids=IDS).logits, adapted(input_ids=IDS).logits
    assert 0 < (ran - expected).norm() / expected.norm() < 0.1
    model = build_model(resolve_config(T5), "seq2seq", worker_knobs(method="qlora"), CPU)
    init_weights(model, 7, CPU)
    model(input_ids=IDS, decoder_input_ids=IDS).logits.square().mean().backward()
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    knobs = worker_knobs(method="lora")
    model = build_model(resolve_config(BERT), "sequence-classification", knobs, CPU)
    assert {name for name in trained(model) if "lora_" not in name} == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(("targets", "layers"), [("all", 7), ("attention", 4), ("q_proj+self_attn.o_proj", 2)])
def test_targets_are_kinds_of_layers_or_their_names(targets, layers):
    model = built("llama", method="lora", lora_targets=targets)
    assert (len(lora.actual(model)["adapted_layers"]), len(list(lora.adapted_layers(model)))) == (layers, 2 * layers)


def test_an_unknown_target_names_the_nearest_layer():
    knobs = worker_knobs(method="lora", lora_targets="q_proj+v_porj")
    with pytest.raises(
        InvalidInput, match=r"'v_porj' is not a linear layer of LlamaForCausalLM; did you mean 'v_proj'"
    ):
        check_adapters(resolve_config(llama()), "causal-lm", knobs)
    with pytest.raises(InvalidInput, match="an adapter of the head does nothing with loss=chunked"):
        built("llama", method="lora", lora_targets="lm_head", loss="chunked")


@pytest.mark.parametrize("checkpointed", [0.0, 1.0])
def test_frozen_weights_cost_four_flops(checkpointed):
    full, adapted = built("llama"), built("llama", method="lora", lora_rank=8)
    plain, with_adapters = (flops_per_sample(model, "causal-lm", 32, checkpointed) for model in (full, adapted))
    multiplied = sum(p.numel() for name, p in full.named_parameters() if "embed" not in name)
    of_adapters = sum(parameter.numel() for parameter in trained(adapted).values())
    assert plain.model - with_adapters.model == 32 * (2 * multiplied - 6 * of_adapters)
    assert with_adapters.recomputed - plain.recomputed == pytest.approx(checkpointed * 32 * 2 * of_adapters)


def test_a_run_of_adapters_learns_from_the_loss_of_the_whole_model(train):
    full, run = train(**SHORT), train(method="lora", **SHORT)
    assert run.code == 0, run.stderr
    assert run.losses()[0] == full.losses()[0]
    assert run.losses()[-1] < run.losses()[0]
    actual = run.record("actual")
    assert (actual["method"], actual["trainable_parameters"]) == ("lora", 2 * 4 * 2 * 64 * 16)
    assert actual["parameters"] == full.record("actual")["parameters"] + actual["trainable_parameters"]
    assert full.record("actual")["method"] == "full"


def test_a_run_of_four_bits_trains_on_a_cpu(train):
    run = train(method="qlora", checkpointing="full", **SHORT)
    assert run.code == 0, run.stderr
    assert run.losses()[-1] < run.losses()[0]
    assert run.losses()[0] == pytest.approx(train(**SHORT).losses()[0], rel=0.02)
    assert run.record("actual")["method"] == "qlora"


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "method"), [("ddp", "lora"), ("ddp", "qlora"), ("fsdp", "lora")])
def test_ranks_train_the_same_adapters(train, strategy, method):
    alone = train(method=method, steps=3, batch_size=8)
    run = train(ranks=2, strategy=strategy, method=method, steps=3, batch_size=4)
    assert run.code == 0, run.stderr
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-4)
    assert run.record("actual")["trainable_parameters"] == alone.record("actual")["trainable_parameters"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("preset", ["tiny-llama", "gpt2", "bert-base"])
def test_predicted_memory_is_that_of_a_run(train, preset, method):
    small = {"gpt2": ("n_layer=3", "n_embd=384", "n_head=6"), "bert-base": ("num_hidden_layers=4",)}.get(preset, ())
    sizes = ["seq_len=128", "batch_size=16", "workers=0", *(f"model.{size}" for size in small)]
    spec = resolve(preset, [f"method={method}", *sizes])
    predicted = trace_uncached(spec).predict(spec)
    assert predicted.frozen_bytes > 20 * predicted.params_bytes / 4
    assert (predicted.quantized_bytes > 0) == (method == "qlora")
    knobs = {name: spec.knobs[name] for name in ("seq_len", "batch_size", "precision")}
    run = train(cold=True, model=spec.model, data=spec.data, method=method, optimizer="adamw", steps=3, **knobs)
    measured = max(step["peak_allocated_bytes"] for step in run.steps() if step["warmup"])
    assert measured == pytest.approx(predicted.total_bytes, rel=0.05)
