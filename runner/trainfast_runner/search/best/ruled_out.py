"""Find the candidates that can no longer be the answer of a best-fit search, with their verdicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import msgspec

from trainfast_runner.search.best.candidates import changes_training, verdict_of
from trainfast_runner.search.best_journal import (
    TIMED_OUTCOMES,
    UNDER_LIMIT,
    Attempt,
    AttemptOutcome,
    Candidate,
    CandidateVerdict,
    ColdRun,
    Space,
    Trial,
)
from trainfast_runner.search.effects import Levels
from trainfast_runner.search.searches import BATCH_KNOBS, value_text

MAX_VOID_ATTEMPTS = 3
"""A candidate with this many void trials or runs is given up."""
UNUSABLE_OUTCOMES: tuple[AttemptOutcome, ...] = ("failed", "incompatible")
"""Outcomes of a candidate that is never the answer."""
LOSS_SHARE = 0.05
"""A loss leaves the baseline's if the difference is over this share of the baseline's last or first loss.

fp16 and bf16 stay within a few percent.
"""
Attempts = Sequence[Attempt]
"""Trials and cold runs, in their order."""


def verdicts_ruling_out(
    space: Space, attempts: Attempts, measured_numbers: Collection[int], levels: Levels
) -> dict[int, CandidateVerdict]:
    """Return the first verdict on each candidate that is ruled out; `measured_numbers` have a trial that counts."""
    verdicts = {
        number: CandidateVerdict(
            candidate_number=number,
            verdict=candidate.excluded_as,
            reason=candidate.reason,
            excess_bytes=candidate.excess_bytes,
        )
        for number, candidate in enumerate(space.candidates)
        if candidate.excluded_as is not None
    }
    by_runs = (*_without_rate(space.candidates, attempts, measured_numbers), *_other_losses(space, attempts))
    for verdict in (*by_runs, *_failed_levels(attempts, measured_numbers, levels)):
        verdicts.setdefault(verdict.candidate_number, verdict)
    return verdicts


def _without_rate(
    candidates: Sequence[Candidate], attempts: Attempts, measured_numbers: Collection[int]
) -> list[CandidateVerdict]:
    """Return verdicts on candidates that ran out of memory, failed, or were void too often."""
    verdicts = []
    void_attempts_by_number: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        number = attempt.candidate_number
        if attempt.outcome == "oom":
            verdicts += _too_large(attempt, candidates, attempts)
        elif attempt.outcome in UNUSABLE_OUTCOMES:
            verdicts.append(CandidateVerdict(candidate_number=number, verdict=attempt.outcome, reason=attempt.reason))
        elif attempt.outcome == "void":
            void_attempts_by_number[number].append(attempt)
    for number, void_attempts in void_attempts_by_number.items():
        if len(void_attempts) >= MAX_VOID_ATTEMPTS and number not in measured_numbers:
            verdicts.append(
                CandidateVerdict(candidate_number=number, verdict="not_tried", reason=void_text(void_attempts))
            )
    return verdicts


def void_text(void_attempts: Attempts) -> str:
    """Return, in words, the number of void trials of a candidate, and the reason that the last one does not count."""
    return f"void in {len(void_attempts)} trials; the last: {void_attempts[-1].reason}"


def _too_large(failed_attempt: Attempt, candidates: Sequence[Candidate], attempts: Attempts) -> list[CandidateVerdict]:
    """Return verdicts on a candidate that ran out of memory, and on larger batches that did not fit under its limit."""
    verdict = verdict_of(failed_attempt, candidates[failed_attempt.candidate_number])
    # Trials are not under memory_limit: a trial that fitted is no evidence for a run under the limit.
    comparable = [attempt for attempt in attempts if _is_under_limit(attempt) or not _is_under_limit(failed_attempt)]
    fitted_numbers = {attempt.candidate_number for attempt in comparable if attempt.outcome in TIMED_OUTCOMES}
    larger_numbers = [
        number
        for number in _larger_batches(failed_attempt.candidate_number, candidates)
        if number not in fitted_numbers
    ]
    reason = f"a smaller batch: {verdict.reason}"
    return [
        verdict,
        *(msgspec.structs.replace(verdict, candidate_number=number, reason=reason) for number in larger_numbers),
    ]


def _is_under_limit(line: Attempt) -> bool:
    return isinstance(line, ColdRun) and line.role == UNDER_LIMIT


def _larger_batches(number: int, candidates: Sequence[Candidate]) -> list[int]:
    """Return the candidates that differ from candidate `number` only by a larger batch."""
    knobs = candidates[number].knobs
    if "batch_size" not in knobs:
        return []
    other_knobs = {name: value for name, value in knobs.items() if name not in BATCH_KNOBS}
    batch_size = candidates[number].batch_size
    return [
        other_number
        for other_number, candidate in enumerate(candidates)
        if candidate.batch_size > batch_size
        and all(candidate.knobs[name] == value for name, value in other_knobs.items())
    ]


def _other_losses(space: Space, attempts: Attempts) -> list[CandidateVerdict]:
    """Return verdicts on candidates that train the same as the baseline and reach another loss on the same samples."""
    baseline_number = space.baseline_number

    def is_comparable(attempt: Attempt) -> bool:
        candidate = space.candidates[attempt.candidate_number]
        return attempt.outcome in TIMED_OUTCOMES and not changes_training(candidate, space.candidates[baseline_number])

    trials = [attempt for attempt in attempts if isinstance(attempt, Trial) and attempt.losses]
    # Runs under memory_limit have fewer steps.
    runs = [
        attempt
        for attempt in attempts
        if isinstance(attempt, ColdRun) and attempt.role != UNDER_LIMIT and attempt.last_loss is not None
    ]
    baseline_trial = next((trial for trial in trials if trial.candidate_number == baseline_number), None)
    baseline_run = next((run for run in runs if run.candidate_number == baseline_number), None)
    return [
        *_other_trial_losses([trial for trial in trials if is_comparable(trial)], baseline_trial),
        *_other_run_losses([run for run in runs if is_comparable(run)], baseline_run),
    ]


def _other_trial_losses(trials: Sequence[Trial], baseline_trial: Trial | None) -> list[CandidateVerdict]:
    """Return verdicts on trials whose loss leaves the baseline's at the last step that both took."""
    if baseline_trial is None:
        return []
    baseline_losses = baseline_trial.losses
    last_steps = [(trial, min(len(trial.losses), len(baseline_losses)) - 1) for trial in trials]
    verdicts = [
        _loss_verdict(trial.candidate_number, trial.losses[step], baseline_losses[step], baseline_losses[0])
        for trial, step in last_steps
    ]
    return [verdict for verdict in verdicts if verdict is not None]


