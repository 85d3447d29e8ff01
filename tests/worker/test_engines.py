"""The Accelerate loop and the Trainer learn what the native loop learns, and are on record as what they are."""

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
