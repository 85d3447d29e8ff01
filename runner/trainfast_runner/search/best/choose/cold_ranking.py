"""Finalists, winner and ties of a search by its cold runs. Candidates are given by their numbers."""

from __future__ import annotations

from functools import cached_property

from trainfast_runner.known_values import lowest
from trainfast_runner.results.distributions import NORMAL_95
from trainfast_runner.search.best.choose.cold_runs import Difference, MeasuredRuns
from trainfast_runner.search.best.choose.state import BestState
from trainfast_runner.search.journal.best import (
    CONFIRM,
    RACE,
    TURN_BACK,
    UNDER_LIMIT,
    BestLaunched,
    ColdRole,
    ColdRun,
)

NEAR_LOG_GAIN = 0.03
"""Chosen, not measured: candidates within this of the leader, in ln of the objective, take part in the race."""
MAX_FINALISTS = 4
"""Chosen, not measured: the most candidates in the race. Each candidate takes cold runs."""
MIN_FASTEST_CHANCE = 0.01
"""Chosen, not measured: a candidate with a smaller chance than this to be the fastest takes no part."""
EQUAL_LOG_GAIN = 0.005
"""Candidates that differ by less than this, and by less than the noise, are equal: the simpler one wins.

With 0.01 the simpler one was up to 3.2 % off the best."""
NEAR_LIMIT_SHARE = 0.9
"""A candidate that needs more than this share of memory_limit gets a run under the limit."""
EQUAL_MEMORY_SHARE = 0.05
"""Chosen, not measured: memory that exceeds the least by at most this share is the same."""
SPEED_ROLES: tuple[ColdRole, ...] = (RACE, CONFIRM, TURN_BACK)
"""Roles of the cold runs that measure a speed: the real memory_limit slows every step of a CPU run."""


