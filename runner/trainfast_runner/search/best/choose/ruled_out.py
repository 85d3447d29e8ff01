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

MOST_VOID = 3
"""A candidate whose trials or runs were voided so often is given up."""
UNUSABLE = ("failed", "incompatible")
"""Outcomes of a candidate that is never the answer; `incompatible` is one that a script overrode."""
LOSS_SHARE = 0.05
"""A loss leaves the baseline's when it is further off than this share of the baseline's last or first loss.

fp16 and bf16 stay within a few percent.
"""


def ruled_out(
    space: Space, ran: Sequence[Trial | ColdRun], rated: Collection[int], levels: Levels
) -> dict[int, CandidateVerdict]:
    """Return the first verdict on each candidate, after all that `ran`; `rated` are those with a trial that counts."""
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
    by_runs = (*_without_rate(space.candidates, ran, rated), *_other_losses(space, ran))
    for verdict in (*by_runs, *_failed_levels(ran, rated, levels)):
        verdicts.setdefault(verdict.candidate_number, verdict)
    return verdicts


def _without_rate(
    candidates: Sequence[Candidate], ran: Sequence[Trial | ColdRun], rated: Collection[int]
) -> list[CandidateVerdict]:
    """Verdicts on candidates that ran out of memory, failed, or were voided too often."""
    verdicts = []
    void: dict[int, int] = defaultdict(int)
    for line in ran:
        if line.outcome == "oom":
            verdicts += _too_large(line, candidates, ran)
        elif line.outcome in UNUSABLE:
            verdicts.append(
                CandidateVerdict(candidate_number=line.candidate_number, verdict=line.outcome, reason=line.reason)
            )
        elif line.outcome == "void":
            void[line.candidate_number] += 1
    for number, count in void.items():
        if count >= MOST_VOID and number not in rated:
            reason = f"other processes took the machine in {count} trials"
            verdicts.append(CandidateVerdict(candidate_number=number, verdict="not_tried", reason=reason))
    return verdicts


def _too_large(
    line: Trial | ColdRun, candidates: Sequence[Candidate], ran: Sequence[Trial | ColdRun]
) -> list[CandidateVerdict]:
    """Verdicts on a candidate that ran out of memory, and on larger batches that did not fit under its limit."""
    verdict = verdict_of(line, candidates[line.candidate_number])
    # Trials are not under memory_limit: that one fitted says nothing of a run that is.
    like = [attempt for attempt in ran if _is_under_limit(attempt)] if _is_under_limit(line) else list(ran)
    fitted = {attempt.candidate_number for attempt in like if attempt.outcome in TIMED_OUTCOMES}
    larger = [number for number in _larger_batches(line.candidate_number, candidates) if number not in fitted]
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
    return [
        other
        for other, candidate in enumerate(candidates)
        if candidate.batch_size > candidates[number].batch_size
        and all(candidate.knobs[name] == value for name, value in other_knobs.items())
    ]


def _other_losses(space: Space, ran: Sequence[Trial | ColdRun]) -> list[CandidateVerdict]:
    """Verdicts on candidates that train the same as the baseline and reach another loss on the same samples."""
    baseline = space.baseline_number
    trials = [attempt for attempt in ran if isinstance(attempt, Trial)]
    # Runs under memory_limit have fewer steps.
    full = [attempt for attempt in ran if isinstance(attempt, ColdRun) and attempt.role != UNDER_LIMIT]
    baseline_losses = next(
        (trial.losses for trial in trials if trial.candidate_number == baseline and trial.losses), []
    )
    run = next((run for run in full if run.candidate_number == baseline and run.last_loss is not None), None)
    verdicts = []
    compared: list[Trial | ColdRun] = [*trials, *full]
    for attempt in compared:
        if attempt.outcome not in TIMED_OUTCOMES:
            continue
        if changes_training(space.candidates[attempt.candidate_number], space.candidates[baseline]):
            continue
        mine = theirs = first = None
        if isinstance(attempt, Trial) and baseline_losses and attempt.losses:
            step = min(len(attempt.losses), len(baseline_losses)) - 1
            mine, theirs, first = attempt.losses[step], baseline_losses[step], baseline_losses[0]
        elif isinstance(attempt, ColdRun) and run is not None:
            mine, theirs, first = attempt.last_loss, run.last_loss, run.first_loss
        if mine is None or theirs is None:
            continue
        # A loss that has fallen far is compared by the way it came.
        if abs(mine - theirs) > LOSS_SHARE * max(abs(theirs), abs(first or 0.0)):
            reason = f"its loss was {mine:.4g} where the baseline's was {theirs:.4g}"
            verdicts.append(
                CandidateVerdict(candidate_number=attempt.candidate_number, verdict="failed", reason=reason)
            )
    return verdicts


def _failed_levels(ran: Sequence[Trial | ColdRun], rated: Collection[int], levels: Levels) -> list[CandidateVerdict]:
    """Verdicts on candidates with a value of a knob that has failed in every candidate of two or more.

    Where these candidates share several values that were never measured, it is the candidates with all of them.
    """
    failed = {attempt.candidate_number: attempt for attempt in ran if attempt.outcome in UNUSABLE}
    if len(failed) < 2:
        return []
    measured = {pair for number in rated for pair in enumerate(levels.points[number])}
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
