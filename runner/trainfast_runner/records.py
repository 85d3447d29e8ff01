"""The typed shape of every file in a run directory. Unknown fields are ignored, absent ones are None.

Times are CLOCK_MONOTONIC nanoseconds; `run.json` holds one wall-clock anchor to turn them into dates.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

SCHEMA = 1

# Figures outside these bounds are damage: the line counts as unreadable, and no arithmetic on it can overflow.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Bounded = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]

STATES = (
    "starting",
    "running",
    "stopping",
    "finished",
    "oom",
    "failed",
    "stopped",
    "killed",
    "lost",
    "failed_to_start",
)
END_STATES = STATES[3:]
EXIT_CODES = {
    "finished": 0,
    "oom": 3,
    "failed": 4,
    "killed": 4,
    "failed_to_start": 4,
    "lost": 5,
    "stopped": 130,
}


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """One instant on both clocks: `monotonic_ns` of this boot, `wall_ns` since the epoch."""

    monotonic_ns: int
    wall_ns: int


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: all that was asked, written once before anything starts.

    `memory_limit_bytes` is one figure a rank; `env` holds only what the launch changed.
    """

    schema: int = SCHEMA
    run_id: str
    preset: str
    variant: str | None = None
    title: str = ""
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    knobs: dict[str, Any] = {}
    changed: list[str] = []
    device: str = "cpu"
    world_size: int = 1
    device_uuids: list[str] = []
    watch_uuids: list[str] = []
    memory_limit_bytes: list[int] | None = None
    python: str = ""
    argv: list[str] = []
    env: dict[str, str] = {}
    versions: dict[str, str | None] = {}
    cwd: str = ""
    git_commit: str | None = None
    boot_id: str = ""
    clock: Clock
    cache_dir: str = ""
    used_before_bytes: dict[str, int] = {}
    start_temperature_c: float | None = None
    foreign_processes: list[dict[str, Any]] = []
    clean: bool = True
    link: str | None = None
    """The slowest path between two of the run's GPUs, as `topo` signs it; None for fewer than two."""
    role: str | None = None
    """`probe` for the process in which a search tries batch sizes, `proof` for its last run; None for any other."""
    search_id: str | None = None
    calibration: dict[str, Any] | None = None
    """What `doctor --calibrate` measured on this device, where it did."""
    predicted: dict[str, Any] | None = None
    """The memory that was predicted for the fullest rank, a `memory_model.Prediction`; None where nothing was."""

    def changes(self) -> dict[str, Any]:
        """What `--set` or the screen changed of the preset, `knob`, `model.FIELD` or `data.FIELD`, with its value."""
        sections = {"model": self.model, "data": self.data}
        found = {}
        for key in self.changed:
            section, dot, name = key.partition(".")
            found[key] = sections.get(section, {}).get(name) if dot else self.knobs.get(key)
        return found


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `steps.jsonl`: one optimizer step of one rank. Phases an engine cannot split are None.

    JSON has no NaN or infinity: such a loss is None with `loss_not_finite`.
    """

    t_ns: Count
    step: Count
    warmup: bool = False
    samples: Count
    tokens: Count
    loss: Bounded | None = None
    step_ms: Milliseconds
    data_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    other_ms: float | None = None
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    alloc_retries: Count | None = None
    lr: float | None = None
    loss_scale: float | None = None
    compiling: bool = False
    phase_peaks: dict[str, int] | None = None
    loss_not_finite: bool = False


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `worker.jsonl`. `kind` is started, phase, data, actual, overflow, exception, invalid, trouble
    (`detail` says what failed beside the training), signal (the rank was told to end, and ends) or finished; only the
    fields of its kind are set."""

    t_ns: Count
    kind: str
    rank: Count | None = None
    world_size: Count | None = None
    pid: Count | None = None
    start_ticks: Count | None = None
    phase: str | None = None
    detail: str | None = None
    step: Count | None = None
    type: str | None = None
    message: str | None = None
    chain: list[dict[str, str]] | None = None
    traceback: str | None = None
    is_oom: bool | None = None
    key: str | None = None
    allowed: list[str] | None = None
    nearest: str | None = None
    synthetic: bool | None = None
    source: str | None = None
    scale: float | None = None
    # Of kind actual: what really ran.
    wrapper: str | None = None
    optimizer: str | None = None
    param_dtype: str | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    attention: str | None = None
    device: str | None = None
    zero_stage: Count | None = None
    mesh: dict[str, Degree] | None = None
    pipeline_stages: Count | None = None
    compiled: bool | None = None
    optimizer_implementation: str | None = None
    checkpointing: str | None = None
    engine: str | None = None
    sdpa_backend: str | None = None
    reshard: str | None = None
    parameters: int | None = None
    device_name: str | None = None
    # As the model's configuration has them: some families keep a list here.
    layers: Any = None
    hidden_size: Any = None
    vocab_size: Any = None
    model_flops_per_sample: Bounded | None = None
    recomputed_flops_per_sample: Bounded | None = None
    notebook_flops_per_sample: Bounded | None = None
    loader_workers_alive: int | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `events.jsonl`. `kind` is supervisor, launched (the training's direct child), state, stop_requested,
    kill_sent, throttle_on, throttle_off, xid, foreign_process, gpu_lost, gpu_back, output_trimmed, rank_gone or
    trouble (something the supervisor could not write or read)."""

    t_ns: Count
    kind: str
    state: str | None = None
    reason: str | None = None
    pid: int | None = None
    start_ticks: int | None = None
    deadline_ns: int | None = None
    rank: int | None = None
    device: int | None = None
    detail: str | None = None


class Actual(msgspec.Struct, frozen=True, kw_only=True):
    """What really ran, read from the live objects."""

    wrapper: str | None = None
    optimizer: str | None = None
    param_dtype: str | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    attention: str | None = None
    world_size: int | None = None
    device: str | None = None
    zero_stage: int | None = None
    mesh: dict[str, int] | None = None
    pipeline_stages: int | None = None
    compiled: bool | None = None
    engine: str | None = None
    sdpa_backend: str | None = None
    optimizer_implementation: str | None = None
    parameters: int | None = None
    layers: Any = None
    hidden_size: Any = None
    vocab_size: Any = None


class StepCount(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that enter the summary and those cut as timing warm-up."""

    measured: int = 0
    warmup: int = 0


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Means of the first and last five recorded losses, None where one of those is not a finite number.

    `not_finite` counts the steps whose loss was none.
    """

    first: float | None = None
    last: float | None = None
    not_finite: int = 0


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A median and its median absolute deviation."""

    median: float | None = None
    mad: float | None = None


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Summed over data-parallel ranks, a second."""

    samples_per_s: Spread = Spread()
    tokens_per_s: Spread = Spread()


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


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """TFLOP/s of one device, and what share of its peak (0 to 1) that is.

    `mfu` counts the model's FLOPs only, `hfu` also what checkpointing computes twice. `notebook_tflops_per_device` is
    counted by the "Transformers Benchmarks" notebook's formula. `measured_peak_tflops` is what `doctor --calibrate`
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


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes: the worst rank's allocator peaks, and the device's own figure."""

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_peak_used_bytes: int | None = None
    predicted_bytes: int | None = None
    alloc_retries: int | None = None


class CompileCost(msgspec.Struct, frozen=True, kw_only=True):
    """What compiling took on top of steady steps, and how many of those win it back against `compared_with`, the
    latest such run with compile=off; `reason` says why a figure is missing."""

    cold_seconds: float | None = None
    break_even_steps: float | None = None
    compared_with: str | None = None
    reason: str | None = None


class LossScaling(msgspec.Struct, frozen=True, kw_only=True):
    """fp16's loss scale after the last step, and the steps skipped because a gradient overflowed."""

    loss_scale: float | None = None
    skipped_steps: int = 0


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Joules over the measured window, summed over watched devices; `source` is "energy counter", or "integrated
    power" where a device has no such counter."""

    joules: float | None = None
    joules_per_sample: float | None = None
    source: str | None = None


class Throttle(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the measured window in which the worst watched device was throttled, by cause.

    `devices` has each device's shares with what they come from (`throttle_causes.SOURCES`) and `lost_ms_per_step`.
    """

    thermal_fraction: float | None = None
    power_fraction: float | None = None
    brake_fraction: float | None = None
    sync_boost_fraction: float | None = None
    devices: list[dict[str, Any]] = []


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
    """Knobs as they are typed, what that frees in words, and what it costs. `predicted_bytes` is what it then needs."""

    settings: dict[str, str]
    saves: str
    costs: str
    predicted_bytes: int | None = None


class OomExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes of one rank, None where nothing tells.

    `grown` is the category (of memory_model.CATEGORIES) that had grown most when memory ended; `needed_bytes` what the
    memory model says the run needs, `missing_bytes` how much of it was not there. `others` says in words who else
    held memory of the device. `changes` are ranked by cost; those with `predicted_bytes` fit by the memory model.
    """

    phase: str | None = None
    rank: int | None = None
    grown: str | None = None
    grown_bytes: int | None = None
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    missing_bytes: int | None = None
    others: list[str] = []
    changes: list[OomChange] = []
    basis: str = ""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What else was true of the machine; `clean` is False when the comparison with another run is in doubt.

    From `steady_from_step` on neither temperature nor step time drifted any more; `still_warming` says that they
    still did at the end, None that the steps are too few to tell. The slopes are those of the last steady or drifting
    stretch. No measured step is left out for it.
    """

    start_temperature_c: float | None = None
    foreign_processes: list[dict[str, Any]] = []
    clean: bool = True
    driver: str | None = None
    steady_from_step: int | None = None
    still_warming: bool | None = None
    temperature_slope_c_per_min: float | None = None
    step_drift_percent: float | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that holds a run back: the sentence, the figures it rests on, and what to try.

    `rule` names an entry of `diagnosis_rules.RULES`, which has the thresholds and their sources. The names of
    `evidence` carry their units. `cost_fraction` is the share of a step it takes, where that can be told; `severity`
    is warning or info. `device` is an NVML index.
    """

    rule: str
    line: str
    advice: str = msgspec.field(name="try", default="")
    severity: str = "info"
    cost_fraction: float | None = None
    evidence: dict[str, float | int | str | None] = {}
    device: int | None = None
    rank: int | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`result.json`, and what `run --json` prints.

    `changed` is what `--set` or the screen changed of the preset: knobs, `model.FIELD` and `data.FIELD` with values.
    """

    schema: int = SCHEMA
    run_id: str
    state: str
    reason: str = ""
    preset: str = ""
    variant: str | None = None
    role: str | None = None
    search_id: str | None = None
    synthetic_data: bool | None = None
    started_wall_ns: int | None = None
    seconds: float | None = None
    knobs: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    actual: Actual = Actual()
    steps: StepCount = StepCount()
    loss: Losses = Losses()
    throughput: Throughput = Throughput()
    step_ms: StepTime = StepTime()
    flops: Flops = Flops()
    memory: Memory = Memory()
    energy: Energy = Energy()
    throttle: Throttle = Throttle()
    compile: CompileCost | None = None
    precision: LossScaling | None = None
    diagnosis: list[Diagnosis] = []
    """What held the run back, the costliest first."""
    diagnosed: bool = False
    """Whether that was looked for: not with too few measured steps, and not by versions that wrote no such field."""
    error: RunError | None = None
    oom: OomExplanation | None = None
    """Of a run that ran out of memory: why, and what would make it fit."""
    conditions: Conditions = Conditions()
    unreadable_lines: int = 0
    troubles: list[str] = []
    """What could not be written or read beside the training, which went on."""
