"""The advice after an out-of-memory error."""

from trainfast_runner.memory.oom_changes import best_of_each_knob, knob_changes, useful_first
from trainfast_runner.settings.spec import resolve


def test_a_batch_is_halved_and_the_global_batch_kept():
    knobs = resolve("tiny-llama", ["batch_size=4096"]).knobs
    [smaller] = [change for change in knob_changes(knobs, "cpu", "forward") if change.knob == "batch_size"]
    assert (smaller.value, smaller.saves) == ("2048", "activations to 50 %")
    assert "grad_accum=2 keeps the global batch" in smaller.costs


def test_a_smaller_batch_that_does_not_divide_the_global_batch_says_so():
    knobs = resolve("tiny-llama", ["batch_size=6"]).knobs
    [smaller] = [change for change in knob_changes(knobs, "cpu", "forward", 5 / 6) if change.knob == "batch_size"]
    assert (smaller.value, smaller.costs) == ("4", "little; the global batch becomes 0.67 times as large")


def test_a_batch_far_too_large_is_brought_down_to_where_its_request_fits():
    knobs = resolve("tiny-llama", ["batch_size=4096"]).knobs
    [smaller] = [change for change in knob_changes(knobs, "cpu", "forward", 1 / 6) if change.knob == "batch_size"]
    assert (smaller.value, smaller.saves) == ("512", "activations to 12 %")
    assert "grad_accum=8 keeps the global batch" in smaller.costs


def test_in_the_optimizer_step_the_states_come_first_and_before_it_the_activations():
    knobs = resolve("bert-large").knobs
    found = useful_first(knob_changes(knobs, "cuda", "optimizer"), "optimizer")
    assert [change.value for change in found][:3] == ["adamw-fused", "adamw-8bit", "adafactor"]
    before = [change.frees_states for change in useful_first(knob_changes(knobs, "cuda", "forward"), "forward")]
    assert before == sorted(before)
    assert "adamw-fused" not in [change.value for change in knob_changes(knobs, "cuda", "forward")]


def test_without_a_model_the_advice_names_every_knob_that_frees_memory_once():
    knobs = resolve("bert-large", ["batch_size=8"]).knobs
    before = [
        (change.knob, change.value) for change in best_of_each_knob(knob_changes(knobs, "cuda", "forward"), "forward")
    ]
    assert [knob for knob, _ in before] == ["batch_size", "precision", "checkpointing", "optimizer", "seq_len"]
    assert dict(before)["optimizer"] == "adamw-8bit"
    after = [change.knob for change in best_of_each_knob(knob_changes(knobs, "cuda", "optimizer"), "optimizer")]
    assert after[:2] == ["optimizer", "precision"]


def test_no_sequence_shorter_than_the_shortest_is_advised():
    for seq_len, advised in ((127, []), (128, ["64"])):
        knobs = resolve("tiny-llama", [f"seq_len={seq_len}"]).knobs
        assert [change.value for change in knob_changes(knobs, "cpu", "forward") if change.knob == "seq_len"] == advised


def test_nothing_is_advised_that_is_already_set():
    knobs = resolve(
        "tiny-llama", ["batch_size=1", "checkpointing=full", "precision=bf16-pure", "optimizer=sgd", "seq_len=64"]
    ).knobs
    assert knob_changes(knobs, "cuda", "forward") == []


def test_no_optimizer_is_advised_that_the_strategy_refuses():
    def optimizers(strategy):
        knobs = {**resolve("bert-large").knobs, "strategy": strategy}
        return [change.value for change in knob_changes(knobs, "cuda", "backward") if change.knob == "optimizer"]

    assert optimizers("ddp") == ["adamw-8bit", "adafactor"]
    assert optimizers("zero1") == optimizers("zero2") == ["adamw-8bit"]
    assert optimizers("fsdp") == optimizers("zero3") == []


def test_a_pipeline_s_smaller_batch_is_whole_micro_batches():
    def smaller(batch, micro_batches, share=1.0):
        pipeline = {"strategy": "pp", "batch_size": batch, "micro_batches": micro_batches}
        knobs = {**resolve("bert-large").knobs, **pipeline}
        return [
            change.value for change in knob_changes(knobs, "cuda", "backward", share) if change.knob == "batch_size"
        ]

    assert smaller(16, 4) == ["8"]
    assert smaller(16, 4, 0.2) == ["4"]
    assert smaller(12, 3) == ["6"]
    assert smaller(4, 4) == []


def test_while_the_model_is_built_a_smaller_batch_is_no_cure():
    knobs = resolve("bert-large").knobs
    assert [change.value for change in knob_changes(knobs, "cuda", "model")] == ["bf16-pure"]


def test_before_ampere_fp16_is_proposed_and_no_bf16():
    knobs = resolve("bert-large").knobs
    found = knob_changes({**knobs, "precision": "fp32"}, "cuda", "forward", compute_capabilities=["8.0", "7.0"])
    assert [change.value for change in found if change.knob == "precision"] == ["fp16"]
    found = knob_changes({**knobs, "precision": "fp32"}, "cuda", "forward", compute_capabilities=["8.0", "9.0"])
    assert [change.value for change in found if change.knob == "precision"] == ["bf16", "bf16-pure"]
