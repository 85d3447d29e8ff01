"""Predict the samples/s of a run with a 90 % interval: the calibrated time of its step, corrected by earlier runs.

ln(measured rate x calibrated step time) is modelled as the parts of the step that take longer than calibrated, weighted
by their shares of the step, plus the speed of the machine since it was calibrated, plus the effect of each knob
relative to `REFERENCE_KNOBS`, plus a process's own effect and noise. The posterior is exact
(Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2.2).
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainfast_runner.errors import UserError
from trainfast_runner.machine import calibration
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.machine.cpu import cpu_name
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.model import MemoryModel, StepWork, step_work
from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
from trainfast_runner.memory.tracing import cached_model, cached_models
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.records.run_file import PredictedSpeed, RecordedSpec
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE, NORMAL_90
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.effects import Array, similarity
from trainfast_runner.settings.device_counts import data_parallel_degree, device_count, first_gpu_name
from trainfast_runner.settings.knob_values import KnobValues, whole_number
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.precisions import peak_precision
from trainfast_runner.settings.spec import RunSpec, spec_of_record, strategy_of

RUNS_READ_FOR_SPEEDS = 200
"""Number of newest runs that are read."""
MAX_MEASURED = 60
"""Largest number of measured speeds that count."""
SLOW_SHARE = 0.5
"""Share of the step-to-step deviation that shifts a whole run: slow and fast spells outlast one run."""
COMPARABLE_THROTTLED_SHARE = 0.05
"""The speed of a run counts if heat or a power brake slowed it for at most this share of the time."""


@dataclass(frozen=True)
class EarlierSpeed:
    """The ln samples/s that a run measured, with the variance of its noise."""

    spec: RunSpec
    devices: int
    log_rate: float
    variance: float


@dataclass(frozen=True)
class SpeedDevice:
    """The device whose speeds are compared: cpu or cuda, and the GPU's name, empty for a CPU."""

    kind: str
    gpu: str = ""


def training_of(spec: RunSpec | RecordedSpec) -> tuple[Mapping[str, Any], object, object]:
    """Return the part of a run that is its training: the model, the training objective and the kind of data."""
    return spec.model, spec.data.get("objective"), spec.data.get("kind")


def measured_speeds(home: Home, spec: RunSpec, device: SpeedDevice) -> list[EarlierSpeed]:
    """Return the newest comparable speeds of the spec's training on this device.

    Raises UserError when the home cannot be listed.
    """
    speeds: list[EarlierSpeed] = []
    for directory in map(home.directory, home.newest_run_ids(RUNS_READ_FOR_SPEEDS)):
        result = read_result(directory)
        run = read_run_file(directory) if result is not None and is_comparable(result) else None
        if result is None or run is None or run.script is not None or training_of(run) != training_of(spec):
            continue
        rate = result.throughput.samples_per_s
        if SpeedDevice(run.device, next(iter(run.device_names), "")) != device or not rate.typical:
            continue
        deviation = MAD_TO_SIGMA * (rate.mad or 0.0) / rate.typical
        # Other processes slow a run by about the share of the cores that they take.
        others_share = (result.conditions.others_cpu_percent or 0.0) / 100
        variance = (MEDIAN_VARIANCE / max(1, result.steps.measured) + SLOW_SHARE**2) * deviation**2 + others_share**2
        devices = max(run.world_size, len(run.device_uuids))
        with suppress(UserError):  # knobs of another version
            speeds.append(EarlierSpeed(spec_of_record(run), devices, math.log(rate.typical), variance))
    return speeds[:MAX_MEASURED]


def is_comparable(result: Result) -> bool:
    """True if a run's speed is that of its settings.

    The run finished, was not slowed by heat or a power brake, and was not measured under strict thresholds.
    """
    if result.state != "finished" or result.role in WARM_ROLES or result.measured_under is not None:
        return False
    throttled = (result.throttle.thermal_fraction or 0.0) + (result.throttle.brake_fraction or 0.0)
    return throttled <= COMPARABLE_THROTTLED_SHARE


SLOWDOWN = {"cpu": (1.6, 1.35, 0.6), "cuda": (1.0, 1.2, 1.0)}
"""Factors by which calls, FLOPs and moved bytes of a training step take longer than in the calibration.

Products are smaller than the calibrated one. Tensors of a CPU's step are partly in its cache, where the calibrated copy
is not, and its calls find less of their own code there. Factors of CPUs were measured: 0.8 to 2.1
for calls, 1.2 to 1.7 for FLOPs, 0.5 for moved bytes. GPU factors are assumed.
"""
ABOVE_CEILING = 1.1
"""A training may be faster than the calibration by this factor: a boost clock, or a CPU shared while calibrating."""
OVERLAP_EXPONENT = {"cpu": 1.0, "cuda": 4.0}
"""The exponents of `overlapped`."""


