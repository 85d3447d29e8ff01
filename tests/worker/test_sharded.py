"""Models cut over real processes learn what one process learns, and say how they are cut."""

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from worker_knobs import gpt2, knob_values, llama, trace_uncached

from trainfast_runner.machine.training_python import WORKER_FOLDER
from trainfast_runner.settings.spec import resolve

pytestmark = pytest.mark.ci

# One global batch of 8 in every run.
STEPS = {"steps": 10, "batch_size": 8}
TWO_SLICES = {"steps": 10, "batch_size": 2, "grad_accum": 2}
SHARDED = {
    "fsdp": {"ranks": 2, "strategy": "fsdp", **TWO_SLICES},
    "tp": {"ranks": 2, "strategy": "tp", **STEPS},
    "ddp+tp": {"ranks": 4, "strategy": "ddp+tp", **TWO_SLICES},
    "fsdp+tp": {"ranks": 4, "strategy": "fsdp+tp", **TWO_SLICES},
}
RAN = {
    "fsdp": ("FSDPModule", {"dp": 2}),
    "tp": ("DTensor", {"tp": 2}),
    "ddp+tp": ("DTensor+DistributedDataParallel", {"dp": 2, "tp": 2}),
    "fsdp+tp": ("DTensor+FSDPModule", {"dp": 2, "tp": 2}),
}
FALL = 0.9
"""The last loss of the reference is at most this share of the first: a wrong gradient then shows."""

# Two processes whose row-cut matrices keep their partial sums to themselves.
MIS_SHARDED = """
import importlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("bootstrap", {bootstrap!r})
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)
slices = importlib.import_module("trainfast_worker.strategies.tensor_parallel")
slices._Sum.forward = staticmethod(lambda ctx, value, group: value.clone())
importlib.import_module("trainfast_worker.main").main(sys.argv[1])
"""


def same_as(losses):
    """Equal within what the order of fp32 sums explains."""
    return pytest.approx(losses, rel=1e-4)


@pytest.fixture(scope="module")
def reference(train):
    """One process, on a curve that falls."""
    losses = train(**STEPS).losses()
    assert losses[-1] <= FALL * losses[0]
    return losses


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_sharded_model_learns_what_one_process_learns_and_every_rank_says_what_it_is(train, reference, strategy):
    run = train(**SHARDED[strategy])
    assert run.code == 0, run.stderr[-3000:]
    assert run.losses() == same_as(reference)
    for rank in range(SHARDED[strategy]["ranks"]):
        assert run.losses(rank) == run.losses()
        actual = run.record("actual", rank)
        assert (actual["wrapper"], actual["mesh"]) == RAN[strategy]
        assert actual["parameters"] == train(**STEPS).record("actual")["parameters"]
        assert actual["optimizer_implementation"] == "loop", "torch's own choice on a CPU"
    assert {step["samples"] for step in run.steps()} == {8 if strategy == "tp" else 4}


@pytest.mark.parametrize("strategy", ["tp", "ddp+tp", "fsdp+tp"])
def test_sequences_are_split_between_the_cut_matrices(train, reference, strategy):
    run = train(**SHARDED[strategy], sequence_parallel="on")
    assert run.code == 0, run.stderr[-3000:]
    assert run.losses() == same_as(reference)
    for rank in range(SHARDED[strategy]["ranks"]):
        assert run.losses(rank) == run.losses()
        actual = run.record("actual", rank)
        assert (actual["wrapper"], actual["mesh"], actual["sequence_parallel"]) == (*RAN[strategy], "on")
    assert train(**SHARDED[strategy]).record("actual")["sequence_parallel"] == "off"


