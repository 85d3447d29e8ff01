"""The expected time of a step: its work at the calibrated speeds of the device."""

from __future__ import annotations

from dataclasses import dataclass

from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.memory.model import MemoryModel, step_work
from trainfast_runner.settings.device_counts import data_parallel_degree
from trainfast_runner.settings.knob_type import whole_number
from trainfast_runner.settings.precisions import peak_precision
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.strategy_of_run import strategy_of

SLOWDOWN = {"cpu": (1.6, 1.35, 0.6), "cuda": (1.0, 1.2, 1.0)}
"""Factors by which calls, FLOPs and moved bytes of a training step take longer than in the calibration.

Products are smaller than the calibrated one. Tensors of a CPU's step are partly in its cache, where the calibrated copy
is not, and its calls find less of their own code there. Factors of CPUs were measured: 0.8 to 2.1
for calls, 1.2 to 1.7 for FLOPs, 0.5 for moved bytes. GPU factors are assumed.
"""
OVERLAP_EXPONENT = {"cpu": 1.0, "cuda": 4.0}
"""Exponent p of (calls^p + work^p)^(1/p): with 1 host calls and device work add up, with a large p they overlap."""


@dataclass(frozen=True)
class ExpectedStep:
    """The expected time of an optimizer step."""

    seconds: float
    shares: tuple[float, ...]
    """The shares of the seconds that grow with calls, FLOPs and moved bytes; 1 together."""
    samples: int
    """Samples of the step, over all ranks."""


def step_time(spec: RunSpec, model: MemoryModel, devices: int, cores: int, ceiling: Ceiling) -> ExpectedStep | None:
    """Return the time of the spec's step on a calibrated device; None when its precision was not calibrated.

    Each rank on a CPU is a device, and shares its cores and its memory. Communication between ranks is left out.
    """
    tflops = _tflops(ceiling, str(spec.knobs["precision"]))
    if not tflops or not ceiling.copy_gb_per_s or not ceiling.operation_us:
        return None
    batch, accum = (whole_number(spec.knobs, name) for name in ("batch_size", "grad_accum"))
    work = step_work(model, batch, accum)
    if not work.calls or not work.flops:
        return None  # a trace of an empty model
    calibrated_s = (
        work.calls * ceiling.operation_us / 1e6,
        work.flops / tflops / 1e12,
        work.moved_bytes / ceiling.copy_gb_per_s / 1e9,
    )
    calls_s, flops_s, moved_s = (
        slowdown * seconds for slowdown, seconds in zip(SLOWDOWN[model.device], calibrated_s, strict=True)
    )
    if model.device == "cpu":
        calls_s *= max(1.0, devices / cores)
        flops_s, moved_s = devices * flops_s, devices * moved_s
    if strategy_of(spec.knobs).is_pipeline:
        stages = whole_number(spec.knobs, "pp_degree")
        calls_s, flops_s, moved_s = calls_s / stages, flops_s / stages, moved_s / stages
    power = OVERLAP_EXPONENT[model.device]
    device_s = flops_s + moved_s
    seconds = (calls_s**power + device_s**power) ** (1 / power)
    by_calls = (calls_s / seconds) ** power
    shares = (by_calls, (1 - by_calls) * flops_s / device_s, (1 - by_calls) * moved_s / device_s)
    return ExpectedStep(seconds, shares, batch * accum * data_parallel_degree(spec.knobs, devices))


def _tflops(ceiling: Ceiling, precision: str) -> float | None:
    tflops = ceiling.tflops.get(peak_precision(precision))
    # A device without TF32 computes it as fp32.
    return ceiling.tflops.get("fp32") if tflops is None and precision == "tf32" else tflops