def overlapped(calls: float, work: float, exponent: float) -> float:
    """Return the time of host calls and device work: with exponent 1 they add up, with a large one they overlap."""
    return float((calls**exponent + work**exponent) ** (1 / exponent))


@dataclass(frozen=True)
class ExpectedStep:
    """The expected time of an optimizer step."""

    seconds: float
    shares: tuple[float, ...]
    """The shares of the seconds that grow with calls, FLOPs and moved bytes; 1 together."""
    samples: int
    """Samples of the step, over all ranks."""
    calls_s: float
    """Seconds of the calls, of the FLOPs and of the moved bytes alone."""
    flops_s: float
    moved_s: float


def step_time(
    spec: RunSpec, model: MemoryModel, devices: int, cores: int, ceiling: Ceiling, work: StepWork | None = None
) -> ExpectedStep | None:
    """Return the time of the spec's step, or of its `work`, on a calibrated device; None without its precision.

    Each rank on a CPU is a device, and shares its cores and its memory. Communication between ranks is left out.
    """
    precision = peak_precision(str(spec.knobs["precision"]))
    # A device without TF32 computes it as fp32.
    tflops = ceiling.tflops.get(precision) or (ceiling.tflops.get("fp32") if precision == "tf32" else None)
    if not tflops or not ceiling.copy_gb_per_s or not ceiling.operation_us:
        return None
    batch, accum = (whole_number(spec.knobs, name) for name in ("batch_size", "grad_accum"))
    work = work or step_work(model, batch, accum)
    if not work.calls or not work.moved_bytes:
        return None  # a trace of an empty model
    slow_calls, slow_flops, slow_moves = SLOWDOWN[model.device]
    calls_s = slow_calls * work.calls * ceiling.operation_us / 1e6
    flops_s = slow_flops * work.flops / tflops / 1e12
    moved_s = slow_moves * work.moved_bytes / ceiling.copy_gb_per_s / 1e9
    if model.device == "cpu":
        calls_s *= max(1.0, devices / cores)
        flops_s, moved_s = devices * flops_s, devices * moved_s
    if strategy_of(spec.knobs).is_pipeline:
        stages = whole_number(spec.knobs, "pp_degree")
        calls_s, flops_s, moved_s = calls_s / stages, flops_s / stages, moved_s / stages
    power = OVERLAP_EXPONENT[model.device]
    device_s = flops_s + moved_s
    seconds = overlapped(calls_s, device_s, power)
    by_calls = (calls_s / seconds) ** power
    shares = (by_calls, (1 - by_calls) * flops_s / device_s, (1 - by_calls) * moved_s / device_s)
    return ExpectedStep(
        seconds, shares, batch * accum * data_parallel_degree(spec.knobs, devices), calls_s, flops_s, moved_s
    )


def traced_parts_s(spec: RunSpec, model: MemoryModel, devices: int, cores: int, ceiling: Ceiling) -> dict[str, float]:
    """Return `host_s`, `device_s`, `optimizer_s` and `least_s_per_sample` of a candidate; empty if unknown."""
    update = StepWork(*model.optimizer_work)
    whole = step_work(model, whole_number(spec.knobs, "batch_size"), whole_number(spec.knobs, "grad_accum"))
    both = StepWork(*(total - part for total, part in zip(whole, update, strict=True)))
    both_time, update_time = (step_time(spec, model, devices, cores, ceiling, work) for work in (both, update))
    if both_time is None or update_time is None:
        return {}
    device_s = both_time.flops_s + both_time.moved_s
    parts_s = {"host_s": both_time.calls_s, "device_s": device_s, "optimizer_s": update_time.seconds}
    # A bound needs a measured peak, and a rank that does all the work of its samples.
    if ceiling.name and data_parallel_degree(spec.knobs, devices) == devices:
        slowdown = ABOVE_CEILING * SLOWDOWN[model.device][1]
        parts_s["least_s_per_sample"] = both_time.flops_s / slowdown / both_time.samples
    return parts_s


