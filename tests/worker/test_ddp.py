"""Two ranks see the samples one process sees, and learn the same."""

import pytest

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(("model", "objective"), [("llama", "causal-lm"), ("bert", "masked-lm")])
def test_two_ranks_equal_one_process_at_the_same_global_batch_and_say_what_they_are(train, model, objective):
    single = train(model=model, data={"objective": objective})
    both = train(model=model, data={"objective": objective}, ranks=2, strategy="ddp", batch_size=2, grad_accum=2)
    assert both.code == 0, both.stderr
    assert both.losses() == pytest.approx(single.losses(), abs=1e-4)
    for rank in (0, 1):
        assert both.losses(rank) == both.losses()
        started, actual = both.record("started", rank), both.record("actual", rank)
        assert (started["rank"], started["local_rank"], started["world_size"]) == (rank, rank, 2)
        assert (actual["wrapper"], actual["world_size"]) == ("DistributedDataParallel", 2)
        assert actual["reduce_dtype"] == "float32"
        assert [step["samples"] for step in both.steps(rank)] == [4] * 6


def test_one_rank_out_of_memory_ends_both(train):
    run = train(data={"kind": "random"}, ranks=2, strategy="ddp", batch_size=256, memory_limit_bytes=[1 << 33, 1 << 26])
    assert run.code != 0
    assert run.record("exception", rank=1)["is_oom"] is True
    assert not run.records("finished", rank=0)
