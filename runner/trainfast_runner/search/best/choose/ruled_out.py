"""The candidates that can no longer be the answer of a best-fit search, each with its verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import msgspec

from trainfast_runner.search.best.candidates import changes_training
from trainfast_runner.search.best.too_large import verdict_of
from trainfast_runner.search.candidate_spec import BATCH_KNOBS
from trainfast_runner.search.journal.best import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Candidate,
    CandidateVerdict,
    ColdRun,
    Space,
    Trial,
)
from trainfast_runner.search.speed.levels import Levels

MAX_VOID_ATTEMPTS = 3
"""A candidate whose trials or runs were voided so often is given up."""
UNUSABLE = ("failed", "incompatible")
"""Outcomes of a candidate that is never the answer; `incompatible` is one that a script overrode."""
LOSS_SHARE = 0.05
"""A loss leaves the baseline's when it is further off than this share of the baseline's last or first loss.

fp16 and bf16 stay within a few percent.
"""
Attempts = Sequence[Trial | ColdRun]


def ruled_out(
    space: Space, attempts: Attempts, measured_numbers: Collection[int], levels: Levels
) -> dict[int, CandidateVerdict]:
    """Return the first verdict on each candidate that is ruled out; measured ones have a trial that counts."""
    verdicts = {
        number: CandidateVerdict(
            candidate_number=number,
            verdict=candidate.ruled_out,
            reason=candidate.reason,
            excess_bytes=candidate.excess_bytes,
        )
        for number, candidate in enumerate(space.candidates)
        if candidate.ruled_out is not None
    }
    by_runs = (*_without_rate(space.candidates, attempts, measured_numbers), *_other_losses(space, attempts))
    for verdict in (*by_runs, *_failed_levels(attempts, measured_numbers, levels)):
        verdicts.setdefault(verdict.candidate_number, verdict)
    return verdicts


def _without_rate(
    candidates: Sequence[Candidate], attempts: Attempts, measured_numbers: Collection[int]
) -> list[CandidateVerdict]:
    """Verdicts on candidates that ran out of memory, failed, or were voided too often."""
    verdicts = []
    void: dict[int, int] = defaultdict(int)
    for attempt in attempts:
        number = attempt.candidate_number
        if attempt.outcome == "oom":
            verdicts += _too_large(attempt, candidates, attempts)
        elif attempt.outcome in UNUSABLE:
            verdicts.append(CandidateVerdict(candidate_number=number, verdict=attempt.outcome, reason=attempt.reason))
        elif attempt.outcome == "void":
            void[number] += 1
    for number, count in void.items():
        if count >= MAX_VOID_ATTEMPTS and number not in measured_numbers:
            reason = f"other processes took the machine in {count} trials"
            verdicts.append(CandidateVerdict(candidate_number=number, verdict="not_tried", reason=reason))
    return verdicts


def _too_large(failed: Trial | ColdRun, candidates: Sequence[Candidate], attempts: Attempts) -> list[CandidateVerdict]:
    """Verdicts on a candidate that ran out of memory, and on larger batches that did not fit under its limit."""
    verdict = verdict_of(failed, candidates[failed.candidate_number])
    # Trials are not under memory_limit: that one fitted says nothing of a run that is.
    comparable = [attempt for attempt in attempts if _is_under_limit(attempt) or not _is_under_limit(failed)]
    fitted = {attempt.candidate_number for attempt in comparable if attempt.outcome in TIMED_OUTCOMES}
    larger = [number for number in _larger_batches(failed.candidate_number, candidates) if number not in fitted]
    reason = f"a smaller batch: {verdict.reason}"
    return [verdict, *(msgspec.structs.replace(verdict, candidate_number=number, reason=reason) for number in larger)]


def _is_under_limit(line: Trial | ColdRun) -> bool:
    return isinstance(line, ColdRun) and line.role == UNDER_LIMIT


def _larger_batches(number: int, candidates: Sequence[Candidate]) -> list[int]:
    """Candidates that differ from one only by a larger batch."""
    knobs = candidates[number].knobs
    if "batch_size" not in knobs:
        return []
    other_knobs = {name: value for name, value in knobs.items() if name not in BATCH_KNOBS}
    batch_size = candidates[number].batch_size
    return [
        other
        for other, candidate in enumerate(candidates)
        if candidate.batch_size > batch_size
        and all(candidate.knobs[name] == value for name, value in other_knobs.items())
    ]


def _other_losses(space: Space, attempts: Attempts) -> list[CandidateVerdict]:
    """Verdicts on candidates that train the same as the baseline and reach another loss on the same samples."""
    baseline = space.candidates[space.baseline_number]
    of_baseline = [attempt for attempt in attempts if attempt.candidate_number == space.baseline_number]
    trial = next((attempt for attempt in of_baseline if isinstance(attempt, Trial) and attempt.losses), None)
    run = next((attempt for attempt in of_baseline if _has_whole_loss(attempt)), None)
    verdicts = []
    # Verdicts on trials come first.
    for attempt in sorted(attempts, key=lambda attempt: isinstance(attempt, ColdRun)):
        if attempt.outcome not in TIMED_OUTCOMES:
            continue
        if changes_training(space.candidates[attempt.candidate_number], baseline):
            continue
        loss = baseline_loss = first_loss = None
        if isinstance(attempt, Trial) and trial is not None and attempt.losses:
            step = min(len(attempt.losses), len(trial.losses)) - 1
            loss = attempt.losses[step]
            baseline_loss = trial.losses[step]
            first_loss = trial.losses[0]
        elif isinstance(attempt, ColdRun) and isinstance(run, ColdRun) and _has_whole_loss(attempt):
            loss = attempt.last_loss
            baseline_loss = run.last_loss
            first_loss = run.first_loss
        if loss is None or baseline_loss is None:
            continue
        # A loss that has fallen far is compared by the way it came.
        if abs(loss - baseline_loss) > LOSS_SHARE * max(abs(baseline_loss), abs(first_loss or 0.0)):
            reason = f"its loss was {loss:.4g} where the baseline's was {baseline_loss:.4g}"
            verdicts.append(
                CandidateVerdict(candidate_number=attempt.candidate_number, verdict="failed", reason=reason)
            )
    return verdicts


def _has_whole_loss(attempt: Trial | ColdRun) -> bool:
    """True for a cold run with a last loss; those under memory_limit have fewer steps."""
    return isinstance(attempt, ColdRun) and attempt.role != UNDER_LIMIT and attempt.last_loss is not None


def _failed_levels(attempts: Attempts, measured_numbers: Collection[int], levels: Levels) -> list[CandidateVerdict]:
    """Verdicts on candidates with a value of a knob that has failed in every candidate of two or more.

    Where these candidates share several values that were never measured, it is the candidates with all of them.
    """
    failed = {attempt.candidate_number: attempt for attempt in attempts if attempt.outcome in UNUSABLE}
    if len(failed) < 2:
        return []
    measured = {pair for number in measured_numbers for pair in enumerate(levels.points[number])}
    unmeasured = {number: set(enumerate(levels.points[number])) - measured for number in failed}
    verdicts = []
    for pair in dict.fromkeys(pair for number in failed for pair in sorted(unmeasured[number])):
        numbers = [number for number in failed if pair in unmeasured[number]]
        if len(numbers) < 2:
            continue
        shared = sorted(set.intersection(*(unmeasured[number] for number in numbers)))
        names = [levels.names[knob] for knob, _ in shared]
        values = [levels.values[name][level] for name, (_, level) in zip(names, shared, strict=True)]
        words = " with ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        first = failed[numbers[0]]
        reason = f"{words} failed in {len(numbers)} settings: {first.reason}"
        verdicts += [
            CandidateVerdict(candidate_number=number, verdict=first.outcome, reason=reason)
            for number, point in enumerate(levels.points)
            if all(point[knob] == level for knob, level in shared)
        ]
    return verdicts
