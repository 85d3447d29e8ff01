"""What this machine's own runs took beyond their prediction: kernel workspaces, fragmentation, the CUDA context.

A finished run leaves, for its trace, strategy and number of ranks, the difference at each phase's peak; later
predictions of the same add it. It is kept in the home, by device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.home import home_directory
from trainfast_runner.json_lines import write_atomically
from trainfast_runner.problem import Problem
from trainfast_runner.result import Result
from trainfast_runner.run_records import RunRecords

CORRECTIONS_FILE = "memory_corrections.json"
MOST_KEPT = 500


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that `run_id` took beyond the traced peak, by phase; negative where it took less.

    `step_bytes` is the traced peak of its forward and backward: what it took beyond grows with that.
    """

    run_id: str
    beyond_bytes: dict[str, int]
    step_bytes: int | None = None

    def share(self, step_bytes: float) -> float:
        """How much of it a step of this size takes: a smaller one less, a larger one no more than was seen."""
        return 1.0 if not self.step_bytes else min(1.0, step_bytes / self.step_bytes)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One device's: `context_bytes` outside of the allocator, and corrections by trace, strategy and ranks."""

    context_bytes: int | None = None
    corrections: dict[str, Correction] = {}


def case(trace: str, knobs: Mapping[str, Any], ranks: int) -> str:
    """What a correction holds for: compiled, or by another engine, the same step takes other temporary bytes."""
    return "/".join([trace, *(str(knobs.get(name)) for name in ("strategy", "engine", "compile")), str(ranks)])


def read(home: Path | None = None) -> dict[str, Machine]:
    """By device, cpu or cuda; a damaged file or one of nobody is none."""
    try:
        content = ((home or home_directory()) / CORRECTIONS_FILE).read_bytes()
        return msgspec.json.decode(content, type=dict[str, Machine])
    except (OSError, msgspec.DecodeError, Problem):
        return {}


def learn(home: Path, records: RunRecords, result: Result) -> None:
    """Keep what a finished run took beyond its trace; nothing where it was not predicted or not measured.

    Raises OSError where the home cannot be written.
    """
    run = records.run
    predicted = (run.predicted or {}) if run else {}
    measured = _peaks(records)
    traced = predicted.get("traced_bytes")
    if run is None or result.state != "finished" or not measured or not isinstance(traced, dict):
        return
    beyond = {phase: peak - traced[phase] for phase, peak in measured.items() if isinstance(traced.get(phase), int)}
    known = read(home)
    machine = known.get(run.device, Machine())
    where = case(str(predicted.get("trace")), run.knobs, run.world_size)
    correction = Correction(run_id=run.run_id, beyond_bytes=beyond, step_bytes=traced.get("forward_backward"))
    found = {**machine.corrections, where: correction}
    known[run.device] = Machine(
        context_bytes=_context(records, result) or machine.context_bytes,
        corrections=dict(list(found.items())[-MOST_KEPT:]),
    )
    write_atomically(home / CORRECTIONS_FILE, msgspec.json.encode(known))


def _peaks(records: RunRecords) -> dict[str, int]:
    """Bytes at each phase's peak on the fullest rank, over all steps."""
    found: dict[str, int] = {}
    for steps in records.steps.values():
        for step in steps:
            for phase, peak in (step.phase_peaks or {}).items():
                found[phase] = max(found.get(phase, 0), peak)
    return found


def _context(records: RunRecords, result: Result) -> int | None:
    """What the device held beyond what was used before and what torch reserved: context, kernels, NCCL."""
    run, used, reserved = records.run, result.memory.device_peak_used_bytes, result.memory.peak_reserved_bytes
    if run is None or run.device != "cuda" or used is None or reserved is None or not result.conditions.clean:
        return None
    before = max(run.used_before_bytes.values(), default=0)
    return max(0, used - before - reserved) or None
