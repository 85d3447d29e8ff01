"""Every out-of-memory explained: the phase, what had grown, what was missing, who else was there, and what helps."""

import msgspec
import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.memory import oom_changes
from trainfast_runner.memory.corrections import DeviceCorrections
from trainfast_runner.memory.oom import OutOfMemory, explain_run
from trainfast_runner.memory.oom_changes import (
    best_of_each_knob,
    defragmenting,
    knob_changes,
    knob_of,
    settings_to_trace,
    useful_first,
)
from trainfast_runner.records.result import RunError
from trainfast_runner.records.run_file import ClockAnchor, Prediction, RunFile
from trainfast_runner.records.run_lines import Event
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import RunSpec, resolve

MIB = 2**20
BEYOND = 33 * MIB
"""Bytes that a limit on a CPU needs beside the predicted bytes of a change, with 3 % of itself in them."""
ON_CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes. Error code 12"
ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 512.00 MiB is"
    " free. Process 4711 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has 38.50 GiB memory"
    " in use. Of the allocated memory 36.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but"
    " unallocated."
)


def explain(run, error, reason, model_of, **records):
    return explain_run(OutOfMemory(run=run, reason=reason, error=error, **records), model_of)


class Arithmetic:
    """10 MiB a sample, halved by bf16, a tenth with checkpointing; 100 MiB of parameters and twice that of states."""

    corrections = DeviceCorrections()

    def correction_for(self, spec, ranks):
        """Nothing has been measured."""

    def predict(self, spec, ranks=1):
        knobs = spec.knobs
        share = (0.1 if knobs["checkpointing"] == "full" else 1) * (0.5 if knobs["precision"] == "bf16" else 1)
        activations = int(10 * MIB * share * int(str(knobs["batch_size"])))
        states = (40 if knobs["optimizer"] == "adafactor" else 200) * MIB
        forward = {"params": 100 * MIB, "optimizer": states, "activations": activations, "temporary": 10 * MIB}
        step = {"params": 100 * MIB, "optimizer": states, "grads": 100 * MIB, "temporary": 50 * MIB}
        phase, at = max((("forward_backward", forward), ("optimizer", step)), key=lambda one: sum(one[1].values()))
        sizes = {f"{of}_bytes": at.get(of, 0) for of in ("params", "grads", "optimizer", "activations", "temporary")}
        return Prediction(
            total_bytes=sum(at.values()), communication_bytes=0, phase=phase,
            phases={"forward_backward": forward, "optimizer": step}, basis="arithmetic", **sizes,
        )  # fmt: skip

    def max_batch(self, spec, ranks, limit_bytes):
        def needed(batch):
            knobs = {**spec.knobs, "batch_size": batch}
            return self.predict(RunSpec(spec.preset, None, "", {}, spec.data, knobs)).total_bytes

        return max((batch for batch in range(1, 200) if needed(batch) <= limit_bytes), default=0)


def known(spec):
    return Arithmetic()


def a_run(limit=512 * MIB, device="cpu", **knobs):
    return RunFile(
        run_id="r",
        preset="tiny-llama",
        knobs={**defaults(), "batch_size": 64, "seq_len": 128, **knobs},
        device=device,
        memory_limit_bytes=None if limit is None else [limit],
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
    )


def error(phase, rank=0):
    return RunError(rank=rank, phase=phase, type="RuntimeError", message=ON_CPU)


def test_an_end_in_backward_says_what_had_grown_and_how_much_was_missing():
    found = explain(a_run(), error("backward"), ON_CPU, known)
    assert (found.phase, found.grown, found.grown_bytes) == ("backward", "activations", 640 * MIB)
    assert (found.needed_bytes, found.limit_bytes, found.missing_bytes) == (950 * MIB, 512 * MIB, 438 * MIB)
    assert found.basis == "arithmetic"
    own = msgspec.structs.replace(a_run(), predicted=Prediction(total_bytes=900 * MIB))
    assert explain(own, error("backward"), ON_CPU, known).needed_bytes == 900 * MIB, "as the run's record has it"
    grown = {phase: explain(a_run(), error(phase), ON_CPU, known).grown for phase in ("optimizer", "model")}
    assert grown == {"optimizer": "optimizer", "model": "params"}
    ranks = msgspec.structs.replace(a_run(), memory_limit_bytes=[900 * MIB, 400 * MIB], world_size=2)
    assert explain(ranks, error("backward", rank=1), ON_CPU, known).limit_bytes == 400 * MIB, "of the rank that died"