MAX_SHOWN_RATIO = 3.0
"""An interval whose upper end is this many times its lower end is too wide to be shown.

Of speeds with an interval just narrower about 4 % were a factor of two off."""
WORK_DEVIATIONS = (0.3, 0.2, 0.3)
"""Prior deviations, in ln seconds, of how much longer calls, FLOPs and moved bytes take than calibrated."""
UNCALIBRATED_WORK_DEVIATIONS = (1.5, 1.5, 1.5)
"""`WORK_DEVIATIONS` of a device that was not calibrated, where nominal speeds stand in."""
MACHINE_DEVIATION = 0.15
"""Prior deviation, in ln seconds, shared by all steps on this machine: other work, heat, or a host's other guests."""
KNOB_DEVIATIONS = {
    name: deviation
    for deviation, names in {
        # Ranks also communicate: fsdp of two gloo ranks took 1.4 to 2.7 times as long as ddp (`benchmarks/grids`).
        0.4: ("strategy",),
        0.2: ("compile", "tp_degree", "sequence_parallel", "ep_degree", "pp_degree", "p2p"),
        0.15: ("precision", "kernels"),
        0.1: ("seq_len", "attention", "loss", "method", "engine", "devices", "pp_schedule", "micro_batches", "reshard"),
        0.08: ("batch_size",),
        0.05: ("checkpointing", "optimizer", "workers", "lora_rank", "lora_targets"),
        0.03: ("grad_accum",),
        0.02: ("pin_memory", "prefetch", "grad_clip", "allocator"),
    }.items()
    for name in names
}
"""Prior deviations, in ln rate, of a knob's effect beyond the work it changes. Other knobs do not change the speed."""
RUN_DEVIATIONS = (0.04, 0.08, 0.16)
"""Deviations between runs of the same settings, in ln rate, to choose from; the first with few runs.

On cores whose speed changed by a third, a fixed 0.04 had 45 % of the speeds inside their 90 % interval."""
ENOUGH_RUNS = 4
"""Number of runs from which their own scatter chooses among `RUN_DEVIATIONS`."""
REFERENCE_KNOBS: KnobValues = {
    **{name: value for name, value in defaults().items() if name in KNOB_DEVIATIONS},
    "batch_size": 8,
    "devices": 1,
}
"""Knobs without an effect beyond their work; the effects of other values are relative to these knobs."""
SIZE_KNOBS = ("batch_size", "grad_accum", "seq_len")
"""Knobs whose similar values were found to have similar effects between runs."""
ASSUMED_NOISE_VARIANCE = 1e-4
"""Assumed variance of the ln rate that a run measures, before the first run."""

SpeedAndStep = tuple[EarlierSpeed, ExpectedStep]
"""An earlier speed, and the step that the calibration expects of its settings."""


@dataclass(frozen=True)
class UnknownSpeed:
    """No speed is predicted; the reason in a few words."""

    reason: str


@dataclass(frozen=True)
class DeviceSpeedModel:
    """Predicts speeds of one training on one device from earlier ones there, each with its calibrated step time."""

    ceiling: Ceiling
    cores: int
    measured: Sequence[SpeedAndStep]
    calibrated: bool

    def predict(self, spec: RunSpec, devices: int, memory_model: MemoryModel) -> PredictedSpeed | UnknownSpeed:
        """Predict the speed of these settings on `devices` devices; takes a few milliseconds."""
        if spec.knobs["strategy"] not in PREDICTED_STRATEGIES:
            return UnknownSpeed(f"strategy={spec.knobs['strategy']} is not predicted")
        if self.ceiling.device == "cpu" and spec.knobs["memory_limit"] is not None:
            return UnknownSpeed("memory_limit on a CPU slows every step")
        step = step_time(spec, memory_model, devices, self.cores, self.ceiling)
        if step is None:
            return UnknownSpeed(f"precision={spec.knobs['precision']} is not calibrated on this device")
        return self.predict_step(spec, devices, step)

    def predict_step(self, spec: RunSpec, devices: int, step: ExpectedStep) -> PredictedSpeed | UnknownSpeed:
        """Predict the speed of settings whose step the calibration expects to take this time."""
        earlier, steps = [speed for speed, _ in self.measured], [*(expected for _, expected in self.measured), step]
        # The next run, the last of all, is as noisy as the earlier ones.
        variances = [speed.variance for speed in earlier]
        variances.append(statistics.median(variances or [ASSUMED_NOISE_VARIANCE]))
        expected = np.array([math.log(each.samples / each.seconds) for each in steps])
        residuals = np.array([speed.log_rate for speed in earlier]) - expected[:-1]
        # Runs share the speed of the machine, and the slowness of each part of their work.
        shares = np.array([each.shares for each in steps])
        shares = shares * (WORK_DEVIATIONS if self.calibrated else UNCALIBRATED_WORK_DEVIATIONS)
        settings: list[KnobValues] = [{**speed.spec.knobs, "devices": speed.devices} for speed in earlier]
        covariances = shares @ shares.T + MACHINE_DEVIATION**2 + np.diag(variances)
        for name, deviation in KNOB_DEVIATIONS.items():
            # The effect of a value is the difference from that of the reference's value.
            knobs_of = (REFERENCE_KNOBS, *settings, {**spec.knobs, "devices": devices})
            alike = similarity([knobs[name] for knobs in knobs_of], is_smooth=name in SIZE_KNOBS)
            covariances += deviation**2 * (alike[1:, 1:] - alike[1:, :1] - alike[:1, 1:] + 1)
        posteriors = [
            _posterior(covariances + deviation**2 * np.eye(len(steps)), residuals) for deviation in RUN_DEVIATIONS
        ]
        _, mean, deviation = max(posteriors if len(earlier) >= ENOUGH_RUNS else posteriors[:1])
        factor = math.exp(NORMAL_90 * deviation)
        if factor * factor >= MAX_SHOWN_RATIO:
            return UnknownSpeed(f"known only within a factor of {factor * factor:.1f}; a run tells more")
        basis = "the calibrated speeds of this device" if self.calibrated else "the work of a step"
        if earlier:
            basis += f" and measured runs: {len(earlier)} of this model"
        median = math.exp(expected[-1] + mean)
        return PredictedSpeed(median=median, low=median / factor, high=median * factor, basis=basis)


