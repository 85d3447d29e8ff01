"""What a person is told to turn when memory ended."""

from trainfast_runner.memory.oom_advice import cheapest
from trainfast_runner.settings.spec import resolve

ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes"


def test_a_batch_far_too_large_is_brought_down_to_where_its_request_fits() -> None:
    knobs = resolve("tiny-llama", ["batch_size=4096"]).knobs
    fixes = cheapest(knobs, "cpu", "forward", ALLOCATOR, limit_bytes=2**30)
    assert (fixes[0].knob, fixes[0].value) == ("batch_size", "8")
    assert "grad_accum=512" in fixes[0].costs
    assert len(fixes) == 3
    stages = {"parameters": None, "layers": [2, 2, 6, 2], "hidden_size": 96, "vocab_size": None}
    assert cheapest(knobs, "cpu", "forward", ALLOCATOR, limit_bytes=2**30, model=stages) == fixes


def test_in_the_optimizer_step_the_states_come_first() -> None:
    knobs = resolve("bert-large").knobs
    fixes = cheapest(knobs, "cuda", "optimizer")
    assert [fix.value for fix in fixes] == ["adamw-fused", "adamw-8bit", "adafactor"]


def test_nothing_is_advised_that_is_already_set() -> None:
    knobs = resolve(
        "tiny-llama", ["batch_size=1", "checkpointing=full", "precision=bf16-pure", "optimizer=sgd", "seq_len=64"]
    ).knobs
    assert cheapest(knobs, "cuda", "forward") == []


TINY = {"parameters": 3_344_064, "layers": 4, "hidden_size": 192, "vocab_size": 4096}


def test_the_first_cure_is_sized_to_the_shortage_and_the_rest_says_that_it_is_not_enough() -> None:
    knobs = resolve("tiny-llama", ["batch_size=4096", "memory_limit=1GiB"]).knobs
    first, *others = cheapest(knobs, "cpu", "forward", "you tried to allocate 402653184 bytes", model=TINY)
    assert (first.knob, first.value) == ("batch_size", "16")
    assert "not enough" not in first.saves
    assert others
    assert all("probably not enough alone" in fix.saves for fix in others)


def test_before_the_optimizer_step_states_too_small_to_matter_are_not_proposed() -> None:
    knobs = resolve("tiny-llama", ["batch_size=1", "checkpointing=full", "seq_len=64", "memory_limit=1GiB"]).knobs
    assert not [fix for fix in cheapest(knobs, "cpu", "forward", model=TINY) if fix.knob == "optimizer"]
    large = {**TINY, "parameters": 30_000_000}
    said = [fix.saves for fix in cheapest(knobs, "cpu", "forward", model=large) if fix.value == "adamw-8bit"]
    assert said
    assert said[0].startswith("frees 6 bytes a parameter, 172 MiB")


def test_a_gpu_says_its_own_limit_and_the_batch_goes_below_half_of_it() -> None:
    knobs = resolve("tiny-llama", ["batch_size=4096"]).knobs
    reason = "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1 is"
    assert cheapest(knobs, "cuda", "forward", reason, model=TINY)[0].value == "512"


def test_while_the_model_is_built_a_smaller_batch_is_no_cure() -> None:
    knobs = resolve("bert-large").knobs
    assert [fix.value for fix in cheapest(knobs, "cuda", "model")] == ["bf16-pure"]
