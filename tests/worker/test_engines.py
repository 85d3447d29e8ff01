"""DDP, Accelerate and the Trainer learn what one native process learns, and are on record as what they are."""

import pytest

pytestmark = pytest.mark.ci

DDP = {"ranks": 2, "strategy": "ddp", "batch_size": 2, "grad_accum": 2}
MASKED = {"model": "bert", "data": {"objective": "masked-lm"}, "lr_schedule": "linear", "grad_clip": 0.5}
ENGINES = ("accelerate", "trainer")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_loss_curve_is_the_native_one_and_a_phase_that_the_engine_does_not_split_is_null(train, engine):
    native = train(steps=10, weight_decay=0.1)
    other = train(steps=10, weight_decay=0.1, engine=engine)
    assert other.code == 0, other.stderr
    assert native.losses()[-1] < 0.9 * native.losses()[0]
    assert other.losses() == pytest.approx(native.losses(), rel=1e-4)
    steps = other.steps()
    assert [step["step"] for step in steps] == list(range(1, 11))
    for step in steps:
        measured = [step[f"{name}_ms"] for name in ("data", "forward", "backward", "optimizer", "other")]
        assert (step["forward_ms"] is None) == (step["backward_ms"] is None) == (engine == "trainer")
        assert min(step["data_ms"], step["optimizer_ms"]) > 0
        known = sum(value for value in measured if value is not None)
        assert known == pytest.approx(step["step_ms"], abs=1e-6)
        if step["warmup"]:
            assert step["peak_allocated_bytes"] == max(step["phase_peaks"].values()) > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_that_count_different_targets_learn_the_same(train, engine):
    native = train(**MASKED)
    other = train(**MASKED, **DDP, engine=engine, optimizer="adamw-foreach")
    assert other.code == 0, other.stderr
    assert (other.losses(), other.losses(rank=1)) == (pytest.approx(native.losses(), rel=1e-4), other.losses())
    assert [step["lr"] for step in other.steps()] == pytest.approx([step["lr"] for step in native.steps()])
    for rank in (0, 1):
        actual = other.record("actual", rank)
        assert (actual["engine"], actual["wrapper"], actual["world_size"]) == (engine, "DistributedDataParallel", 2)
        assert (actual["optimizer"], actual["optimizer_implementation"]) == ("AdamW", "foreach")
        assert [step["samples"] for step in other.steps(rank)] == [4] * 6


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
