"""A model cut into stages learns what the whole model learns, with every schedule and in every family."""

import pytest
import torch
from worker_knobs import gpt2, worker_knobs

from trainfast_runner.worker.model.build import build_model
from trainfast_runner.worker.model.model_config import resolve_config
from trainfast_runner.worker.model.weights import init_weights
from trainfast_runner.worker.strategies.pipeline import balance, cut

pytestmark = pytest.mark.ci

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1024}
WIDE = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
LLAMA = {"family": "llama", **WIDE, "max_position_embeddings": 128}
TRAINED = {"lr": 1e-2, "steps": 10}
# Every step is clipped, and SGD does not hide it: the norm is right over all stages, or the losses are not.
CLIPPED = {"lr": 1.5, "optimizer": "sgd", "grad_clip": 0.5, "steps": 14, "data": {"kind": "text"}}


def same_losses(run, single):
    assert run.code == 0, run.stderr[-4000:]
    assert single.losses()[-1] < 0.9 * single.losses()[0], "nothing was learnt: equal losses would prove nothing"
    assert (run.losses(), run.losses(rank=1)) == (pytest.approx(single.losses(), rel=1e-4), run.losses())


def test_gpipe_with_accumulation(train):
    single = train(model=LLAMA, **TRAINED)
    run = train(model=LLAMA, ranks=2, strategy="pp", batch_size=4, grad_accum=2, micro_batches=2, **TRAINED)
    same_losses(run, single)
    for rank in (0, 1):
        actual = run.record("actual", rank)
        assert actual["wrapper"] == "ScheduleGPipe"
        assert (actual["pipeline_stages"], actual["mesh"]) == (2, {"dp": 1, "pp": 2})
        assert actual["compute_dtype"] == "float32"
        for field in ("parameters", "model_flops_per_sample", "layers"):
            assert actual[field] == single.record("actual")[field], f"{field} is to describe the whole model"
        step = run.steps(rank)[-1]
        assert step["forward_ms"] is step["backward_ms"] is None
        assert step["data_ms"] + step["optimizer_ms"] + step["other_ms"] == pytest.approx(step["step_ms"])
        assert step["samples"] == 8


def test_interleaved_with_checkpointing(train):
    single = train(model=LLAMA, **TRAINED)
    run = train(model=LLAMA, ranks=2, strategy="pp", pp_schedule="interleaved", checkpointing="full", **TRAINED)
    same_losses(run, single)
    actual = run.record("actual")
    assert (actual["wrapper"], actual["pipeline_stages"]) == ("ScheduleInterleaved1F1B", 4)
    assert actual["checkpointing"] == "full"


def test_two_pipelines_side_by_side_with_tied_embeddings(train):
    single = train(model=gpt2(), **CLIPPED)
    run = train(model=gpt2(), ranks=4, strategy="ddp+pp", pp_schedule="1f1b", batch_size=4, micro_batches=2, **CLIPPED)
    same_losses(run, single)
    assert run.losses(rank=3) == run.losses()
    actual = run.record("actual", rank=3)
    assert (actual["wrapper"], actual["mesh"]) == ("Schedule1F1B", {"dp": 2, "pp": 2})
    assert actual["reduce_dtype"] == "float32"
    assert [step["samples"] for step in run.steps(rank=3)] == [4] * 14


def test_fp16_with_the_loss_scale_agreed_on_by_all_stages(train):
    run = train(model="bert", data={"objective": "masked-lm"}, ranks=2, strategy="pp", precision="fp16", steps=4)
    assert run.code == 0, run.stderr[-4000:]
    assert run.record("actual", rank=1)["compute_dtype"] == "float16"
    assert [step["loss_scale"] for step in run.steps()] == [step["loss_scale"] for step in run.steps(rank=1)]
    assert run.losses()[-1] < run.losses()[0]


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        (LLAMA, "causal-lm"),
        ({**LLAMA, "tie_word_embeddings": True}, "causal-lm"),
        ({"family": "mistral", **WIDE, "sliding_window": 8}, "causal-lm"),
        ({"family": "qwen3", **WIDE, **SLIDING}, "causal-lm"),
        ({"family": "mixtral", **WIDE, "num_local_experts": 4, "sliding_window": None}, "causal-lm"),
        (gpt2(n_layer=4), "causal-lm"),
        ({"family": "bert", **SMALL, "intermediate_size": 128}, "masked-lm"),
        ({"family": "bert", **SMALL, "intermediate_size": 128}, "sequence-classification"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["family"],
)
def test_stages_in_a_row_compute_what_the_model_computes(model, objective):
    cpu = torch.device("cpu")
    whole = build_model(resolve_config(model), objective, worker_knobs(seq_len=32), cpu).eval()
    init_weights(whole, 0, cpu)
    ids = torch.randint(0, 1024, (2, 32), generator=torch.Generator().manual_seed(0))
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        division = cut(whole, 3, 32)
        stages = [division.stage(index) for index in range(3)]
        found = ids
        for stage in stages:
            found = stage(found)
    assert torch.equal(found, expected)
    alone = cut(build_model(resolve_config(model), objective, worker_knobs(seq_len=32), cpu), 3, 32)
    init_weights(alone.model, 0, cpu, alone.stage(1).modules())
    assert sum(parameter.numel() for parameter in alone.model.parameters()) == parameters
    initialized = {name: p for name, p in alone.model.named_parameters() if p.dim() > 1 and not p.is_meta}
    assert {id(values) for values in initialized.values()} <= {id(values) for values in alone.stage(1).parameters()}
    assert all(torch.equal(values, whole.get_parameter(name)) for name, values in initialized.items())
    assert not any(values.is_meta for values in alone.stage(1).parameters())


def test_stages_cost_about_the_same():
    assert balance([1.0] * 8, 0.0, 4) == (0, 2, 4, 6, 8)
    assert balance([1.0] * 8, 3.0, 2) == (0, 5, 8), "the logits cost as much as layers"
    assert balance([1.0] * 4, 50.0, 3) == (0, 1, 3, 4) or balance([1.0] * 4, 50.0, 3) == (0, 2, 3, 4)
