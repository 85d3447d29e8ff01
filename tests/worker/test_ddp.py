"""Two ranks see the samples one process sees, and learn the same."""

import pytest

pytestmark = pytest.mark.ci
shared = pytest.mark.xdist_group("ddp")


@pytest.mark.parametrize("objective", [pytest.param("causal-lm", marks=shared), "masked-lm"])
def test_two_ranks_equal_one_process_at_the_same_global_batch(train, objective):
    model = {"causal-lm": "llama", "masked-lm": "bert"}[objective]
    single = train(model=model, data={"objective": objective})
    both = train(model=model, data={"objective": objective}, ranks=2, strategy="ddp", batch_size=2, grad_accum=2)
    assert both.code == 0, both.stderr
    assert both.losses() == pytest.approx(single.losses(), abs=1e-4)
    assert both.losses(rank=1) == both.losses()


@shared
def test_each_rank_says_what_it_is(train):
    run = train(model="llama", data={"objective": "causal-lm"}, ranks=2, strategy="ddp", batch_size=2, grad_accum=2)
    for rank in (0, 1):
        started = run.record("started", rank)
        assert (started["rank"], started["local_rank"], started["world_size"]) == (rank, rank, 2)
        actual = run.record("actual", rank)
        assert actual["wrapper"] == "DistributedDataParallel"
        assert (actual["world_size"], actual["reduce_dtype"]) == (2, "float32")
        assert [step["samples"] for step in run.steps(rank)] == [4] * 6


def test_one_rank_out_of_memory_ends_both(train):
    run = train(
        data={"kind": "random"}, ranks=2, strategy="ddp", batch_size=256, memory_limit_bytes=[8 << 30, 64 << 20]
    )
    assert run.code != 0
    assert run.record("exception", rank=1)["is_oom"] is True
    assert not run.records("finished", rank=0)
