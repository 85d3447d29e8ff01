"""The typed shape of `result.json`. Unknown fields are ignored, absent ones are None."""

from __future__ import annotations

from typing import Any

import msgspec

from trainfast_runner.records.result_conditions import Conditions, Energy, Throttle
from trainfast_runner.records.run_file import SCHEMA, PredictedSpeed, RecordedKnobs, name_of
from trainfast_runner.records.run_lines import Actual
from trainfast_runner.records.script_run import ScriptFigures


class StepCount(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that enter the summary and those cut as timing warm-up."""

    measured: int = 0
    warmup: int = 0


LOSSES_IN_A_MEAN = 5


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Means of the first and last five recorded losses, None when one of those is not a finite number.

    `not_finite` is the number of steps whose loss was no finite number. `recorded` is the number of losses, counted up
    to the ten of both means; None in results of earlier versions.
    """

    first: float | None = None
    last: float | None = None
    not_finite: int = 0
    recorded: int | None = None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A median and its median absolute deviation."""

    median: float | None = None
    mad: float | None = None


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Rates a second, summed over data-parallel ranks; steps are those of rank 0.

    `measured_under` is the condition that makes this speed useless for ranking; None without one. `predicted` is the
    prediction of `samples_per_s` before the launch; None when there was none.
    """

    samples_per_s: Spread = Spread()
    tokens_per_s: Spread = Spread()
    steps_per_s: Spread = Spread()
    measured_under: str | None = None
    predicted: PredictedSpeed | None = None


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
    """TFLOP/s of one device, and their share of its peak (0 to 1).

    `mfu` counts the model's FLOPs only, `hfu` also what checkpointing computes twice. `notebook_tflops_per_device` is
    counted by the "Transformers Benchmarks" notebook's formula. `measured_peak_tflops` is what the calibration
    reached on this device, `of_measured_peak` the hardware's FLOPs as a share of it.
    """

    model_tflops_per_device: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_tflops: float | None = None
    peak_source: str | None = None
    notebook_tflops_per_device: float | None = None
    measured_peak_tflops: float | None = None
    of_measured_peak: float | None = None


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Peak bytes: the worst rank's by the allocator, and the device's own figure.

    A CPU's peaks are of its strict warm-up steps; `not_measured_because` is the reason for none.
    """

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_peak_used_bytes: int | None = None
    predicted_bytes: int | None = None
    alloc_retries: int | None = None
    not_measured_because: str | None = None


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """Allocator and threads of a CPU run, which its speed depends on beside the knobs.

    `allocator` is the malloc in use; `thresholds` strict, strict in warm-up, ordinary, or kept (the user's own).
    `threads` is the OpenMP threads of a rank, `wait_policy` passive, default (they spin first), or the user's settings;
    `others_cores` is what other processes took of the cores when the run was launched, `has_fp16` if the CPU computes
    in fp16 (None where an older version did not record it).
    """

    allocator: str | None = None
    thresholds: str | None = None
    openmp: str | None = None
    threads: int | None = None
    wait_policy: str | None = None
    has_fp16: bool | None = None
    wait_policy_reason: str | None = None
    others_cores: float | None = None


STRICT_SPEED = "strict malloc thresholds, which measure memory in every step and take up to half the speed"
OLD_SPEED = "strict malloc thresholds, as all CPU runs of earlier versions"


class CompileCost(msgspec.Struct, frozen=True, kw_only=True):
    """The time of compiling beyond steady steps, and the steps that win it back against `compared_with`, the latest
    such run with compile=off; `reason` is why a figure is missing."""

    cold_seconds: float | None = None
    break_even_steps: float | None = None
    compared_with: str | None = None
    reason: str | None = None


class LossScaling(msgspec.Struct, frozen=True, kw_only=True):
    """fp16's loss scale after the last step, and the steps skipped because a gradient overflowed."""

    loss_scale: float | None = None
    skipped_steps: int = 0


class Thinning(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a long run's records that the figures rest on; counts and peaks are of all records on the disk.

    Medians, percentiles and the diagnosis are of `steps_looked_at` steps of the first rank, spread evenly over those on
    the disk. The cap of `steps.jsonl` removed the records of `steps_dropped` steps between the first and the last.
    Throttled time, clocks and temperatures are of `ticks_looked_at` of the `ticks` in the telemetry.
    """

    steps_looked_at: int = 0
    steps_dropped: int = 0
    ticks_looked_at: int = 0
    ticks: int = 0


class RunError(msgspec.Struct, frozen=True, kw_only=True):
    """The exception that ended a run, as its rank wrote it.

    `key`, `allowed` and `nearest` are set when the worker refused an input.
    """

    rank: int | None = None
    phase: str | None = None
    type: str | None = None
    message: str | None = None
    chain: list[dict[str, str]] = []
    key: str | None = None
    allowed: list[str] | None = None
    nearest: str | None = None


class OomChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of knobs, its saving and its cost in words. `predicted_bytes` is the prediction after the change.

    `missing_bytes` is still lacking after the change: None when it is enough, or without a prediction.
    """

    settings: dict[str, str]
    saves: str
    costs: str
    predicted_bytes: int | None = None
    missing_bytes: int | None = None


class OomExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The explanation of running out of memory: sizes in bytes of one rank, None when unknown.

    `grown` is the category (of `memory.prediction.CATEGORIES`) that had grown when memory ended, `grown_bytes` its
    size at the predicted peak. `held_bytes` is measured, the most that was held in that phase, and `asked_bytes`
    what was asked for on top of it; `untouched_bytes` is what a CPU's limit counted besides: address space reserved
    and not touched. `needed_bytes` is the memory model's prediction for the run, `missing_bytes` the lacking part
    of it, or else of the request. `others` names in words the other processes that held memory of the device.
    `changes` are ranked by cost; those with `predicted_bytes` fit by the memory model, unless they have
    `missing_bytes`: where no change is enough the closest are given.
    """

    phase: str | None = None
    rank: int | None = None
    grown: str | None = None
    grown_bytes: int | None = None
    held_bytes: int | None = None
    untouched_bytes: int | None = None
    asked_bytes: int | None = None
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    missing_bytes: int | None = None
    batch_size: int | None = None
    """The batch size that a search's probe was trying; None for any other run. A search expects such an end, so
    `changes` is empty."""
    others: list[str] = []
    changes: list[OomChange] = []
    basis: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One bottleneck: a sentence, its figures, and advice.

    `rule` names an entry of `bottleneck.rules.RULES`, which has the thresholds and their sources. The names in
    `figures` carry their units. `cost_ms_per_step` is its cost in each step, None when unknown, and `cost_fraction`
    the same as a share of the step; two bottlenecks at once may cost the same time. `severity`
    is warning or info. `device` is an NVML index.
    """

    rule: str
    line: str
    advice: str = msgspec.field(name="try", default="")
    severity: str = "info"
    cost_ms_per_step: float | None = None
    cost_fraction: float | None = None
    figures: dict[str, float | int | str | None] = msgspec.field(default_factory=dict, name="evidence")
    device: int | None = None
    rank: int | None = None


MIN_STEPS_TO_COMPARE = 5
"""The fewest measured steps that compare: with fewer, noise hides a difference, and percentiles are meaningless."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `result.json` and of `run --json`.

    `overrides` (JSON `changed`) are the changes of the preset by `--set` or the screen: knobs, `model.FIELD` and
    `data.FIELD` with values.
    """

    schema: int = SCHEMA
    run_id: str
    state: str
    reason: str = ""
    preset: str = ""
    variant: str | None = None
    role: str | None = None
    search_id: str | None = None
    tried: list[int] = []
    """Batch sizes that a search's warm process tried, the one it was at last; its own `batch_size` is the preset's."""
    synthetic_data: bool | None = None
    started_wall_ns: int | None = None
    seconds: float | None = None
    knobs: RecordedKnobs = {}
    overrides: dict[str, Any] = msgspec.field(default_factory=dict, name="changed")
    actual: Actual = Actual()
    steps: StepCount = StepCount()
    loss: Losses = Losses()
    throughput: Throughput = Throughput()
    step_ms: StepTime = StepTime()
    flops: Flops = Flops()
    memory: MemoryFigures = MemoryFigures()
    script: ScriptFigures | None = None
    """The user's own script that ran; None for a preset's run."""
    cpu: Cpu | None = None
    """None for a run on GPUs, and in results of versions before this field."""
    energy: Energy = Energy()
    throttle: Throttle = Throttle()
    compile: CompileCost | None = None
    precision: LossScaling | None = None
    diagnosis: list[Diagnosis] = []
    """The bottlenecks of the run, the costliest first."""
    diagnosed: bool = False
    """True if the run was diagnosed: not with too few measured steps, nor by versions without this field."""
    error: RunError | None = None
    oom: OomExplanation | None = None
    """The explanation of a run that ran out of memory, with changes that would fit."""
    conditions: Conditions = Conditions()
    thinning: Thinning | None = None
    """None when the figures rest on all records, as in all but long runs."""
    unreadable_lines: int = 0
    troubles: list[str] = []
    """Records and figures that could not be written, read or computed beside the training, which went on."""
    provisional: bool = False
    """True while the figures are missing: the supervisor writes the verdict first, then the whole result."""

    @property
    def name(self) -> str:
        """The preset as it is written on the command line."""
        return name_of(self.preset, self.variant)

    @property
    def measured_under(self) -> str | None:
        """The reason this run's speed ranks against no other; None if it may rank."""
        return speed_doubt(self.throughput.measured_under, self.actual.device, self.cpu is not None)


def speed_doubt(measured_under: str | None, device: str | None, has_cpu: bool) -> str | None:
    """The `measured_under` of a result; earlier versions wrote no `cpu`, and ran CPUs under strict thresholds."""
    return OLD_SPEED if device == "cpu" and not has_cpu else measured_under
