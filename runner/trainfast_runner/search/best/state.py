"""The state of a best-fit search, from its journal: the candidates that are left, their rates, costs and chances."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import msgspec

from trainfast_runner.search.best.candidates import changes_training
from trainfast_runner.search.best.effects import Levels, Likelihood, Observation, Posterior, Scales
from trainfast_runner.search.best.journal import (
    BestLine,
    BestQuestion,
    Candidate,
    CandidateVerdict,
    LaunchedBest,
    Ordered,
    Race,
    Space,
    Trial,
    Visited,
)
from trainfast_runner.search.best.objective import seq_len_of
from trainfast_runner.search.best.observed import (
    DRIFT,
    MOST_VOID_VISITS,
    Measurements,
    ProcessKey,
    Starts,
    earlier_observations,
    log_rate,
    measurements,
    process_key,
    switch_seconds,
)
from trainfast_runner.search.best.orders import ordered_out
from trainfast_runner.search.best.too_large import verdict_of

MORE = math.log(1.02)
"""A gain that is worth going on for, in ln rate."""
MOST_VOID = 3
"""A setting whose trials or runs were voided so often is given up."""
UNUSABLE = ("failed", "incompatible")
"""Outcomes of a setting that is never the answer; `incompatible` is one that a script overrode."""
MILESTONES = (8, 12, 17, 24, 33, 46, 64, 90)
"""Numbers of observations at which the scales of the effects are chosen anew."""
MAINS, PAIRS, VISITS = (0.15, 0.3, 0.6), (0.04, 0.08, 0.16), (0.003, 0.01, 0.03, 0.08)


@dataclass(frozen=True)
class BestState:
    """The state of a search after `spent_s` seconds; `warm_run_id` is the process that waits for its next trial."""

    question: BestQuestion
    space: Space
    lines: tuple[BestLine, ...]
    measured: Measurements
    posterior: Posterior
    spent_s: float
    warm_run_id: str | None
    starts: Starts = field(repr=False)
    processes: Sequence[ProcessKey] = field(repr=False)
    """The process of each candidate."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All candidates, by number."""
        return self.space.candidates

    @property
    def untested_limits(self) -> list[int]:
        """Bytes of each rank under `memory_limit`; empty without one, and where every trial is under it."""
        return [] if self.question.limits_trials else self.question.limits_bytes

    @cached_property
    def trials(self) -> list[Trial]:
        """Every trial, void ones and those of voided visits among them."""
        return [line for line in self.lines if isinstance(line, Trial)]

    @cached_property
    def races(self) -> list[Race]:
        """Every run in a fresh process."""
        return [line for line in self.lines if isinstance(line, Race)]

    @cached_property
    def ran(self) -> list[Trial | Race]:
        """Every trial and every run in a fresh process."""
        return [line for line in self.lines if isinstance(line, Trial | Race)]

    @cached_property
    def rated(self) -> dict[int, list[Trial]]:
        """The trials that count, by candidate."""
        found: dict[int, list[Trial]] = defaultdict(list)
        for trial in self.measured.trials:
            found[trial.candidate].append(trial)
        return dict(found)

    @cached_property
    def ruled_out(self) -> dict[int, CandidateVerdict]:
        """The candidates that can no longer be the answer, each with its verdict."""
        found = {
            number: CandidateVerdict(
                candidate=number, verdict=one.ruled_out, reason=one.reason, excess_bytes=one.excess_bytes
            )
            for number, one in enumerate(self.candidates)
            if one.ruled_out is not None
        }
        for verdict in (*self._ended(), *self._failed_levels()):
            found.setdefault(verdict.candidate, verdict)
        return found

    @cached_property
    def ordered_out(self) -> dict[int, str]:
        """The candidates that the person's orders leave out, each with the order. The baseline is always measured."""
        return ordered_out(self.candidates, [line for line in self.lines if isinstance(line, Ordered)])

    @cached_property
    def alive(self) -> list[int]:
        """The candidates that may still be the answer."""
        ruled_out, ordered_out = self.ruled_out, self.ordered_out
        return [
            number for number in range(len(self.candidates)) if number not in ruled_out and number not in ordered_out
        ]

    @cached_property
    def leader(self) -> int | None:
        """The measured candidate of the highest value; None before any was measured."""
        rated = [number for number in self.alive if number in self.rated]
        return max(rated, key=lambda number: self.value(number)[0], default=None)

    def value(self, number: int) -> tuple[float, float]:
        """The ln of the objective (higher is better), and its change with that of the ln rate.

        For `time`, T = start + steps x samples / rate: d(-ln T) / d(ln rate) = (T - start) / T.
        """
        mean = self.posterior.mean[number]
        return self.value_at(number, mean)

    def value_at(self, number: int, log_of_rate: float) -> tuple[float, float]:
        """The ln of the objective at another ln rate of the candidate, and its change with that rate."""
        objective = self.question.objective
        if objective in ("samples_per_s", "samples_per_joule"):
            return log_of_rate, 1.0
        one = self.candidates[number]
        if objective == "tokens_per_s":
            return log_of_rate + math.log(self.seq_len(one)), 1.0
        start = self.start_s(number)
        work = (self.question.for_steps or 1) * one.samples_per_step / math.exp(log_of_rate)
        return -math.log(start + work), work / (start + work)

    def seq_len(self, one: Candidate) -> int:
        """Tokens of a sample of a candidate."""
        return seq_len_of(self.question, one)

    def is_bound(self, number: int, leader: int) -> bool:
        """True if its FLOPs alone take longer than the leader's whole sample."""
        least = self.candidates[number].least_s_per_sample
        if not least or self.question.objective == "samples_per_joule":
            return False
        return self.value_at(number, -math.log(least))[0] < self.value(leader)[0]

    def step_s(self, number: int) -> float:
        """Expected seconds of an optimizer step."""
        return self.candidates[number].samples_per_step / math.exp(self._log_rate(number))

    def _log_rate(self, number: int) -> float:
        """The ln samples/s of a candidate; the fastest's where the model is of joules."""
        return self.posterior.mean[number] if self._fastest is None else self._fastest

    @cached_property
    def _fastest(self) -> float | None:
        if self.question.objective != "samples_per_joule":
            return None
        rates = (log_rate(one) for trials in self.rated.values() for one in trials)
        return max((rate for rate in rates if rate is not None), default=0.0)

    @cached_property
    def switch_s(self) -> float:
        """Expected seconds of a warm trial beside its timed steps."""
        return switch_seconds(self.trials)

    @cached_property
    def warm_process(self) -> ProcessKey | None:
        """The knobs of the process that waits; None without one, or where its drift voids all that it measures."""
        if self.warm_run_id in self.measured.void:
            return None
        for line in reversed(self.lines):
            if isinstance(line, Visited) and line.run_id == self.warm_run_id:
                return process_key(line.process)
            if isinstance(line, LaunchedBest) and line.run_id == self.warm_run_id:
                return self.processes[line.candidate]
        return None

    def is_warm(self, number: int) -> bool:
        """True if the process that waits can try this candidate."""
        return self.warm_process is not None and self.processes[number] == self.warm_process

    def start_s(self, number: int) -> float:
        """Expected seconds until a process of a candidate takes its first timed step."""
        return self.starts.seconds(self.processes[number])

    @cached_property
    def visit(self) -> list[Trial]:
        """The trials in the process that waits."""
        return [one for one in self.trials if one.run_id == self.warm_run_id]

    def _ended(self) -> list[CandidateVerdict]:
        """Verdicts of candidates that ran out of memory, failed, or were voided too often."""
        found = []
        void: dict[int, int] = defaultdict(int)
        for line in self.ran:
            if line.outcome == "oom":
                found += self._too_large(line)
            elif line.outcome in UNUSABLE:
                found.append(CandidateVerdict(candidate=line.candidate, verdict=line.outcome, reason=line.reason))
            elif line.outcome == "void":
                void[line.candidate] += 1
        for number, count in void.items():
            if count >= MOST_VOID and number not in self.rated:
                reason = f"other processes took the machine in {count} trials"
                found.append(CandidateVerdict(candidate=number, verdict="not_tried", reason=reason))
        return [*found, *self._left_loss()]

    def _too_large(self, line: Trial | Race) -> list[CandidateVerdict]:
        """Verdicts of a candidate that ran out of memory, and of larger batches that did not fit under its limit."""
        verdict = verdict_of(line, self.candidates[line.candidate])
        # Trials are not under memory_limit: that one fitted says nothing of a run that is.
        is_limited = isinstance(line, Race) and line.role == "limit"
        like = [one for one in self.races if one.role == "limit"] if is_limited else self.ran
        fitted = {one.candidate for one in like if one.outcome in ("measured", "slow")}
        larger = [number for number in self._larger(line.candidate) if number not in fitted]
        reason = f"a smaller batch: {verdict.reason}"
        return [verdict, *(msgspec.structs.replace(verdict, candidate=number, reason=reason) for number in larger)]

    def _larger(self, number: int) -> list[int]:
        """Candidates that differ from one only by a larger batch."""
        one = self.candidates[number].knobs
        if "batch_size" not in one:
            return []
        rest = {name: value for name, value in one.items() if name not in ("batch_size", "grad_accum")}
        return [
            other
            for other, candidate in enumerate(self.candidates)
            if candidate.knobs["batch_size"] > one["batch_size"]
            and all(candidate.knobs[name] == value for name, value in rest.items())
        ]

    def _left_loss(self) -> list[CandidateVerdict]:
        """Verdicts of candidates that train the same as the baseline and reach another loss on the same samples."""
        baseline = self.space.baseline
        own = next((one.losses for one in self.trials if one.candidate == baseline and one.losses), [])
        full = [one for one in self.races if one.role != "limit"]  # under memory_limit it takes fewer steps
        run = next((one for one in full if one.candidate == baseline and one.last_loss is not None), None)
        ran: list[Trial | Race] = [*self.trials, *full]
        found = []
        for one in ran:
            if one.outcome not in ("measured", "slow") or self.changes_training(one.candidate):
                continue
            mine = theirs = first = None
            if isinstance(one, Trial) and own and one.losses:
                step = min(len(one.losses), len(own)) - 1
                mine, theirs, first = one.losses[step], own[step], own[0]
            elif isinstance(one, Race) and run is not None:
                mine, theirs, first = one.last_loss, run.last_loss, run.first_loss
            if mine is None or theirs is None:
                continue
            # A loss that has fallen far is compared by the way it came.
            if abs(mine - theirs) > LOSS_SHARE * max(abs(theirs), abs(first or 0.0)):
                reason = f"its loss was {mine:.4g} where the baseline's was {theirs:.4g}"
                found.append(CandidateVerdict(candidate=one.candidate, verdict="failed", reason=reason))
        return found

    def changes_training(self, number: int) -> list[str]:
        """The knobs by which a candidate trains differently from the baseline."""
        return changes_training(self.candidates[number], self.candidates[self.space.baseline])

    def _failed_levels(self) -> list[CandidateVerdict]:
        """Verdicts of candidates with a value of a knob that has failed in every setting of two or more.

        Where these settings share several values that were never measured, it is the candidates with all of them.
        """
        failed = {one.candidate: one for one in self.ran if one.outcome in UNUSABLE}
        if len(failed) < 2:
            return []
        levels = self.posterior.levels
        measured = {pair for number in self.rated for pair in enumerate(levels.settings[number])}
        unmeasured = {number: set(enumerate(levels.settings[number])) - measured for number in failed}
        found = []
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
            found += [
                CandidateVerdict(candidate=number, verdict=first.outcome, reason=reason)
                for number, setting in enumerate(levels.settings)
                if all(setting[knob] == level for knob, level in shared)
            ]
        return found


