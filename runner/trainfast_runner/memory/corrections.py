"""Corrections of predictions by this machine's own runs: kernel workspaces, fragmentation, the CUDA context.

A finished run leaves, for its trace, strategy and number of ranks, the difference at each phase's peak, which later
predictions of the same case add. A run that ran out of memory under a limit leaves the least that it must have taken
beyond its trace. Kept in the home, by the device's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu import cpu_name
from trainfast_runner.records.home import home_directory
from trainfast_runner.records.json_lines import DAMAGE, read_regular, write_atomically
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import locked
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import RunRecords
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.worker.shared.memory_limit import limit_of_rank

CORRECTIONS_FILE = "memory_corrections.json"
NOT_TRACED = (
    ("compile", ("default", "max-autotune"), "the memory of the compiled program and its compiler"),
    ("engine", ("trainer",), "the Trainer's own memory"),
)
"""Knobs, their values, and the memory of these that no trace shows."""
WHOLE_STEP = "step"
"""Key of a correction of the whole step: a run that ran out of memory tells nothing of single phases."""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a run took beyond the traced peak."""

    run_id: str
    beyond_bytes: dict[str, int]
    """Bytes by phase; negative if the run took less."""
    step_bytes: int | None = None
    """The traced peak of forward and backward, with which the correction grows."""

    def share(self, knobs: Mapping[str, Any], step_bytes: float) -> float:
        """The share that applies to a step of this size: less for a smaller one, 1 at most.

        1 too for a run that keeps untraced memory, whatever the size of the step.
        """
        keeps_untraced = any(knobs.get(name) in values for name, values, _ in NOT_TRACED)
        return 1.0 if keeps_untraced or not self.step_bytes else min(1.0, step_bytes / self.step_bytes)


class DeviceCorrections(msgspec.Struct, frozen=True, kw_only=True):
    """The corrections of one device: `context_bytes` outside of the allocator, and corrections by `correction_key`."""

    device: str = "cpu"
    """The device's kind: cpu or cuda."""
    context_bytes: int | None = None
    by_case: dict[str, Correction] = msgspec.field(default_factory=dict, name="corrections")
    failed_by_case: dict[str, Correction] = msgspec.field(default_factory=dict, name="failed")
    """Least bytes beyond the trace, under WHOLE_STEP, of runs that ran out of memory under a limit of a CPU."""


def correction_key(trace: str, knobs: Mapping[str, Any], ranks: int) -> str:
    """The key of a correction: compiled, or by another engine, the same step takes other temporary bytes."""
    return "/".join([trace, *(str(knobs.get(name)) for name in ("strategy", "engine", "compile")), str(ranks)])


def read_corrections(home: Path | None = None) -> dict[str, DeviceCorrections]:
    """Read the corrections by device name; empty if there is no file or it is damaged."""
    return _corrections_or_trouble(home)[0]


def unreadable_reason(home: Path | None = None) -> str | None:
    """Return the error that keeps the home's corrections from being read, in one line; None without one."""
    return _corrections_or_trouble(home)[1]


def _corrections_or_trouble(home: Path | None) -> tuple[dict[str, DeviceCorrections], str | None]:
    try:
        file = (home or home_directory()) / CORRECTIONS_FILE
        return msgspec.json.decode(read_regular(file), type=dict[str, DeviceCorrections]), None
    except (FileNotFoundError, UserError):
        return {}, None
    except (OSError, *DAMAGE) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return {}, f"{file} cannot be read ({reason}): nothing is corrected by earlier runs until another one ends"


def read_device_corrections(device: str, gpu: str | None = None, home: Path | None = None) -> DeviceCorrections:
    """The corrections of a device, cpu or cuda; when no GPU is named, of the only one that has any."""
    devices = read_corrections(home)
    if device != "cuda":
        return devices.get(cpu_name(), DeviceCorrections())
    if gpu is not None:
        return devices.get(gpu, DeviceCorrections())
    gpus = [corrections for corrections in devices.values() if corrections.device == "cuda"]
    return gpus[0] if len(gpus) == 1 else DeviceCorrections()


MAX_KEPT = 500
"""Chosen, not measured: most corrections of a device, since every prediction reads the file."""
FEWEST_STEPS = 2
"""Fewest steps of a run that corrects: the first step has no optimizer states before its update."""
TRAINING_PHASES = ("forward", "backward", "optimizer", "train")
"""Phases in which the training itself runs out of memory; an engine that cannot split a step says train."""
LOCK_WITHIN_S = 2.0
"""Chosen, not measured: a correction is given up rather than keep the run's result waiting longer."""
MAX_BEYOND = 0.5
MAX_BEYOND_BYTES = 512 << 20
"""Share of a traced peak, and bytes: a run whose peak is off by more than both took another step."""