@pytest.mark.parametrize(
    ("family", "fields", "knobs"),
    [
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True}, {"checkpointing": "full"}),
        ("qwen2", {"num_key_value_heads": 4, "vocab_size": 1023}, {"attention": "eager", "grad_clip": 0.1}),
        ("mistral", {"num_key_value_heads": 2}, {}),
    ],
)
def test_other_families_split_their_sequences(train, family, fields, knobs):
    """A tied head, a head that is not cut, with biases, and a mask of the whole sequence."""
    asked = {"model": llama(family=family, **fields), "steps": 4, **knobs}
    run = train(**asked, ranks=2, strategy="tp", sequence_parallel="on")
    assert run.code == 0, run.stderr[-3000:]
    assert run.losses() == same_as(train(**asked).losses()), run.stderr[-3000:]
    assert run.record("actual")["sequence_parallel"] == "on"


MIXTRAL = llama(family="mixtral", num_key_value_heads=2, num_local_experts=4)


@pytest.mark.parametrize("strategy", ["tp", "ddp+tp", "fsdp+tp"])
def test_experts_lie_whole_on_one_rank_each(train, strategy):
    single = train(model=MIXTRAL, **STEPS)
    assert single.losses()[-1] <= FALL * single.losses()[0]
    run = train(model=MIXTRAL, **SHARDED[strategy], ep_degree=2)
    assert run.code == 0, run.stderr[-3000:]
    assert run.losses() == same_as(single.losses())
    for rank in range(SHARDED[strategy]["ranks"]):
        assert run.losses(rank) == run.losses()
        actual = run.record("actual", rank)
        assert (actual["wrapper"], actual["mesh"], actual["ep_degree"]) == (*RAN[strategy], 2)
        assert actual["parameters"] == single.record("actual")["parameters"]


@pytest.mark.parametrize(
    ("family", "fields", "knobs"),
    [
        ("mixtral", {"num_local_experts": 6}, {"checkpointing": "full", "seq_len": 31, "batch_size": 3}),
        (
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            {"attention": "eager", "grad_clip": 0.1},
        ),
        ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 1}, {"grad_accum": 2}),
    ],
)
def test_other_mixtures_spread_their_experts(train, family, fields, knobs):
    """Tokens that do not divide, a norm over all slices, and an expert that every token has."""
    asked = {"model": llama(family=family, num_key_value_heads=2, **fields), "steps": 4, **knobs}
    run = train(**asked, ranks=2, strategy="tp", ep_degree=2)
    assert run.code == 0, run.stderr[-3000:]
    assert run.losses() == same_as(train(**asked).losses()), run.stderr[-3000:]
    assert run.record("actual")["ep_degree"] == 2
    assert train(**asked, ranks=2, strategy="tp").record("actual")["ep_degree"] == 1


def test_the_memory_of_spread_experts_is_predicted(train):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_local_experts": 8}
    model = {**MIXTRAL, **sizes}
    knobs = {"strategy": "tp", "ep_degree": 2, "batch_size": 16, "seq_len": 128, "steps": 3, "timing_warmup": 2}
    run = train(model=model, ranks=2, **knobs)
    assert run.code == 0, run.stderr[-3000:]
    measured = max(step["peak_allocated_bytes"] or 0 for rank in range(2) for step in run.steps(rank))
    asked = [f"model.{name}={value}" for name, value in model.items() if name != "family"]
    asked += [f"{name}={value}" for name, value in knobs.items()]
    spec = resolve("moe-small", [*asked, "precision=fp32", "optimizer=adamw", "devices=2"])
    predicted = trace_uncached(spec).predict(spec, 2).total_bytes
    assert predicted == pytest.approx(measured, rel=0.1)


