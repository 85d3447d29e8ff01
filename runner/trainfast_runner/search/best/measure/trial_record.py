"""The `Trial` line of an ended run: every trial of a script is a run of its own."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_records import read_records
from trainfast_runner.search.best.measure.cold_run_record import outcome_of, search_doubts
from trainfast_runner.search.best.too_large import Failure, oom_failure
from trainfast_runner.search.journal.best import Candidate, Trial


def trial_of_run(
    number: int, candidate: Candidate, directory: Path, result: Result, seconds: float, *, keep_disturbed: bool
) -> Trial:
    """Return the line of an ended run of candidate `number`; `seconds` are without the preparation of the run.

    With `keep_disturbed` a run that other processes or heat disturbed is not void. The losses are left out: a script's
    samples may come in another order.
    """
    outcome, reason = outcome_of(result, candidate.knobs, keep_disturbed=keep_disturbed)
    failure = oom_failure(result) if outcome == "oom" else Failure(reason)
    step_ms, samples = _timed_steps(directory)
    joules_per_sample = result.energy.joules_per_sample
    return Trial(
        candidate_number=number,
        run_id=result.run_id,
        outcome=outcome,
        warm=False,
        samples_per_step=samples,
        step_ms=step_ms,
        joules=None if joules_per_sample is None else joules_per_sample * samples * len(step_ms),
        peak_allocated_bytes=result.memory.peak_allocated_bytes,
        seconds=seconds,
        reason=failure.reason,
        missing_bytes=failure.missing_bytes,
        doubts=search_doubts(result),
    )


def with_checked_samples(trial: Trial, candidate: Candidate) -> Trial:
    """Return the trial, incompatible if its steps took other than the candidate's samples.

    Often nothing else shows the value of a script's own flag.
    """
    if trial.outcome not in ("measured", "void") or trial.samples_per_step == candidate.samples_per_step:
        return trial
    reason = f"samples a step: {trial.samples_per_step} ran, {candidate.samples_per_step} were asked for"
    return msgspec.structs.replace(trial, outcome="incompatible", reason=reason)


def _timed_steps(directory: Path) -> tuple[list[float], int]:
    """Return the slowest rank's times of timed steps in ms, and the samples of a step on all ranks; 0 if unknown."""
    ranks = [[step for step in steps if not step.warmup] for steps in read_records(directory).steps.values()]
    steps = list(zip(*ranks, strict=False))  # a rank that was killed has fewer
    samples = [sum(line.samples or 0 for line in rank_steps) for rank_steps in steps]
    step_ms = [max(line.step_ms for line in rank_steps) for rank_steps in steps]
    return step_ms, statistics.median_low(samples) if samples else 0
