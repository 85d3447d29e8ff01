"""The typed shape of `result.json`. Unknown fields are ignored, absent ones are None."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from trainfast_runner.records import run_file
from trainfast_runner.records.run_lines import Actual, RunStart


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Joules over the measured window, summed over watched devices."""

    joules: float | None = None
    joules_per_sample: float | None = None
    joules_per_step: float | None = None
    source: str | None = None
    """"energy counter", or "integrated power" if a device has no such counter."""
    reason: str | None = None
    """The reason that a distrusted counter gives no figure."""


class ThrottleFractions(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the measured window in which a device was throttled, by cause, and its clock loss: 1 - SM clock /
    maximum SM clock, the mean over the window's time in which the GPU was not idle."""

    thermal_fraction: float | None = None
    power_fraction: float | None = None
    brake_fraction: float | None = None
    sync_boost_fraction: float | None = None
    clock_loss_fraction: float | None = None


class ThrottledDevice(ThrottleFractions, frozen=True, kw_only=True):
    """Throttling of one watched device."""

    index: int | None = None
    uuid: str | None = None
    throttled_ms: dict[str, float | None] = {}
    lost_ms_per_step: dict[str, float | None] = {}
    """None for every cause on a GPU that the run only watches."""
    temperature_c: float | None = None
    """The temperature when the window began."""


class Throttle(ThrottleFractions, frozen=True, kw_only=True):
    """Throttling of the worst watched device, for each cause and the clock loss."""

    devices: list[ThrottledDevice] = []


class SteadyState(msgspec.Struct, frozen=True, kw_only=True):
    """The warm-up of a run. No measured step is left out for it.

    The slopes are of all measured steps where these are steady, else of the second half.
    """

    still_warming: bool | None = None
    """True if temperature or step time still drifted in the second half; None if the steps are too few."""
    temperature_slope_c_per_min: float | None = None
    """Degrees Celsius a minute."""
    step_drift_percent: float | None = None
    """The percent by which the window's last step is longer than its first; None when the steps scatter too much."""


class RecordedOutage(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which a watched GPU that had answered gave no reading."""

    device: int | None = None
    """NVML index."""
    seconds: float | None = None
    """The time until the GPU answered again or the records end."""
    back: bool = False
    """True if the GPU answered again."""
    measured_fraction: float = 0.0
    """Share of the measured window."""


class XidError(msgspec.Struct, frozen=True, kw_only=True):
    """An Xid error while the run went on; `device` is an NVML index, None when unknown."""

    device: int | None = None
    detail: str | None = None


class RunConditions(SteadyState, frozen=True, kw_only=True):
    """Conditions of the machine; `clean` is False when the comparison with another run is in doubt."""

    start_temperature_c: float | None = None
    """The hottest watched GPU at the launch."""
    measured_from_temperature_c: float | None = None
    """The hottest watched GPU at the start of the first measured step."""
    foreign_processes: list[run_file.ForeignProcess] = []
    others_cpu_percent: float | None = None
    """The share of all cores that processes of others took while the measured steps ran, the mean."""
    clean: bool = True
    started_clean: bool | None = None
    """True if the devices were as free as before at the launch; None if unknown."""
    outages: list[RecordedOutage] = msgspec.field(default_factory=list, name="absences")
    xid_errors: list[XidError] = []
    driver: str | None = None


class StepCount(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that enter the summary and those cut as timing warm-up."""

    measured: int = 0
    warmup: int = 0


LOSSES_IN_A_MEAN = 5
"""Losses in the mean of the first and in that of the last ones."""


def mean_loss(losses: Sequence[float | None]) -> float | None:
    """The mean of some losses; None without any, or if one of them is None: not finite."""
    finite_losses = [loss for loss in losses if loss is not None]
    return fmean(finite_losses) if finite_losses and len(finite_losses) == len(losses) else None


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Means of the first and last five recorded losses, None when one of those is not a finite number."""

    first: float | None = None
    last: float | None = None
    not_finite: int = 0
    """Number of steps whose loss was no finite number."""
    recorded: int | None = None
    """Number of losses, counted up to the ten of both means."""


class LossDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of the first losses from those of a run on the same samples with plainer levers."""

    greatest: float | None = None
    """The greatest relative difference of a step."""
    tolerance: float | None = None
    """The greatest that the turned levers may cause."""
    steps: int = 0
    """Steps that were compared."""
    against: str = ""
    """The run compared with."""

    @property
    def excess(self) -> str:
        """The difference in words if it is beyond the tolerance; empty if not."""
        if self.greatest is None or self.tolerance is None or self.greatest <= self.tolerance:
            return ""
        return f"the loss differs by up to {self.greatest:.2g} of it, where its levers may cause {self.tolerance:.2g}"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A median and its median absolute deviation; of a rate its mean over time too."""

    median: float | None = None
    mad: float | None = None
    mean: float | None = None
    """The work over the time."""

    @property
    def typical(self) -> float | None:
        """The median; the mean where steps differ in size, whose rates have no meaningful median."""
        return self.mean if self.median is None else self.median


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Rates a second, summed over data-parallel ranks; steps are rank 0's, and have no median if sizes differ."""

    samples_per_s: Spread = Spread()
    tokens_per_s: Spread = Spread()
    steps_per_s: Spread = Spread()
    measured_under: str | None = None
    """The condition that makes this speed useless for ranking; None without one."""
    predicted: run_file.PredictedSpeed | None = None
    """The prediction of `samples_per_s` before the launch; None when there was none."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step on rank 0: percentiles of the whole, medians of its phases."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    data: float | None = None
    forward: float | None = None
    backward: float | None = None
    optimizer: float | None = None
    other: float | None = None
    mad: dict[str, float] = {}
    """Median absolute deviations of the phases, by name."""


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """TFLOP/s of one device, and their share of its peak (0 to 1)."""

    model_tflops_per_device: float | None = None
    mfu: float | None = None
    """Share of the peak that the model's FLOPs reach."""
    hfu: float | None = None
    """Share of the peak, with the FLOPs that checkpointing computes twice."""
    peak_tflops: float | None = None
    peak_source: str | None = None
    notebook_tflops_per_device: float | None = None
    """TFLOP/s by the formula of the "Transformers Benchmarks" notebook."""
    measured_peak_tflops: float | None = None
    """The rate that the calibration reached on this device."""
    of_measured_peak: float | None = None
    """The hardware's FLOPs as a share of `measured_peak_tflops`."""


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Peak bytes: the worst rank's by the allocator, and the device's own figure.

    A CPU's peaks are of its strict warm-up steps.
    """

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_peak_used_bytes: int | None = None
    predicted_bytes: int | None = None
    alloc_retries: int | None = None
    not_measured_because: str | None = None
    """The reason that a CPU run has no peaks; None if it may have them."""


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """Allocator and threads of a CPU run, which its speed depends on beside the knobs."""

    allocator: str | None = None
    """The malloc in use."""
    thresholds: str | None = None
    """strict, strict in warm-up, ordinary, or kept (the user's own)."""
    threads: int | None = None
    """OpenMP threads of a rank."""
    wait_policy: str | None = None
    """passive, default (threads spin first), or the user's settings."""
    has_fp16: bool | None = None
    """True if the CPU computes in fp16; None if unknown."""
    wait_policy_reason: str | None = None
    others_cores: float | None = None
    """Cores that other processes took when the run was launched."""


STRICT_SPEED = "strict malloc thresholds, which measure memory in every step and take up to half the speed"


class CompileCost(msgspec.Struct, frozen=True, kw_only=True):
    """The time of compiling beyond steady steps; a comparison with an uncompiled run has the steps that win it back."""

    cold_seconds: float | None = None


class LossScaling(msgspec.Struct, frozen=True, kw_only=True):
    """fp16's loss scale after the last step, and the steps skipped because a gradient overflowed."""

    loss_scale: float | None = None
    skipped_steps: int = 0


class Thinning(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a long run's steps that the figures rest on; counts and peaks are of all records on the disk."""

    steps_looked_at: int = 0
    """Steps of the first rank that medians, percentiles and the diagnosis are of, spread evenly over those on the
    disk."""
    steps_dropped: int = 0
    """Steps between the first and the last whose records the cap of `steps.jsonl` removed."""


class RunError(msgspec.Struct, frozen=True, kw_only=True):
    """The exception that ended a run, as its rank wrote it."""

    rank: int | None = None
    phase: str | None = None
    type: str | None = None
    message: str | None = None
    chain: list[dict[str, str]] = []
    key: str | None = None
    """The refused input; this field and the two below are set when the worker refused one."""
    allowed: list[str] | None = None
    nearest: str | None = None


class OomChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of knobs, its saving and its cost in words."""

    settings: dict[str, str]
    saves: str
    costs: str
    predicted_bytes: int | None = None
    """The prediction after the change; None without one."""
    missing_bytes: int | None = None
    """Bytes still lacking after the change; None when it is enough, or without a prediction."""


class OomExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The explanation of running out of memory: sizes in bytes of one rank, None when unknown."""

    phase: str | None = None
    rank: int | None = None
    grown: str | None = None
    """The category (of `memory.timeline.CATEGORIES`) that had grown when memory ended."""
    grown_bytes: int | None = None
    """Size of that category at the predicted peak."""
    held_bytes: int | None = None
    """The most that was held in that phase, measured."""
    asked_bytes: int | None = None
    """The request that failed, on top of the memory held."""
    needed_bytes: int | None = None
    """The memory model's prediction for the run."""
    limit_bytes: int | None = None
    missing_bytes: int | None = None
    """The lacking part of `needed_bytes`, or else of the request."""
    batch_size: int | None = None
    """The batch size that a search's probe was trying; None for any other run. A search expects such an end, so
    `changes` is empty."""
    others: list[str] = []
    """The other processes that held memory of the device, in words."""
    changes: list[OomChange] = []
    """Changes of knobs, ranked by cost. Those with `predicted_bytes` fit by the memory model, unless they have
    `missing_bytes`: where no change is enough the closest are given."""
    advice: list[str] = []
    """Changes of the script itself that free memory, in words."""
    basis: str = ""
    """The source of the prediction, in words."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One bottleneck: a sentence, its figures, and advice."""

    rule: str
    """The name of an entry of `bottleneck_rules.RULES`, which has the thresholds and their sources."""
    line: str
    advice: str = msgspec.field(name="try", default="")
    severity: str = "info"
    """One of warning and info."""
    cost_ms_per_step: float | None = None
    """Cost in each step, None when unknown; two bottlenecks at once may cost the same time."""
    cost_fraction: float | None = None
    """The cost as a share of the step."""
    figures: dict[str, float | int | str | None] = msgspec.field(default_factory=dict, name="evidence")
    """The figures that the rule looked at, by names that carry their units."""
    device: int | None = None
    """NVML index of the GPU that the bottleneck is about."""
    rank: int | None = None


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that makes the figures of a run doubtful."""

    kind: str
    """One of those of `results.doubts`, such as other_processes."""
    text: str
    """A predicate of the run, such as "shared the CPU: other processes took 28 % of it"."""


MIN_STEPS_TO_COMPARE = 5
"""The fewest measured steps that compare: with fewer, noise hides a difference, and percentiles are meaningless."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `result.json` and of `run --json`.

    `overrides` (JSON `changed`) are the changes of the preset by `--set` or the screen: knobs, `model.FIELD` and
    `data.FIELD` with values.
    """

    schema: int = run_file.SCHEMA
    run_id: str
    state: str
    reason: str = ""
    preset: str = ""
    variant: str | None = None
    role: str | None = None
    search_id: str | None = None
    tried: list[int] = []
    """Batch sizes that a search's warm process tried; it ended at the last. Its own `batch_size` is the preset's."""
    synthetic_data: bool | None = None
    started_wall_ns: int | None = None
    seconds: float | None = None
    knobs: run_file.RecordedKnobs = {}
    overrides: dict[str, Any] = msgspec.field(default_factory=dict, name="changed")
    actual: Actual = Actual()
    steps: StepCount = StepCount()
    loss: Losses = Losses()
    loss_difference: LossDifference | None = None
    """None without turned levers, and without a run to compare with."""
    throughput: Throughput = Throughput()
    step_ms: StepTime = StepTime()
    flops: Flops = Flops()
    memory: MemoryFigures = MemoryFigures()
    script: run_file.ScriptFigures | None = None
    """The user's own script that ran; None for a preset's run."""
    cpu: Cpu | None = None
    """None for a run on GPUs."""
    energy: Energy = Energy()
    throttle: Throttle = Throttle()
    compile: CompileCost | None = None
    precision: LossScaling | None = None
    diagnosis: list[Diagnosis] = []
    """The bottlenecks of the run, the costliest first."""
    diagnosed: bool = False
    """True if the run was diagnosed: not with too few measured steps."""
    start: RunStart | None = None
    """None in results without it."""
    error: RunError | None = None
    oom: OomExplanation | None = None
    """The explanation of a run that ran out of memory, with changes that would fit."""
    conditions: RunConditions = RunConditions()
    doubts: list[Doubt] | None = None
    """Empty if the figures stand; None while they are missing."""
    thinning: Thinning | None = None
    """None when the figures rest on all records, as in all but long runs."""
    unreadable_lines: int = 0
    troubles: list[str] = []
    """Records and figures that could not be written, read or computed beside the training, which went on."""

    @property
    def name(self) -> str:
        """The preset as it is written on the command line."""
        return run_file.name_of(self.preset, self.variant)

    @property
    def measured_under(self) -> str | None:
        """The reason this run's speed ranks against no other; None if it may rank."""
        return self.throughput.measured_under