class ColdRanking:
    """The cold runs made so far, and the candidates that they leave as finalists, winner and ties."""

    def __init__(self, state: BestState) -> None:
        self.state = state
        self.baseline_number = state.space.baseline_number
        self.race_runs = MeasuredRuns(state, RACE)
        self.speed_runs = MeasuredRuns(state, *SPEED_ROLES)

    def difference(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates: by cold runs if both had some, else by the trials."""
        return self.speed_runs.difference(number, other_number) or self.by_trials(number, other_number)

    def by_trials(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates by the trials and the effects alone."""
        gain = self.state.log_gain(number, other_number)
        return Difference(gain.mean, NORMAL_95 * gain.deviation)

    @property
    def has_begun(self) -> bool:
        """True once a cold run was started for its speed: from then on there are no more trials.

        A run under memory_limit does not count: such a run may rule out every measured candidate.
        """
        runs = (line for line in self.state.journal.lines if isinstance(line, BestLaunched | ColdRun))
        return any(run.role in SPEED_ROLES for run in runs)

    @property
    def void_runs(self) -> list[ColdRun]:
        """The cold runs that are void, in their order."""
        return [run for run in self.state.journal.cold_runs if run.outcome == "void"]

    @property
    def run_count(self) -> int:
        """Number of cold runs that are not void."""
        return sum(run.outcome != "void" for run in self.state.journal.cold_runs)

    @cached_property
    def finalists(self) -> list[int]:
        """The leader, and the measured candidates near it that may be as fast, the fastest first."""
        state, leader_number = self.state, self.state.leader_number
        if leader_number is None:
            return []
        gains = [(0.0, leader_number)]
        for number in state.remaining:
            if number == leader_number or number not in state.counted_trials:
                continue
            gain = state.log_gain(number, leader_number)
            if gain.mean > -NEAR_LOG_GAIN and gain.chance_above(0.0) > MIN_FASTEST_CHANCE:
                gains.append((gain.mean, number))
        return [number for _, number in sorted(gains, key=lambda pair: (-pair[0], pair[1]))][:MAX_FINALISTS]

    def count_runs(self, number: int, *roles: ColdRole) -> int:
        """Return the number of runs of a candidate in these roles that are not void."""
        return sum(
            run.candidate_number == number and run.role in roles and run.outcome != "void"
            for run in self.state.journal.cold_runs
        )

    @cached_property
    def contenders(self) -> list[int]:
        """The finalists that are not clearly slower than the fastest in the race."""
        fastest_number = self._fastest_number
        if fastest_number is None:
            return self.finalists
        return [number for number in self.finalists if not self._is_slower(number, fastest_number)]

    @cached_property
    def equally_fast(self) -> list[int]:
        """The contenders that the race cannot tell from the fastest; the leader alone without a race."""
        fastest_number = self._fastest_number
        if fastest_number is None:
            return self.finalists[:1]
        raced_numbers = [number for number in self.contenders if number in self.race_runs.log_objectives]
        return [
            number for number in raced_numbers if number == fastest_number or self._is_equal(number, fastest_number)
        ]

    @property
    def _fastest_number(self) -> int | None:
        raced_numbers = [number for number in self.finalists if number in self.race_runs.log_objectives]
        return max(raced_numbers, key=self.race_runs.mean, default=None)

    def _is_slower(self, number: int, fastest_number: int) -> bool:
        difference = self.race_runs.difference(fastest_number, number)
        return number != fastest_number and difference is not None and difference.is_clear

    def _is_equal(self, number: int, fastest_number: int) -> bool:
        difference = self.race_runs.difference(fastest_number, number)
        return difference is not None and not difference.is_clear and difference.mean < EQUAL_LOG_GAIN

    @cached_property
    def winner_number(self) -> int:
        """The fastest of the race; ties go to less memory, then fewer overridden knobs, then a cheaper start."""
        return min(self.equally_fast, key=self._preference)

    @cached_property
    def answer_number(self) -> int:
        """The winner, or the baseline if that may be the answer and the runs that confirm show no gain over it."""
        winner_number, baseline_number = self.winner_number, self.baseline_number
        gain = self.speed_runs.difference(winner_number, baseline_number)
        if gain is None or winner_number == baseline_number or baseline_number not in self.state.remaining:
            return winner_number
        return winner_number if gain.mean >= EQUAL_LOG_GAIN or (gain.is_clear and gain.mean > 0) else baseline_number

    @cached_property
    def ties(self) -> list[int]:
        """The contenders that the runs cannot tell from the answer."""
        answer_number = self.answer_number
        other_numbers = [number for number in self.contenders if number != answer_number]
        return [number for number in other_numbers if not self.difference(number, answer_number).is_clear]

    def _preference(self, number: int) -> tuple[bool, int, float]:
        return self._needs_more_memory(number), len(self.overridden_knobs(number)), self.state.start_s(number)

    def _needs_more_memory(self, number: int) -> bool:
        """True if a candidate needs more memory than the equally fast one that needs the least."""
        needed_bytes, least_bytes = self.memory_bytes(number), self._least_bytes
        if needed_bytes is None or least_bytes is None:
            return False
        return needed_bytes > least_bytes * (1 + EQUAL_MEMORY_SHARE)

    @cached_property
    def _least_bytes(self) -> int | None:
        """Memory of the equally fast candidate that needs the least; None if no need is known."""
        return lowest(map(self.memory_bytes, self.equally_fast))

    def memory_bytes(self, number: int) -> int | None:
        """Return the measured peak of a candidate, else the predicted one; None without either."""
        state = self.state
        runs = (*state.journal.cold_runs, *state.counted_trials.get(number, ()))
        peaks = [
            run.peak_allocated_bytes for run in runs if run.candidate_number == number and run.peak_allocated_bytes
        ]
        return max(peaks, default=state.candidates[number].predicted_bytes)

    def overridden_knobs(self, number: int) -> list[str]:
        """Return the knobs that differ from the baseline's, without accumulation if the batch decides it."""
        levels = self.state.posterior.levels
        point, base = levels.points[number], levels.points[self.baseline_number]
        return [name for name, level, base_level in zip(levels.names, point, base, strict=True) if level != base_level]

    def without_override(self, number: int, knob: str) -> int | None:
        """Return the candidate with one knob turned back; None if no such candidate remains."""
        levels = self.state.posterior.levels
        base = levels.points[self.baseline_number][levels.names.index(knob)]
        turned_back = levels.with_level(number, knob, base)
        return turned_back if turned_back in self.state.remaining else None

    def is_near_limit(self, number: int) -> bool:
        """True if a candidate needs nearly all of memory_limit, or its need is unknown."""
        limits_bytes = self.state.untested_limits
        needed_bytes = self.memory_bytes(number)
        return bool(limits_bytes) and (needed_bytes is None or needed_bytes > NEAR_LIMIT_SHARE * min(limits_bytes))

    @cached_property
    def unchecked(self) -> list[int]:
        """The measured candidates near memory_limit that had no run under the limit, the fastest first."""
        state = self.state
        measured_numbers = {*state.counted_trials, *self.speed_runs.log_objectives}
        unchecked = [
            number
            for number in state.remaining
            if number in measured_numbers and self.is_near_limit(number) and not self.count_runs(number, UNDER_LIMIT)
        ]
        return sorted(unchecked, key=lambda number: -state.log_objective(number).value)