def test_a_mis_sharded_run_fails_the_same_comparison(start, environment, reference):
    folder, command = start(**{**SHARDED["tp"], "steps": 4})
    broken = folder / "mis_sharded.py"
    broken.write_text(MIS_SHARDED.format(bootstrap=command[-2]))
    subprocess.run([*command[:-2], str(broken), command[-1]], env=environment, cwd=folder, timeout=400, check=True)
    losses = [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert len(losses) == 4
    assert losses != same_as(reference[:4])


def test_a_plan_of_ours_cuts_packed_matrices_and_biases(train):
    single = train(model=gpt2(), steps=4)
    run = train(model=gpt2(), ranks=2, strategy="tp", steps=4, optimizer="adamw-foreach", checkpointing="full")
    assert run.losses() == same_as(single.losses()), run.stderr[-3000:]
    assert run.record("actual")["optimizer_implementation"] == "foreach"


def test_a_table_of_tokens_is_cut_with_the_head_that_is_tied_to_it(train):
    masked = {"model": "bert", "data": {"objective": "masked-lm"}, "steps": 4}
    run = train(**masked, ranks=2, strategy="tp", grad_clip=0.1)
    assert run.losses() == same_as(train(**masked, grad_clip=0.1).losses()), run.stderr[-3000:]


def test_a_plan_cuts_the_vocabulary_where_it_divides():
    plan_for = in_worker("strategies.tensor_parallel").plan_for
    whole = a_model("bert", num_hidden_layers=1, hidden_size=16, num_attention_heads=4, intermediate_size=16)
    cut = plan_for(whole, 2)
    assert cut.looks_up == {"bert.embeddings.word_embeddings"}
    for name in ("predictions.decoder.weight", "predictions.decoder.bias", "predictions.bias"):
        assert cut.slices[f"cls.{name}"].dim == 0
    odd = plan_for(a_model("llama", num_hidden_layers=1, hidden_size=24, num_attention_heads=6, intermediate_size=9), 3)
    assert not odd.looks_up


def test_weights_may_stay_gathered_in_half_precision(train):
    run = train(ranks=2, strategy="fsdp", steps=3, batch_size=4, precision="bf16", reshard="off", grad_clip=0.5)
    assert run.code == 0, run.stderr[-3000:]
    actual = run.record("actual")
    assert (actual["reshard"], actual["param_dtype"], actual["compute_dtype"]) == ("off", "float32", "bfloat16")
    assert actual["reduce_dtype"] == "float32"
    assert run.losses() == pytest.approx(train(**STEPS).losses()[:3], rel=1e-2)


def in_worker(name):
    """A module of the worker, loaded as its own bootstrap loads it."""
    spec = importlib.util.spec_from_file_location("bootstrap", WORKER_FOLDER / "bootstrap.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return importlib.import_module(f"trainfast_worker.{name}")


def a_model(family, **fields):
    """A model of transformers, without memory."""
    config = CONFIG_MAPPING[family](vocab_size=64, **fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_degree_that_does_not_divide_and_a_transformers_without_its_exchange_are_refused(monkeypatch):
    plan_for = in_worker("strategies.tensor_parallel").plan_for
    with pytest.raises(in_worker("invalid").InvalidInput, match="tp_degree=5 does not divide the 768 columns"):
        plan_for(a_model("gpt2", n_layer=1), 5)
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(in_worker("invalid").InvalidInput, match="ep_degree needs the expert parallelism of transf"):
        in_worker("strategies.tensor_parallel").dispatch_tokens(torch.nn.Module(), None)


def test_layers_are_spread_in_order_and_fetch_their_inputs():
    """Over the two devices there are everywhere: the CPU, and torch's `meta`, which has shapes but no memory."""
    config = CONFIG_MAPPING["llama"](
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )
    knobs, cpu = in_worker("spec").knobs_of(knob_values()), torch.device("cpu")
    model = in_worker("model.build").build_model(config, "causal-lm", knobs, cpu)
    parts = in_worker("model.weights").init_in_turn(model, 0, cpu)
    in_worker("strategies.pipeline").spread_parts(model, parts, [cpu, torch.device("meta")])
    places = [next(block.parameters()).device.type for block in model.model.layers]
    # The final norm makes the last device's share the larger one.
    assert places == ["cpu", "cpu", "meta"]
    assert (model.model.embed_tokens.weight.device.type, model.lm_head.weight.device.type) == ("cpu", "meta")
    assert model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False).logits.device.type == "meta"
