"""The advice after an out-of-memory error."""

import pytest

from trainfast_runner.memory import oom_changes
from trainfast_runner.memory.oom_changes import best_of_each_knob, defragmenting, knob_changes, knob_of, useful_first
from trainfast_runner.settings.spec import resolve


def changes(preset, *asked, device="cuda", phase="forward", **more):
    """The changes of the preset's knobs with these settings."""
    return knob_changes(resolve(preset, asked).knobs, device, phase, **more)


def values(found, knob):
    return [change.settings[knob] for change in found if knob in change.settings]


@pytest.mark.parametrize(
    ("batch", "value", "saves", "costs"),
    [
        (4096, "2048", "activations to 50 %", "grad_accum=2 keeps the global batch"),
        (6, "4", "activations to 67 %", "little; the global batch becomes 0.67 times as large"),
    ],
    ids=["halved", "not a divisor"],
)
def test_a_batch_that_is_brought_down_says_what_becomes_of_the_global_batch(batch, value, saves, costs):
    found = changes("tiny-llama", f"batch_size={batch}", device="cpu")
    [smaller] = [change for change in found if "batch_size" in change.settings]
    assert (smaller.settings["batch_size"], smaller.saves) == (value, saves)
    assert costs in smaller.costs


def test_in_the_optimizer_step_the_states_come_first_and_each_knob_is_named_once():
    found = useful_first(changes("bert-large", phase="optimizer"), "optimizer")
    assert values(found, "optimizer") == ["adamw-fused", "adamw-8bit", "adafactor"]
    assert list(map(knob_of, found[:3])) == ["optimizer"] * 3
    before = [oom_changes.frees_states(change) for change in useful_first(changes("bert-large"), "forward")]
    assert before == sorted(before)
    assert "adamw-fused" not in values(changes("bert-large"), "optimizer")
    found = best_of_each_knob(changes("bert-large", "batch_size=8"), "forward")
    assert list(map(knob_of, found)) == ["batch_size", "precision", "checkpointing", "optimizer", "seq_len"]
    assert values(found, "optimizer") == ["adamw-8bit"]
    after = best_of_each_knob(changes("bert-large", "batch_size=8", phase="optimizer"), "optimizer")
    assert list(map(knob_of, after))[:2] == ["optimizer", "precision"]


@pytest.mark.parametrize(("seq_len", "advised"), [(127, []), (128, ["64"])])
def test_no_sequence_shorter_than_the_shortest_is_advised(seq_len, advised):
    assert values(changes("tiny-llama", f"seq_len={seq_len}", device="cpu"), "seq_len") == advised


def test_nothing_is_advised_that_is_set_and_no_batch_while_the_model_is_built():
    least = ("batch_size=1", "checkpointing=full", "precision=bf16-pure", "optimizer=sgd", "seq_len=64")
    assert changes("tiny-llama", *least) == []
    assert [change.settings for change in changes("bert-large", phase="model")] == [{"precision": "bf16-pure"}]


@pytest.mark.parametrize(
    ("strategies", "optimizers"),
    [(["ddp"], ["adamw-8bit", "adafactor"]), (["zero1", "zero2"], ["adamw-8bit"]), (["fsdp", "zero3"], [])],
)
def test_no_optimizer_is_advised_that_the_strategy_refuses(strategies, optimizers):
    for strategy in strategies:
        found = changes("bert-large", f"strategy={strategy}", phase="backward")
        assert values(found, "optimizer") == optimizers, strategy


@pytest.mark.parametrize(("batch", "parts", "advised"), [(16, 4, ["8"]), (12, 3, ["6"]), (4, 4, [])])
def test_a_pipeline_s_smaller_batch_is_whole_micro_batches(batch, parts, advised):
    pipeline = ("strategy=pp", f"batch_size={batch}", f"micro_batches={parts}")
    assert values(changes("bert-large", *pipeline, phase="backward"), "batch_size") == advised


@pytest.mark.parametrize(("newest", "advised"), [("7.0", ["fp16"]), ("9.0", ["bf16", "bf16-pure"])])
def test_before_ampere_fp16_is_proposed_and_no_bf16(newest, advised):
    found = changes("bert-large", "precision=fp32", capabilities=["8.0", newest])
    assert values(found, "precision") == advised


LLAMA = {"kind": ("llama", "causal-lm")}


def test_the_loss_in_chunks_and_every_second_layer_are_advised_where_the_model_has_them():
    [chunked] = [change for change in changes("tiny-llama", **LLAMA) if "loss" in change.settings]
    assert (chunked.settings, chunked.saves) == ({"loss": "chunked"}, "frees seven eighths of the logits")
    assert values(changes("tiny-llama"), "loss") == []
    assert values(changes("tiny-llama", kind=("llama", "image-classification")), "loss") == []
    assert values(changes("tiny-llama", kind=("cohere", "causal-lm")), "loss") == []
    for refused in ("loss=chunked", "strategy=pp", "engine=trainer"):
        assert values(changes("tiny-llama", refused, **LLAMA), "loss") == [], refused
    found = changes("tiny-llama", **LLAMA)
    assert values(found, "checkpointing") == ["every-2", "full"]
    assert values(best_of_each_knob(found, "backward"), "checkpointing") == ["full"]
    assert values(changes("tiny-llama", "checkpointing=every-2"), "checkpointing") == ["full"]
    assert values(changes("tiny-llama", "strategy=pp"), "checkpointing") == ["full"]


@pytest.mark.parametrize(
    ("device", "allocator", "pieces", "advised"),
    [("cuda", "default", 70, 1), ("cuda", "default", 60, 0), ("cuda", "expandable", 70, 0), ("cpu", "default", 70, 0)],
)
def test_a_request_that_fits_the_pieces_asks_for_the_expandable_allocator(device, allocator, pieces, advised):
    found = defragmenting({"allocator": allocator}, device, {"asked": 64 << 20, "reserved": pieces << 20})
    assert [change.settings for change in found] == [{"allocator": "expandable"}] * advised
    assert defragmenting({"allocator": allocator}, device, {}) == []