def test_changes_that_fit_come_first_by_what_they_cost_and_keep_the_global_batch():
    changes = explain(a_run(512 * MIB + BEYOND), error("backward"), ON_CPU, known).changes
    assert (changes[0].settings, changes[0].predicted_bytes) == ({"batch_size": "16", "grad_accum": "4"}, 470 * MIB)
    assert changes[0].saves == "predicted peak 470 MiB of 545 MiB"
    assert changes[0].costs == "little; the global batch stays"
    assert {"checkpointing": "full"} in [change.settings for change in changes]
    assert all(change.predicted_bytes is not None and change.predicted_bytes <= 512 * MIB for change in changes)
    assert {"precision": "bf16"} not in [change.settings for change in changes], "630 MiB are still too much"


def test_what_has_not_been_traced_or_is_not_predicted_stands_after_what_is_known_to_fit():
    run = a_run(512 * MIB + BEYOND)

    def only_as_it_ran(spec):
        traced = ("precision", "checkpointing", "optimizer", "seq_len")
        return known(spec) if all(spec.knobs[name] == run.knobs[name] for name in traced) else None

    changes = explain(run, error("backward"), ON_CPU, only_as_it_ran).changes
    assert changes[0].settings == {"batch_size": "16", "grad_accum": "4"}
    assert [change.predicted_bytes for change in changes[1:]] == [None, None]
    assert changes[1].saves == "frees about half of the activations"
    without = explain(run, error("backward"), ON_CPU, lambda spec: None)
    assert (without.needed_bytes, without.missing_bytes) == (None, None)
    assert without.grown == "activations", "what a phase fills is known without a model"
    named = [name for change in without.changes for name in change.settings]
    assert named == ["batch_size", "precision", "checkpointing"]
    model = Unpredicted()
    found = explain(a_run(strategy="pp"), error("backward"), ON_CPU, lambda spec: model)
    assert (found.needed_bytes, found.grown) == (None, "activations")
    assert [change.predicted_bytes for change in found.changes] == [None] * 3


def test_where_no_change_is_enough_alone_two_are_proposed_together():
    changes = explain(a_run(300 * MIB + BEYOND), error("backward"), ON_CPU, known).changes
    assert changes[0].settings == {"batch_size": "8", "grad_accum": "8", "optimizer": "adafactor"}
    assert changes[0].costs == "slower to converge; the global batch stays"
    assert all(change.predicted_bytes is not None for change in changes)
    alone = explain(a_run(340 * MIB + BEYOND, batch_size=8), error("optimizer"), ON_CPU, known).changes
    assert alone[0].settings == {"optimizer": "adafactor"}


def test_the_allocator_s_own_sentence_tells_limit_shortage_and_who_else_was_there():
    run = a_run(None, "cuda", memory_limit=None)
    appeared = Event(t_ns=1, kind="foreign_process", pid=99, state="appeared", detail="python (pid 99) with 300 MiB")
    guest = Event(t_ns=1, kind="foreign_process", pid=7, state="appeared", detail="a guest")
    gone = Event(t_ns=2, kind="foreign_process", pid=7, state="left")
    found = explain(run, error("forward"), ON_GPU, lambda spec: None, events=[appeared, guest, gone])
    assert (found.limit_bytes, found.missing_bytes) == (int(37.5 * 2**30), 1536 * MIB)
    assert found.others == ["process 4711 held 40.00 GiB", "python (pid 99) with 300 MiB"]