def _other_run_losses(runs: Sequence[ColdRun], baseline_run: ColdRun | None) -> list[CandidateVerdict]:
    """Return verdicts on runs whose last loss leaves the baseline's."""
    if baseline_run is None:
        return []
    verdicts = [
        _loss_verdict(run.candidate_number, run.last_loss, baseline_run.last_loss, baseline_run.first_loss)
        for run in runs
    ]
    return [verdict for verdict in verdicts if verdict is not None]


def _loss_verdict(
    number: int, loss: float | None, baseline_loss: float | None, first_loss: float | None
) -> CandidateVerdict | None:
    """Return the verdict on a loss that leaves the baseline's; None if it stays, or if a loss is unknown."""
    if loss is None or baseline_loss is None:
        return None
    # After a large fall the tolerance is a share of the first loss, not of the small last one.
    if abs(loss - baseline_loss) > LOSS_SHARE * max(abs(baseline_loss), abs(first_loss or 0.0)):
        reason = f"the loss was {loss:.4g} where the baseline's was {baseline_loss:.4g}"
        return CandidateVerdict(candidate_number=number, verdict="failed", reason=reason)
    return None


def _failed_levels(attempts: Attempts, measured_numbers: Collection[int], levels: Levels) -> list[CandidateVerdict]:
    """Return verdicts on candidates with a knob value that failed in two or more candidates and was never measured.

    Where those candidates share several such values, only candidates with all of them are ruled out.
    """
    failed_attempts = {
        attempt.candidate_number: attempt for attempt in attempts if attempt.outcome in UNUSABLE_OUTCOMES
    }
    if len(failed_attempts) < 2:
        return []
    measured_pairs = {pair for number in measured_numbers for pair in enumerate(levels.points[number])}
    unmeasured_pairs = {number: set(enumerate(levels.points[number])) - measured_pairs for number in failed_attempts}
    verdicts = []
    for pair in dict.fromkeys(pair for number in failed_attempts for pair in sorted(unmeasured_pairs[number])):
        numbers = [number for number in failed_attempts if pair in unmeasured_pairs[number]]
        if len(numbers) < 2:
            continue
        shared_pairs = sorted(set.intersection(*(unmeasured_pairs[number] for number in numbers)))
        names = [levels.names[index] for index, _ in shared_pairs]
        values = [levels.values[name][level] for name, (_, level) in zip(names, shared_pairs, strict=True)]
        text = " with ".join(f"{name}={value_text(name, value)}" for name, value in zip(names, values, strict=True))
        first_failed = failed_attempts[numbers[0]]
        reason = f"{text} failed in {len(numbers)} settings: {first_failed.reason}"
        verdicts += [
            CandidateVerdict(candidate_number=number, verdict=first_failed.outcome, reason=reason)
            for number, point in enumerate(levels.points)
            if all(point[index] == level for index, level in shared_pairs)
        ]
    return verdicts
