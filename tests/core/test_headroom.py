"""The fit of a predicted run, the largest batch that fits, and the words for a run that cannot run here."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from layered_model import model_of, spec_with

from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory import corrections
from trainfast_runner.memory.corrections import Correction
from trainfast_runner.memory.headroom import (
    COLD_COMPILER_BYTES,
    UNCORRECTED_MARGIN_BYTES,
    UNTOUCHED_BYTES,
    PredictedFit,
    predict_headroom,
)
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.records.tick import DeviceReading

MIB, GIB = 1 << 20, 1 << 30
CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2)
MODEL = msgspec.structs.replace(model_of(12), trace="t")


def fit(model: MemoryModel = MODEL, machine: Machine = CPU, ranks: int = 1, **knobs: Any) -> PredictedFit:
    return predict_headroom(model, spec_with(**knobs), machine, ranks, 4 * GIB)


def corrected(model: MemoryModel = MODEL, **knobs: Any) -> MemoryModel:
    """The model once a run with these knobs took 5 MiB beyond its trace."""
    traced = model.predict(spec_with(**knobs)).traced_bytes
    beyond = {"forward_backward": 5 * MIB, "optimizer": 5 * MIB}
    known = Correction(run_id="r1", beyond_bytes=beyond, step_bytes=traced["forward_backward"])
    case = corrections.correction_key("t", spec_with(**knobs).knobs, 1)
    return msgspec.structs.replace(model, corrections=corrections.DeviceCorrections(by_case={case: known}))


@pytest.mark.parametrize(
    ("model", "strategy"), [(MODEL, "single"), (corrected(batch_size=5000), "single"), (MODEL, "ddp")]
)
def test_the_largest_batch_fits_and_the_next_one_does_not(model: MemoryModel, strategy: str) -> None:
    limit = {"memory_limit": "200MiB", "strategy": strategy, "batch_size": 7}
    most = fit(model, **limit).max_batch
    assert most is not None
    assert fit(model, **{**limit, "batch_size": most}).fits is True
    above = fit(model, **{**limit, "batch_size": most + 1})
    assert (above.fits, above.max_batch) == (False, most)
    assert above.left_bytes is not None
    assert above.left_bytes < 0


def test_a_limit_of_a_cpu_has_to_have_a_margin_which_a_measured_run_makes_smaller() -> None:
    asked: dict[str, Any] = {"memory_limit": "200MiB", "batch_size": 5000}
    assert fit(**asked).margin_bytes == UNCORRECTED_MARGIN_BYTES
    assert fit(corrected(batch_size=5000), **asked).margin_bytes == UNTOUCHED_BYTES
    further = fit(corrected(batch_size=5000), **{**asked, "batch_size": 100_000}).margin_bytes
    assert UNTOUCHED_BYTES < further < UNCORRECTED_MARGIN_BYTES, "the further away, the less is known"
    compiling = fit(**asked, compile="default")
    assert compiling.margin_bytes > 3 * UNCORRECTED_MARGIN_BYTES, "nobody has measured the compiler here"
    compiled = {**asked, "compile": "default"}
    assert fit(corrected(**compiled), **compiled).margin_bytes == UNTOUCHED_BYTES + COLD_COMPILER_BYTES
    free = fit(batch_size=5000)
    assert (free.margin_bytes, free.available and free.available.source) == (0, "free"), (
        "what is free counts no address space"
    )


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"strategy": "dp", "devices": 2}, "strategy=dp copies the model to each of two or more GPUs"),
        ({"strategy": "ddp", "devices": 99}, "devices=99: at most 8 processes on a CPU"),
    ],
)
def test_what_has_no_devices_here_says_so_and_is_not_held_against_what_is_free_here(
    knobs: dict[str, Any], expected: str
) -> None:
    found = fit(ranks=knobs["devices"] if knobs["strategy"] == "ddp" else 1, **knobs)
    assert found.refusal is not None
    assert found.refusal.message.startswith(expected)
    assert found.predicted.total_bytes > 0, "for somebody who plans for another machine"
    assert (found.available, found.fits, found.max_batch) == (None, None, None)
    limited = fit(**knobs, memory_limit="8GiB")
    assert limited.available is not None
    assert limited.fits is True


def test_on_a_gpu_the_context_comes_out_of_what_is_free_and_there_is_no_margin() -> None:
    gpus = (DeviceReading(index=0, uuid="GPU-0", name="a GPU", memory_free_bytes=GIB),)
    machine = Machine(device="cuda", gpus=gpus, nvml_gpus=gpus, cores=2)
    found = fit(msgspec.structs.replace(MODEL, device="cuda"), machine)
    assert (found.margin_bytes, found.refusal) == (0, None)
    assert found.fits is True
