"""Stages cut by tensor parallelism, side by side in DDP or FSDP: eight processes learn what one learns."""

import pytest
from worker_knobs import gpt2

pytestmark = pytest.mark.longest

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1024}
LLAMA = {"family": "llama", **SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 128}
BERT = {"family": "bert", **SMALL, "intermediate_size": 128}
TRAINED = {"lr": 1e-2, "steps": 10}
# Every step is clipped, and SGD does not hide it: the norm is right over slices, stages and shards, or losses are not.
CLIPPED = {"lr": 1.5, "optimizer": "sgd", "grad_clip": 0.5, "steps": 14, "data": {"kind": "text"}}
MESH = {"dp": 2, "pp": 2, "tp": 2}
AROUND = {"ddp+tp+pp": "DTensor+DistributedDataParallel", "fsdp+tp+pp": "DTensor+FSDPModule"}


def same_losses(run, single):
    assert run.code == 0, run.stderr[-4000:]
    assert single.losses()[-1] < 0.9 * single.losses()[0], "nothing was learnt: equal losses would prove nothing"
    for rank in range(8):
        assert run.losses(rank) == pytest.approx(single.losses(), rel=1e-4)


@pytest.mark.parametrize("strategy", AROUND)
def test_the_mesh_has_three_axes(train, strategy):
    single = train(model=LLAMA, **TRAINED)
    run = train(model=LLAMA, ranks=8, strategy=strategy, batch_size=4, micro_batches=2, **TRAINED)
    same_losses(run, single)
    for rank in range(8):
        actual = run.record("actual", rank)
        assert (actual["wrapper"], actual["mesh"]) == (f"{AROUND[strategy]}+ScheduleGPipe", MESH)
        assert (actual["pipeline_stages"], actual["reduce_dtype"]) == (2, "float32")
        assert actual.get("reshard") == ("on" if strategy == "fsdp+tp+pp" else None)
        for field in ("parameters", "model_flops_per_sample", "layers"):
            assert actual[field] == single.record("actual")[field], f"{field} is to describe the whole model"
        assert {step["samples"] for step in run.steps(rank)} == {4}


@pytest.mark.parametrize("strategy", AROUND)
def test_the_norm_is_clipped_over_all_axes_with_tied_embeddings(train, strategy):
    single = train(model=gpt2(), **CLIPPED)
    more = {"batch_size": 2, "grad_accum": 2, "micro_batches": 2, **CLIPPED}
    run = train(model=gpt2(), ranks=8, strategy=strategy, pp_schedule="1f1b", **more)
    same_losses(run, single)
    assert run.record("actual", 7)["wrapper"] == f"{AROUND[strategy]}+Schedule1F1B"
    assert run.record("actual", 7)["parameters"] == single.record("actual")["parameters"]


@pytest.mark.parametrize("strategy", AROUND)
def test_two_stages_a_rank_with_checkpointing(train, strategy):
    single = train(model=LLAMA, **TRAINED)
    more = {"batch_size": 4, "micro_batches": 2, "checkpointing": "full", **TRAINED}
    run = train(model=LLAMA, ranks=8, strategy=strategy, pp_schedule="interleaved", **more)
    same_losses(run, single)
    actual = run.record("actual")
    assert (actual["pipeline_stages"], actual["checkpointing"]) == (4, "full")


@pytest.mark.parametrize("strategy", AROUND)
def test_fp16_with_the_loss_scale_agreed_on_by_all_ranks(train, strategy):
    asked = {"batch_size": 4, "micro_batches": 2, "precision": "fp16", "steps": 4, "data": {"objective": "masked-lm"}}
    run = train(model=BERT, ranks=8, strategy=strategy, **asked)
    assert run.code == 0, run.stderr[-4000:]
    assert run.record("actual", rank=7)["compute_dtype"] == "float16"
    assert [step["loss_scale"] for step in run.steps()] == [step["loss_scale"] for step in run.steps(rank=7)]
    assert run.losses()[-1] < run.losses()[0]
