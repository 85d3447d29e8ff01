"""The `ColdRun` line of an ended run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from trainfast_runner.records.result import Doubt, Result
from trainfast_runner.results.doubts import doubts
from trainfast_runner.results.start_time import read_start_s
from trainfast_runner.search.best.disturbances import void_reason
from trainfast_runner.search.best.too_large import Failure, oom_failure
from trainfast_runner.search.journal.best import AttemptOutcome, BestLaunched, ColdRun
from trainfast_runner.search.script_runs import incompatible_reason

UNTIMED_COLD_STEPS = 3
"""Untimed steps of a cold run, as of any run; on a CPU its memory is measured in them."""


def cold_run_of(
    launch_line: BestLaunched, directory: Path, result: Result, knobs: Collection[str], *, keep_disturbed: bool
) -> ColdRun:
    """Return the line of an ended cold run of a candidate with these knobs.

    With `keep_disturbed` a run that other processes or heat disturbed is not void. A script has no losses here: its
    samples may come in another order.
    """
    rate = result.throughput.samples_per_s
    joules_per_sample = result.energy.joules_per_sample
    outcome, reason = outcome_of(result, knobs, keep_disturbed=keep_disturbed)
    failure = oom_failure(result) if outcome == "oom" else Failure(reason)
    has_losses = result.script is None
    return ColdRun(
        candidate_number=launch_line.candidate_number,
        role=launch_line.role,
        run_id=result.run_id,
        outcome=outcome,
        knob=launch_line.knob,
        samples_per_s=rate.typical if outcome in ("measured", "void") else None,
        mad=rate.mad if outcome in ("measured", "void") else None,
        samples_per_joule=1 / joules_per_sample if joules_per_sample else None,
        predicted=result.throughput.predicted,
        start_s=read_start_s(directory),
        peak_allocated_bytes=result.memory.peak_allocated_bytes,
        first_loss=result.loss.first if has_losses else None,
        last_loss=result.loss.last if has_losses else None,
        seconds=result.seconds or 0.0,
        reason=failure.reason,
        missing_bytes=failure.missing_bytes,
        doubts=search_doubts(result),
    )


def search_doubts(result: Result) -> list[Doubt]:
    """Return the doubts about a run's figures; few steps are none, because the intervals of a search count steps."""
    return [doubt for doubt in doubts(result) if doubt.kind != "few_steps"]


def outcome_of(result: Result, knobs: Collection[str] = (), *, keep_disturbed: bool) -> tuple[AttemptOutcome, str]:
    """Return the outcome of an ended run and its reason.

    A run is incompatible when its script overrode one of these knobs.
    """
    if result.state == "oom":
        return "oom", result.reason
    if result.state == "lost":
        return "void", f"lost: {result.reason}"
    if result.state != "finished" or result.throughput.samples_per_s.typical is None:
        reason = result.reason or _no_rate_reason(result)
        return "failed", f"{result.state}: {reason}" if reason else result.state
    if result.loss.not_finite:
        return "failed", f"the loss of {result.loss.not_finite} steps is not finite"
    overridden = incompatible_reason(result, knobs)
    if overridden is not None:
        return "incompatible", overridden
    reason = void_reason(doubts(result))
    return "measured" if not reason or keep_disturbed else "void", reason


def _no_rate_reason(result: Result) -> str:
    """Return the reason that a script's samples are unknown; empty for any other run."""
    return "" if result.script is None else result.script.unknown.get("samples", "")
