"""The advice after an out-of-memory error."""

from trainfast_runner.memory.oom.fixes import best_of_each_knob, fixes, useful_first
from trainfast_runner.settings.spec import resolve


def test_a_batch_is_halved_and_the_global_batch_kept() -> None:
    knobs = resolve("tiny-llama", ["batch_size=4096"]).knobs
    [smaller] = [fix for fix in fixes(knobs, "cpu", "forward") if fix.knob == "batch_size"]
    assert (smaller.value, smaller.saves) == ("2048", "activations to 50 %")
    assert "grad_accum=2 keeps the global batch" in smaller.costs


def test_a_smaller_batch_that_does_not_divide_the_global_batch_says_so() -> None:
    knobs = resolve("tiny-llama", ["batch_size=6"]).knobs
    [smaller] = [fix for fix in fixes(knobs, "cpu", "forward", 5 / 6) if fix.knob == "batch_size"]
    assert smaller.value == "4"
    assert smaller.costs == "little; the global batch becomes 0.67 times as large"


def test_a_batch_far_too_large_is_brought_down_to_where_its_request_fits() -> None:
    knobs = resolve("tiny-llama", ["batch_size=4096"]).knobs
    [smaller] = [fix for fix in fixes(knobs, "cpu", "forward", 1 / 6) if fix.knob == "batch_size"]
    assert (smaller.value, smaller.saves) == ("512", "activations to 12 %")
    assert "grad_accum=8 keeps the global batch" in smaller.costs


def test_in_the_optimizer_step_the_states_come_first_and_before_it_the_activations() -> None:
    knobs = resolve("bert-large").knobs
    found = useful_first(fixes(knobs, "cuda", "optimizer"), "optimizer")
    assert [fix.value for fix in found][:3] == ["adamw-fused", "adamw-8bit", "adafactor"]
    before = [fix.frees_states for fix in useful_first(fixes(knobs, "cuda", "forward"), "forward")]
    assert before == sorted(before)
    assert "adamw-fused" not in [fix.value for fix in fixes(knobs, "cuda", "forward")]


def test_without_a_model_the_advice_names_every_knob_that_frees_memory_once() -> None:
    knobs = resolve("bert-large", ["batch_size=8"]).knobs
    before = [(fix.knob, fix.value) for fix in best_of_each_knob(fixes(knobs, "cuda", "forward"), "forward")]
    assert [knob for knob, _ in before] == ["batch_size", "precision", "checkpointing", "optimizer", "seq_len"]
    assert dict(before)["optimizer"] == "adamw-8bit"
    after = [fix.knob for fix in best_of_each_knob(fixes(knobs, "cuda", "optimizer"), "optimizer")]
    assert after[:2] == ["optimizer", "precision"]


def test_no_sequence_shorter_than_the_shortest_is_advised() -> None:
    for seq_len, advised in ((127, []), (128, ["64"])):
        knobs = resolve("tiny-llama", [f"seq_len={seq_len}"]).knobs
        assert [fix.value for fix in fixes(knobs, "cpu", "forward") if fix.knob == "seq_len"] == advised


def test_nothing_is_advised_that_is_already_set() -> None:
    knobs = resolve(
        "tiny-llama", ["batch_size=1", "checkpointing=full", "precision=bf16-pure", "optimizer=sgd", "seq_len=64"]
    ).knobs
    assert fixes(knobs, "cuda", "forward") == []


def test_no_optimizer_is_advised_that_the_strategy_refuses() -> None:
    def optimizers(strategy: str) -> list[str]:
        knobs = {**resolve("bert-large").knobs, "strategy": strategy}
        return [fix.value for fix in fixes(knobs, "cuda", "backward") if fix.knob == "optimizer"]

    assert optimizers("ddp") == ["adamw-8bit", "adafactor"]
    assert optimizers("zero1") == optimizers("zero2") == ["adamw-8bit"]
    assert optimizers("fsdp") == optimizers("zero3") == []


def test_a_pipeline_s_smaller_batch_is_whole_micro_batches() -> None:
    def smaller(batch: int, micro_batches: int, share: float = 1.0) -> list[str]:
        pipeline = {"strategy": "pp", "batch_size": batch, "micro_batches": micro_batches}
        knobs = {**resolve("bert-large").knobs, **pipeline}
        return [fix.value for fix in fixes(knobs, "cuda", "backward", share) if fix.knob == "batch_size"]

    assert smaller(16, 4) == ["8"]
    assert smaller(16, 4, 0.2) == ["4"]
    assert smaller(12, 3) == ["6"]
    assert smaller(4, 4) == []


def test_while_the_model_is_built_a_smaller_batch_is_no_cure() -> None:
    knobs = resolve("bert-large").knobs
    assert [fix.value for fix in fixes(knobs, "cuda", "model")] == ["bf16-pure"]


def test_before_ampere_fp16_is_proposed_and_no_bf16() -> None:
    knobs = resolve("bert-large").knobs
    found = fixes({**knobs, "precision": "fp32"}, "cuda", "forward", compute_capabilities=["8.0", "7.0"])
    assert [fix.value for fix in found if fix.knob == "precision"] == ["fp16"]
    found = fixes({**knobs, "precision": "fp32"}, "cuda", "forward", compute_capabilities=["8.0", "9.0"])
    assert [fix.value for fix in found if fix.knob == "precision"] == ["bf16", "bf16-pure"]
