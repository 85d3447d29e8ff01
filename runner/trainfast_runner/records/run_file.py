"""The typed shape of `run.json`. Unknown fields are ignored, absent ones are None.

It holds one wall-clock anchor, by which the times of all records become dates.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from trainfast_runner.records.script_run import ScriptAsked

T = TypeVar("T")
RecordedKnobs = dict[str, Any]
"""Values of knobs by name, as a file has them: undecoded, and of any version. `spec.spec_of_record` decodes them."""

SCHEMA = 1
"""Version of `run.json` and `result.json`."""


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """One instant on both clocks: `monotonic_ns` of this boot, `wall_ns` since the epoch."""

    monotonic_ns: int
    wall_ns: int


def name_of(preset: str, variant: str | None) -> str:
    """A preset as it is written on the command line."""
    return f"{preset}/{variant}" if variant else preset


class RecordedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A `RunSpec` in files: written from `RunSpec.record_fields`, read by `spec.spec_of_record`."""

    preset: str
    variant: str | None = None
    title: str = ""
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    knobs: RecordedKnobs = {}
    overrides: list[str] = msgspec.field(default_factory=list, name="changed")

    @property
    def name(self) -> str:
        """The preset as it is written on the command line."""
        return name_of(self.preset, self.variant)

    def override_values(self) -> dict[str, Any]:
        """Overrides of the preset by `--set` or the screen: `knob`, `model.FIELD` or `data.FIELD`, with the value."""
        sections = {"model": self.model, "data": self.data}
        values = {}
        for key in self.overrides:
            section, dot, name = key.partition(".")
            values[key] = sections.get(section, {}).get(name) if dot else self.knobs.get(key)
        return values


class PredictedSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Median samples/s of a run, and the 90 % interval in which it is expected to be measured."""

    median: float
    low: float
    high: float
    basis: str = msgspec.field(name="from", default="")
    """The source of the figures in a few words."""


class LaunchThreads(msgspec.Struct, frozen=True, kw_only=True):
    """The wait policy of a CPU run's OpenMP threads, its reason, and the load of others at launch, in cores.

    `wait` is passive, default, unused, or the user's settings.
    """

    wait: str | None = None
    reason: str | None = None
    others_cores: float | None = None


class ForeignProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is not the run's, on the GPU with the NVML index `device`."""

    device: int | None = None
    pid: int | None = None
    memory_used_bytes: int | None = None


class RunFile(RecordedSpec, frozen=True, kw_only=True):
    """`run.json`: the run as asked for, written once before any process starts."""

    schema: int = SCHEMA
    run_id: str
    device: str = "cpu"
    world_size: int = 1
    device_uuids: list[str] = []
    device_names: list[str] = []
    compute_capabilities: list[str] = []
    """Compute capabilities of the GPUs in `device_names`, as in `8.6`; empty on a CPU or if one is unknown."""
    watch_uuids: list[str] = []
    memory_limit_bytes: list[int] | None = None
    """The limit of each rank; None without one."""
    python: str = ""
    limits: dict[str, int] = {}
    """The limits that the run inherits and that bind: bytes of memory, and RLIMIT_NPROC."""
    argv: list[str] = []
    env: dict[str, str] = {}
    """Only the variables that the launch changed."""
    versions: dict[str, str | None] = {}
    cwd: str = ""
    git_commit: str | None = None
    host: str = ""
    """The name of the machine that the run is on."""
    number: int | None = None
    """The number of its launch in this home."""
    boot_id: str = ""
    clock: ClockAnchor
    cache_dir: str = ""
    used_before_bytes: dict[str, int] = {}
    start_temperature_c: float | None = None
    foreign_processes: list[ForeignProcess] = []
    clean: bool = True
    """True if memory was back to its level before the last run on the same devices, plus 64 MiB."""
    link: str | None = None
    """The slowest path between two of the run's GPUs, as `topo` signs it; None for fewer than two."""
    devices_reason: str | None = None
    """The reason for these GPUs, if it is not their free memory."""
    role: str | None = None
    """`probe` for the process in which a search tries batch sizes, `proof` for its last run, `trial` for a process in
    which it tries settings, `cold` for a run of one setting; None for any other."""
    search_id: str | None = None
    calibration: dict[str, Any] | None = None
    """The ceiling that was measured on this device; None when not measured."""
    predicted: dict[str, Any] | None = None
    """The memory that was predicted for the fullest rank, a `memory.prediction.Prediction`; None when nothing was."""
    predicted_speed: PredictedSpeed | None = None
    """The speed that was predicted before the launch; None when none was."""
    script: ScriptAsked | None = None
    """The user's own script that the run is about; None for a preset's."""
    threads: LaunchThreads | None = None
    """None for a run on GPUs, and for a script with several ranks, whose launcher sets their threads."""
    cpu_has_fp16: bool | None = None
    """True if the CPU computes in fp16; None for a run on GPUs."""

    @property
    def predicted_bytes(self) -> int | None:
        """The peak that was predicted for the fullest rank; None when nothing was."""
        return _read(self.predicted, "total_bytes", int | None, None)

    @property
    def predicted_parts(self) -> dict[str, int]:
        """The predicted `NAME_bytes` at the peak of the fullest rank; empty without a prediction."""
        return {name: _read(self.predicted, name, int, 0) for name in self.predicted or {} if name.endswith("_bytes")}

    @property
    def predicted_phases(self) -> dict[str, dict[str, int]]:
        """The predicted bytes by category at the peak of each phase; empty without a prediction."""
        return _read(self.predicted, "phases", dict[str, dict[str, int]], {})

    @property
    def predicted_from_trace(self) -> str | None:
        """The name of the trace that the prediction was made from; None without a prediction."""
        return _read(self.predicted, "trace", str | None, None)

    @property
    def traced_bytes(self) -> dict[str, int]:
        """The traced peak of each phase, without corrections; empty without a prediction."""
        return _read(self.predicted, "traced_bytes", dict[str, int], {})

    @property
    def calibrated_tflops(self) -> dict[str, float]:
        """The TFLOP/s that were measured on this device, by precision; empty when not measured."""
        measured: dict[str, float] = _read(self.calibration, "tflops", dict[str, float], {})
        return {name: value for name, value in measured.items() if value > 0}

    @property
    def devices_used(self) -> int:
        """The number of devices that the run computes on: one a rank, or several GPUs of one process."""
        return max(self.world_size, len(self.device_uuids))

    @property
    def gpu_uuids(self) -> list[str]:
        """The GPUs that the run is about: those its ranks use, else those that were joined to it with `watch`."""
        return self.device_uuids or self.watch_uuids


def _read(table: dict[str, Any] | None, name: str, type: Any, default: T) -> T:
    """A field of a table without a type of its own; `default` if it is absent, or of another type in its version."""
    try:
        value: T = msgspec.convert((table or {}).get(name, default), type)
    except msgspec.ValidationError:
        return default
    return value