def test_a_smaller_batch_or_sequence_fits_in_whole_micro_batches_or_names_the_global_batch():
    changes = explain(a_run(1000 * MIB), error("backward"), ON_CPU, known).changes
    assert changes
    assert all(change.predicted_bytes is not None and change.predicted_bytes < 950 * MIB for change in changes)

    def by_tokens(spec):
        model = Arithmetic()
        size = int(str(spec.knobs["seq_len"])) * MIB // 4
        model.predict = lambda spec, ranks=1: msgspec.structs.replace(Arithmetic().predict(spec), total_bytes=size)
        return model

    run = a_run(100 * MIB, batch_size=1, seq_len=1024)
    changes = explain(run, error("backward"), ON_CPU, by_tokens).changes
    assert [change.settings for change in changes if "seq_len" in change.settings] == [{"seq_len": "256"}]
    changes = explain(a_run(512 * MIB + BEYOND, batch_size=23), error("backward"), ON_CPU, known).changes
    assert changes[0].settings == {"batch_size": "18"}
    assert changes[0].costs == "little; the global batch goes from 23 to 18 a rank"
    run = a_run(512 * MIB + BEYOND, batch_size=36, strategy="pp", micro_batches=4)
    changes = explain(run, error("backward"), ON_CPU, known).changes
    assert changes[0].settings == {"batch_size": "12", "grad_accum": "3"}, "18 would fit, and is not four equal parts"


def test_where_two_changes_are_not_enough_all_are_proposed_or_the_closest_with_what_they_miss():
    found = explain(a_run(295 * MIB + BEYOND, batch_size=64, grad_accum=1), error("optimizer"), ON_CPU, Stubborn.model)
    assert [change.settings for change in found.changes] == [
        {"precision": "bf16-pure", "checkpointing": "full", "optimizer": "adafactor"}
    ]
    assert "slower to converge" in found.changes[0].costs
    found = explain(a_run(200 * MIB), error("optimizer"), ON_CPU, Stubborn.model)
    assert [change.predicted_bytes for change in found.changes] == [280 * MIB, 380 * MIB, 380 * MIB]
    room = int(0.97 * 200 * MIB) - (32 << 20)
    assert [change.missing_bytes for change in found.changes] == [280 * MIB - room, 380 * MIB - room, 380 * MIB - room]
    assert found.changes[0].saves == (
        "predicted peak 280 MiB of 200 MiB, 118 MiB over with 38 MiB kept free for prediction error"
    )


def test_one_knob_each_is_traced_first_then_all_together_and_shorter_sequences_last():
    first, *settings = settings_to_trace(knob_changes(a_run(seq_len=512).knobs, "cpu", "backward"), "backward")
    together = {"precision": "bf16-pure", "checkpointing": "full", "optimizer": "adafactor"}
    assert first == {}
    assert {"checkpointing": "full"} in settings
    assert settings[settings.index(together) :] == [together, *({"seq_len": length} for length in ("256", "128", "64"))]
    assert all(len(one) == 1 and "batch_size" not in one for one in settings if one != together)


def test_a_probe_is_explained_by_the_batch_it_was_trying_and_nothing_is_to_be_turned():
    run = msgspec.structs.replace(a_run(1000 * MIB), role="probe", predicted=Prediction(total_bytes=380 * MIB))
    tried = [{"batch_size": 8}, {"batch_size": 90}]
    died = OutOfMemory(run=run, reason=ON_CPU, error=error("backward"), held_bytes=990 * MIB, tried=tried)
    found = explain_run(died, known)
    assert (found.batch_size, found.needed_bytes, found.changes) == (90, 1210 * MIB, [])
    early = explain_run(OutOfMemory(run=run, reason=ON_CPU, error=error("model")), known)
    assert (early.needed_bytes, early.changes) == (None, [])


