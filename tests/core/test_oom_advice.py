"""What a person is told to turn when memory ended."""

from trainfast_runner.oom_advice import cheapest
from trainfast_runner.spec import resolve

ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes"


def test_a_batch_far_too_large_is_brought_down_to_where_its_request_fits() -> None:
    knobs = resolve("tiny-llama", ["batch_size=4096"]).knobs
    fixes = cheapest(knobs, "cpu", "forward", ALLOCATOR, limit_bytes=2**30)
    assert (fixes[0].knob, fixes[0].value) == ("batch_size", "16")
    assert "grad_accum=256" in fixes[0].costs
    assert len(fixes) == 3


def test_in_the_optimizer_step_the_states_come_first() -> None:
    knobs = resolve("bert-large").knobs
    fixes = cheapest(knobs, "cuda", "optimizer")
    assert [fix.value for fix in fixes] == ["adamw-fused", "adamw-8bit", "adafactor"]


def test_nothing_is_advised_that_is_already_set() -> None:
    knobs = resolve(
        "tiny-llama", ["batch_size=1", "checkpointing=full", "precision=bf16-pure", "optimizer=sgd", "seq_len=64"]
    ).knobs
    assert cheapest(knobs, "cuda", "forward") == []