LOSS_SHARE = 0.05
"""A loss leaves the baseline's when it is further off than this share of the baseline's last or first loss.

fp16 and bf16 stay within a few percent.
"""


def state_of_best_journal(
    lines: Sequence[BestLine],
    spent_s: float,
    warm_run_id: str | None = None,
    before: BestState | None = None,
    *,
    voids_drifted: bool = True,
) -> BestState:
    """Return the state after these lines. `before` is the state at an earlier line, whose posterior is extended.

    Without `voids_drifted` the trials of processes that drifted count, with the drift as noise.
    """
    question = next(line for line in lines if isinstance(line, BestQuestion))
    space = next(line for line in reversed(lines) if isinstance(line, Space))
    measured = measurements(lines, voids_drifted=voids_drifted)
    levels = before.posterior.levels if before is not None else Levels([one.knobs for one in space.candidates])
    observations = measured.observations(levels, question.objective == "samples_per_joule")
    baseline = space.candidates[space.baseline].knobs
    earlier = earlier_observations(levels, question.earlier, baseline)
    posterior = _posterior(levels, [*earlier, *observations], len(earlier), measured, before)
    processes = before.processes if before is not None else [process_key(one.process) for one in space.candidates]
    return BestState(question, space, tuple(lines), measured, posterior, spent_s, warm_run_id, Starts(lines), processes)