def _posterior(covariances: Array, values: Array) -> tuple[float, float, float]:
    """Return the log likelihood of the values, and mean and deviation of the one value after them.

    The last row of the covariances is that of the value to predict.
    """
    rows = np.linalg.cholesky(covariances)
    whitened = np.linalg.solve(rows[:-1, :-1], values)
    log_likelihood = -np.log(rows.diagonal()[:-1]).sum() - 0.5 * whitened @ whitened
    return float(log_likelihood), float(rows[-1, :-1] @ whitened), float(rows[-1, -1])


NOMINAL_CEILINGS = {
    "cpu": Ceiling(
        device="cpu", name="", tflops=dict.fromkeys(("fp32", "bf16"), 0.1), copy_gb_per_s=10.0, operation_us=10.0
    ),
    "cuda": Ceiling(
        device="cuda",
        name="",
        tflops={"fp32": 20.0, "tf32": 60.0, "bf16": 120.0, "fp16": 120.0, "fp8": 120.0},
        copy_gb_per_s=1000.0,
        operation_us=10.0,
    ),
}
"""Round speeds for a device that was not calibrated; measured runs correct them."""


def known_ceiling(home: Home, device: SpeedDevice) -> Ceiling:
    """Return the measured ceiling of a device, or the nominal one if it was not calibrated undisturbed."""
    name = device.gpu or cpu_name()
    return calibration.read(home)[name] if calibration.is_calibrated(home, name) else NOMINAL_CEILINGS[device.kind]


def speed_model_on(home: Home, spec: RunSpec, device: SpeedDevice, python: str | None = None) -> DeviceSpeedModel:
    """Return the model of the speeds known on a device, for the spec's training with other knobs.

    Reads the newest runs and their cached traces: some ten milliseconds. Raises UserError when the home is unreadable.
    """
    ceiling, calibrated = known_ceiling(home, device), calibration.is_calibrated(home, device.gpu or cpu_name())
    cores = len(os.sched_getaffinity(0))
    model_of = cached_models(device.kind, python, device.gpu or None)
    measured_steps = []
    for speed in measured_speeds(home, spec, device):
        with suppress(UserError):  # the model was never traced, or is gone
            memory_model = model_of(speed.spec)
            step = memory_model and step_time(speed.spec, memory_model, speed.devices, cores, ceiling)
            if step:
                measured_steps.append((speed, step))
    return DeviceSpeedModel(ceiling, cores, measured_steps, calibrated)


def predict_speed(
    home: Home, spec: RunSpec, machine: Machine, memory_model: MemoryModel, python: str | None = None
) -> PredictedSpeed | UnknownSpeed:
    """Predict the speed of a run on this machine. Raises UserError for devices that do not exist."""
    device = SpeedDevice(machine.used_by(spec.knobs["devices"]).device, first_gpu_name(spec, machine) or "")
    return speed_model_on(home, spec, device, python).predict(spec, device_count(spec, machine), memory_model)


def with_predicted_speed(plan: RunPlan, home: Home) -> RunPlan:
    """Return the plan with its predicted speed, if one can be shown, from an earlier trace of its model.

    Nothing is predicted for a script of the user's own. Raises UserError when the home is unreadable.
    """
    if plan.script is not None:
        return plan
    device = SpeedDevice(plan.device, next(iter(plan.device_names), ""))
    memory_model = cached_model(plan.spec, plan.device, plan.python)
    if memory_model is None:
        return plan
    devices = max(plan.world_size, len(plan.gpus))
    predicted_speed = speed_model_on(home, plan.spec, device, plan.python).predict(plan.spec, devices, memory_model)
    return replace(plan, predicted_speed=predicted_speed) if isinstance(predicted_speed, PredictedSpeed) else plan