def record_correction(home: Path, records: RunRecords, result: Result) -> None:
    """Keep the bytes a finished run took beyond its trace, or the least that one which ran out of memory took.

    Does nothing for a run without prediction or measurement. Raises OSError when the home cannot be written, or its
    lock is not free in time.
    """
    run = records.run
    if run is None or run.predicted_from_trace is None or run.role in WARM_ROLES:
        return
    beyond_bytes = _beyond_bytes(records, result)
    failed = _failed_correction(run, result)
    if not beyond_bytes and failed is None:
        return
    name = _device_name(run)
    key = correction_key(run.predicted_from_trace, run.knobs, run.world_size)
    # Two runs may end together.
    with locked(home / f"{CORRECTIONS_FILE}.lock", within_s=LOCK_WITHIN_S):
        devices = read_corrections(home)
        corrections = devices.get(name, DeviceCorrections())
        context_bytes = (_context_bytes(records, result) if beyond_bytes else None) or corrections.context_bytes
        corrections = devices[name] = msgspec.structs.replace(
            corrections, device=run.device, context_bytes=context_bytes
        )
        if beyond_bytes:
            step_bytes = run.traced_bytes.get("forward_backward")
            _keep_newest(
                corrections.by_case,
                key,
                Correction(run_id=run.run_id, beyond_bytes=beyond_bytes, step_bytes=step_bytes),
            )
        known_failure = corrections.failed_by_case.get(key)
        if failed is not None and (
            known_failure is None or known_failure.beyond_bytes[WHOLE_STEP] < failed.beyond_bytes[WHOLE_STEP]
        ):
            _keep_newest(corrections.failed_by_case, key, failed)
        elif beyond_bytes and known_failure is not None and _refutes(run, known_failure):
            del corrections.failed_by_case[key]
        write_atomically(home / CORRECTIONS_FILE, msgspec.json.encode(devices))


def _device_name(run: RunFile) -> str:
    if run.device_names:
        return run.device_names[0]
    return "GPU" if run.device == "cuda" else cpu_name()


def _limit_bytes(run: RunFile, rank: int = 0) -> int | None:
    """The limit of address space that a rank of the run had; None on a GPU, and without a limit."""
    return limit_of_rank(run.memory_limit_bytes, rank) if run.device == "cpu" else None


def _failed_correction(run: RunFile, result: Result) -> Correction | None:
    """The least that a run which ran out of memory under a limit took beyond its trace; None for any other run."""
    error = result.error
    if result.state != "oom" or error is None or error.phase not in TRAINING_PHASES:
        return None
    limit_bytes, traced_bytes = _limit_bytes(run, error.rank or 0), _traced_peak_bytes(run)
    if limit_bytes is None or traced_bytes is None or limit_bytes < traced_bytes:
        return None
    return Correction(
        run_id=run.run_id, beyond_bytes={WHOLE_STEP: limit_bytes - traced_bytes + 1}, step_bytes=traced_bytes
    )


def _refutes(run: RunFile, failed: Correction) -> bool:
    """True if a run finished that should have run out of memory by `failed`."""
    limit_bytes, traced_bytes = _limit_bytes(run), _traced_peak_bytes(run)
    return (
        limit_bytes is not None
        and traced_bytes is not None
        and limit_bytes - traced_bytes < failed.share(run.knobs, traced_bytes) * failed.beyond_bytes[WHOLE_STEP]
    )


def _traced_peak_bytes(run: RunFile) -> int | None:
    return max(run.traced_bytes.values(), default=None)


def _keep_newest(corrections: dict[str, Correction], key: str, new: Correction) -> None:
    """Add a correction as the newest; the oldest beyond MAX_KEPT go."""
    corrections.pop(key, None)
    corrections[key] = new
    while len(corrections) > MAX_KEPT:
        del corrections[next(iter(corrections))]


def _beyond_bytes(records: RunRecords, result: Result) -> dict[str, int]:
    """Bytes beyond the trace by phase; empty for a run that says nothing about the next one."""
    run = records.run
    if run is None or result.state != "finished":
        return {}
    if run.data.get("samples", "packed") != "packed" or min(map(len, records.steps.values()), default=0) < FEWEST_STEPS:
        return {}
    traced_bytes = run.traced_bytes
    beyond_bytes = {
        phase: peak - traced_bytes[phase] for phase, peak in _phase_peaks(records).items() if phase in traced_bytes
    }
    if any(abs(size) > max(MAX_BEYOND * traced_bytes[phase], MAX_BEYOND_BYTES) for phase, size in beyond_bytes.items()):
        return {}
    return beyond_bytes


def _phase_peaks(records: RunRecords) -> dict[str, int]:
    """Bytes at each phase's peak on the fullest rank, over all steps."""
    peaks: dict[str, int] = {}
    for rank in records.steps:
        for phase, peak in records.totals(rank).phase_peaks.items():
            peaks[phase] = max(peaks.get(phase, 0), peak)
    return peaks


def _context_bytes(records: RunRecords, result: Result) -> int | None:
    """Bytes of the device outside torch's allocator: context, kernels, NCCL; None when not measured.

    Only samples since torch reserved the most count: a short run may have only older ones.
    """
    run, reserved_bytes = records.run, result.memory.peak_reserved_bytes
    if run is None or run.device != "cuda" or reserved_bytes is None or not result.conditions.clean:
        return None
    steps = [step for steps_of_rank in records.steps.values() for step in steps_of_rank]
    since_ns = min((step.t_ns for step in steps if step.peak_reserved_bytes == reserved_bytes), default=None)
    if since_ns is None:
        return None
    until_ns = max(step.t_ns for step in steps)
    used_bytes = [
        sample.memory_used_bytes
        for uuid in run.device_uuids
        for t_ns, sample in records.device_samples.get(uuid, ())
        if since_ns <= t_ns <= until_ns and sample.memory_used_bytes is not None
    ]
    before_bytes = max(run.used_before_bytes.values(), default=0)
    return max(0, max(used_bytes, default=0) - before_bytes - reserved_bytes) or None