def _posterior(
    levels: Levels,
    observations: Sequence[Observation],
    earlier: int,
    measured: Measurements,
    before: BestState | None,
) -> Posterior:
    """The posterior after these observations, from the one of `before` where that only lacks the last of them."""
    own = observations[earlier:]
    center = own[0].value if own else 0.0
    scales = _scales(levels, center, observations, len(own), measured, before)
    posterior = before.posterior if before is not None else None
    if (
        posterior is None
        or posterior.scales != scales
        or posterior.center != center
        or list(posterior.observations) != list(observations[: len(posterior.observations)])
    ):
        posterior = Posterior(levels, scales, center)
    for observation in observations[len(posterior.observations) :]:
        posterior.add(observation)
    return posterior


def _scales(
    levels: Levels,
    center: float,
    observations: Sequence[Observation],
    count: int,
    measured: Measurements,
    before: BestState | None,
) -> Scales:
    """The scales of the greatest likelihood for the observations up to the last milestone."""
    milestone = max((one for one in MILESTONES if one <= count), default=None)
    if milestone is None:
        return Scales()
    seen = observations[: len(observations) - count + milestone]
    if before is not None and list(before.posterior.observations[: len(seen)]) == list(seen):
        return before.posterior.scales
    least = _drift_deviation(measured)
    visits = [visit for visit in VISITS if visit >= least] or [least]

    score = cache(Likelihood(levels, seen, center).log_of)
    best = Scales(visit=min(visits, key=lambda one: abs(one - Scales().visit)))
    for _ in range(2):
        best = max((replace(best, main=main) for main in MAINS), key=score)
        best = max((replace(best, pair=pair) for pair in PAIRS), key=score)
        best = max((replace(best, visit=visit) for visit in visits), key=score)
    return best


def _drift_deviation(measured: Measurements) -> float:
    """The least deviation between visits: that within visits, where too many were voided for it to be an accident."""
    if len(measured.void) < MOST_VOID_VISITS or not measured.drifts:
        return 0.0
    square = sum(drift * drift for drift in measured.drifts) / len(measured.drifts)
    return math.sqrt(square / 2) if square > DRIFT * DRIFT else 0.0