def test_what_a_compiled_run_took_beyond_its_trace_every_change_has_to_leave_unless_it_turns_compiling_off():
    run = a_run(560 * MIB, batch_size=20, compile="default")
    found = explain(run, error("backward"), ON_CPU, known, held_bytes=540 * MIB, in_first_step=True)
    assert (found.needed_bytes, found.changes[0].settings) == (510 * MIB, {"compile": "off"})
    besides = 560 - 310  # the states of the optimizer were not there yet
    others = [change for change in found.changes if "compile" not in change.settings]
    assert all((change.predicted_bytes or 0) <= (560 - besides) * MIB for change in others)
    trained = a_run(560 * MIB, batch_size=20, engine="trainer")
    assert explain(trained, error("backward"), ON_CPU, known).changes[0].settings == {"engine": "native"}
    assert explain(trained, error("backward"), ON_CPU, lambda spec: None).changes[0].settings == {"engine": "native"}
    later = explain(a_run(560 * MIB, batch_size=20), error("backward"), ON_CPU, known, held_bytes=540 * MIB)
    assert {"batch_size", "grad_accum"} == set(later.changes[0].settings), "nothing to turn back"
    on_gpu = explain(a_run(560 * MIB, "cuda", batch_size=20, compile="default"), error("backward"), ON_CPU, known)
    assert not any("compile" in change.settings for change in on_gpu.changes), "there it takes memory of the host"


class Stubborn(Arithmetic):
    """Each of three knobs takes a little, and only all together are enough."""

    def predict(self, spec, ranks=1):
        turned = {"precision": "bf16-pure", "checkpointing": "full", "optimizer": "adafactor"}
        total = (430 - 50 * sum(spec.knobs[name] == value for name, value in turned.items())) * MIB
        return msgspec.structs.replace(super().predict(spec, ranks), total_bytes=total)

    @classmethod
    def model(cls, spec):
        return cls()


class Unpredicted(Arithmetic):
    """A strategy that the memory model does not know."""

    def predict(self, spec, ranks=1):
        raise UserError("the memory of strategy=pp is not predicted", key="strategy")


def test_what_the_rank_held_tells_what_was_missing_where_nothing_is_predicted_under_a_limit():
    found = explain(a_run(), error("forward"), ON_CPU, lambda spec: None, held_bytes=500 * MIB)
    assert (found.held_bytes, found.asked_bytes, found.missing_bytes) == (500 * MIB, 64 * MIB, 52 * MIB)
    predicted = explain(a_run(), error("forward"), ON_CPU, known, held_bytes=500 * MIB)
    assert predicted.missing_bytes == 438 * MIB, "of the whole run"
    unforeseen = explain(a_run(1000 * MIB), error("backward"), ON_CPU, known, held_bytes=990 * MIB)
    assert unforeseen.missing_bytes == 54 * MIB
    text = ON_GPU.replace("512.00 MiB is", "70.00 GiB is")
    run = a_run(3 << 30, device="cuda")
    found = explain(run, error("forward"), text, lambda spec: None, held_bytes=2560 * MIB)
    assert (found.limit_bytes, found.missing_bytes) == (3 << 30, 1536 * MIB)


def test_without_a_limit_the_host_bounds_the_changes_of_a_cpu_run():
    run = a_run(None)
    found = explain(run, error("forward"), ON_CPU, known, held_bytes=100 * MIB, host_bytes=512 * MIB + BEYOND)
    assert found.limit_bytes == 512 * MIB + BEYOND
    assert found.changes
    assert all(0 < (change.predicted_bytes or 0) <= 512 * MIB + BEYOND for change in found.changes)
    two_ranks = msgspec.structs.replace(run, world_size=2)
    assert explain(two_ranks, error("forward"), ON_CPU, known, host_bytes=1024 * MIB).limit_bytes == 512 * MIB
    assert explain(run, error("forward"), ON_CPU, known).limit_bytes is None, "no reading of the host"
    on_gpu = explain(a_run(None, "cuda"), error("forward"), ON_GPU, known, host_bytes=512 * MIB)
    assert on_gpu.limit_bytes == (36 << 30) + (1 << 30) + (512 << 20)


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
