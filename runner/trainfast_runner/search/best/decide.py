"""Decide the next step of a best-fit search from its state, with the reason in words. Touches nothing.

The baseline is tried first; then, in its process, the largest batch, and each warm knob's other values at that batch.
From then on the next trial is that of the greatest expected improvement a second, until no candidate is likely to be
2 % better and every value of every knob was run once, or the budget ends. Cold runs choose among the leaders and
confirm the winner. Their noise is pooled over repeated runs of the same candidate, with the noise of the trials as four
runs' worth of evidence; intervals are Student's.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from trainfast_runner.errors import lowest
from trainfast_runner.results.distributions import NORMAL_95, student_95
from trainfast_runner.search.best.candidates import (
    ENOUGH_ERROR,
    MAX_TIMED_STEPS,
    MIN_TIMED_STEPS,
    ORDINARY_RULE,
    TOO_LARGE,
    UNTIMED_TRIAL_STEPS,
    StepRule,
    log_objective,
    seq_len_of,
)
from trainfast_runner.search.best.state import (
    MAX_VOID_ATTEMPTS,
    UNUSABLE_OUTCOMES,
    WORTHWHILE_LOG_GAIN,
    WORTHWHILE_PERCENT,
    BestState,
    LogGains,
    void_text,
)
from trainfast_runner.search.best_journal import (
    CONFIRM,
    RACE,
    TIMED_OUTCOMES,
    TURN_BACK,
    UNDER_LIMIT,
    BestLaunched,
    BestStep,
    ColdRole,
    ColdRun,
)
from trainfast_runner.search.effects import Array, steps_for
from trainfast_runner.search.journal import EndState
from trainfast_runner.search.searches import KnobsKey, value_text
from trainfast_runner.units import chance_text, duration

HOPELESS_SHARE = 0.7
"""Chosen, not measured: a trial ends early when its best step is below this share of the leader's pace."""
LIKELY_CHANCE = 0.05
"""Trials continue while some candidate has this chance of being 2 % better than the leader."""
COUNTED_CHANCE = 0.01
"""Chosen, not measured: the outlook leaves out candidates with a smaller chance."""
MAX_VOID_COLD_RUNS = 2 * MAX_VOID_ATTEMPTS
"""After this many void cold runs of any candidates no further one is started."""
MAX_BEFORE_TURN_BACK = 12
"""From this number of counted cold runs on no knob is turned back."""
PRIOR_RUNS = 4
"""The noise of the trials counts as this many repeated runs."""
COLD_ERROR = 0.007
"""Chosen, not measured: wanted standard error of a cold run's median, as a share of the median."""
MIN_COLD_STEPS, MAX_COLD_STEPS = 8, 60
"""Chosen, not measured: timed steps of a cold run, at least and at most."""
CONFIRMING_RUNS = 4
"""Cold runs that confirm an answer: the winner and the baseline, A B B A."""
CONFIRMING_SHARE = 0.5
"""Share of the budget that is kept for the runs that confirm; the trials always have the rest."""
NEAR_LOG_GAIN = 0.03
"""Chosen, not measured: candidates within this of the leader, in ln of the objective, take part in the race."""
MAX_FINALISTS = 4
"""Chosen, not measured: the most candidates in the race. Each candidate takes cold runs."""
MIN_FASTEST_CHANCE = 0.01
"""Chosen, not measured: a candidate with a smaller chance than this to be the fastest takes no part."""
EQUAL_LOG_GAIN = 0.005
"""Candidates that differ by less than this, and by less than the noise, are equal: the simpler one wins.

With 0.01 the simpler one was up to 3.2 % off the best."""
EQUAL_MEMORY_SHARE = 0.05
"""Chosen, not measured: memory that exceeds the least by at most this share is the same."""
SPEED_ROLES: tuple[ColdRole, ...] = (RACE, CONFIRM, TURN_BACK)
"""Roles of the cold runs that measure a speed: the real memory_limit slows every step of a CPU run."""
COLD_ROLES: tuple[ColdRole, ...] = (*SPEED_ROLES, UNDER_LIMIT)
"""Roles of all cold runs."""


@dataclasses.dataclass(frozen=True)
class BestDecision:
    """The next step, for the journal, and the steps and process that it needs."""

    step: BestStep
    needs_new_process: bool = False
    """True for a trial that the warm process cannot take."""
    step_rule: StepRule = ORDINARY_RULE
    """The steps of a trial or a cold run."""
    end_state: EndState | None = None
    """The state of a search whose step is its end; None for another step."""


def decide(state: BestState) -> BestDecision:
    """Return the next step, with the leader's figures, and the chance and the price of finding more."""
    cold = ColdRuns(state)
    prospects = Prospects(state, cold)
    decision = None
    if state.leader_number is None or not cold.has_begun:
        decision = _baseline_trial(state) or _without_leader(state)
        decision = decision or _trial_in_first_process(state, prospects) or _most_promising_trial(state, prospects)
    if decision is None and (step := next_cold_run(cold)) is not None:
        decision = BestDecision(step, step_rule=StepRule(cold.steps, cold.steps, COLD_ERROR))
    if decision is None:
        decision = _end("answered", _trials_end_reason(state, prospects) or "the runs that confirm had begun")
    decision = _repeat_before_leaving(state, decision)
    number = state.leader_number
    if number is None:
        return decision
    rate, half_width = float(state.posterior.mean[number]), NORMAL_95 * math.sqrt(state.posterior.variance[number])
    chance, price_s = prospects.outlook
    step = msgspec.structs.replace(
        decision.step,
        leader_number=number,
        rate=math.exp(rate),
        low=math.exp(rate - half_width),
        high=math.exp(rate + half_width),
        chance=chance,
        price_s=price_s,
    )
    return dataclasses.replace(decision, step=step)


def _end(end_state: EndState, reason: str) -> BestDecision:
    return BestDecision(BestStep(action="end", why=reason), end_state=end_state)


def _trial_of(state: BestState, number: int, reason: str) -> BestDecision:
    step_rule = StepRule(give_up_ms=_give_up_ms(state, number))
    step = BestStep(action="trial", why=reason, candidate_number=number)
    return BestDecision(step, needs_new_process=not state.is_warm(number), step_rule=step_rule)


def _give_up_ms(state: BestState, number: int) -> float | None:
    """Return the step in ms that makes the objective of a candidate `HOPELESS_SHARE` of the leader's.

    None without a leader, for joules, and if the start alone takes longer.
    """
    question, candidate = state.question, state.candidates[number]
    if state.leader_number is None or question.objective == "samples_per_joule":
        return None
    goal = HOPELESS_SHARE * math.exp(state.log_objectives[0][state.leader_number])
    if question.objective == "time":
        left_s = 1 / goal - state.start_s(number)
        return 1000 * left_s / (question.for_steps or 1) if left_s > 0 else None
    tokens = seq_len_of(question, candidate) if question.objective == "tokens_per_s" else 1
    return 1000 * candidate.samples_per_step * tokens / goal


def _baseline_trial(state: BestState) -> BestDecision | None:
    """Return the baseline's trial; None once it was measured or does not fit."""
    number = state.space.baseline_number
    if number in state.counted_trials:
        return None
    trials = [trial for trial in state.journal.trials if trial.candidate_number == number]
    if any(trial.outcome in UNUSABLE_OUTCOMES for trial in trials):
        return _end("failed", f"the baseline failed: {trials[-1].reason}")
    void_trials = [trial for trial in trials if trial.outcome == "void"]
    if len(void_trials) >= MAX_VOID_ATTEMPTS:
        return _end("failed", f"the baseline was {void_text(void_trials)}")
    return None if number in state.ruled_out else _trial_of(state, number, "the baseline, to compare with")


def _without_leader(state: BestState) -> BestDecision | None:
    """Return the trial of the smallest candidate if the baseline has no figure; None once a candidate was measured."""
    if state.leader_number is not None:
        return None
    untried = [number for number in state.remaining if number not in state.counted_trials]
    if not untried:
        if state.excluded_by_instructions.keys() - state.ruled_out.keys():
            return _end("failed", "your instructions leave no setting that can be measured")
        if {verdict.verdict for verdict in state.ruled_out.values()} <= {TOO_LARGE, "incompatible"}:
            return _end("nothing_fits", "no setting fits")
        return _end("failed", "no setting could be measured")
    if state.spent_s > state.question.budget_s:
        return _end("failed", f"no setting could be measured in the budget of {duration(state.question.budget_s)}")

    def size(number: int) -> tuple[int, int]:
        return state.candidates[number].predicted_bytes or 0, state.candidates[number].batch_size

    baseline_number = state.space.baseline_number
    cause = state.excluded_by_instructions.get(baseline_number)
    if baseline_number in state.ruled_out:
        cause = state.ruled_out[baseline_number].reason
    return _trial_of(state, min(untried, key=size), f"the baseline is left out ({cause}): the smallest setting first")


def _trial_in_first_process(state: BestState, prospects: Prospects) -> BestDecision | None:
    """Return a trial in the baseline's process: of the largest batch that fits, then of each warm knob's other values.

    None once all of them were tried, or a candidate of another process was.
    """
    levels, baseline_number, keys = state.posterior.levels, state.space.baseline_number, state.process_keys
    key = keys[baseline_number]
    if any(keys[trial.candidate_number] != key for trial in state.journal.trials):
        return None
    sizes = range(len(levels.values.get("batch_size", ())))
    same_but_batch = {levels.with_level(baseline_number, "batch_size", level) for level in sizes}
    fitting = [number for number in state.remaining if number in same_but_batch and keys[number] == key]
    largest_number = max(fitting, key=lambda number: state.candidates[number].batch_size, default=baseline_number)
    others = [
        (levels.with_level(largest_number, name, level), f"{name}={value_text(name, value)} at that batch")
        for name in levels.names
        for level, value in enumerate(levels.values[name])
        if name != "batch_size"
    ]
    for number, reason in [(largest_number, "the largest batch that fits"), *others]:
        if number is not None and number in prospects.affordable and keys[number] == key:
            return _trial_of(state, number, reason)
    return None


def _most_promising_trial(state: BestState, prospects: Prospects) -> BestDecision | None:
    """Return the trial of the greatest expected improvement a second; None when the trials end."""
    if _trials_end_reason(state, prospects):
        return None
    likely = [number for number in prospects.likely if number in prospects.affordable]
    unseen = [number for number in prospects.with_unseen_values if number in prospects.affordable]
    value = prospects.improvements_per_s.__getitem__
    number = max(likely or unseen, key=value)
    if not state.is_warm(number):
        # Trying a new value costs about a second in the warm process, and a process start once that has ended.
        number = max(filter(state.is_warm, unseen), key=value, default=number)
    if number in likely:
        chance, gain = chance_text(prospects.chances[number]), 100 * math.expm1(prospects.gains.mean[number])
        return _trial_of(state, number, f"{chance} chance of {WORTHWHILE_PERCENT} % more, expected {gain:+.1f} %")
    return _trial_of(state, number, f"{', '.join(_unseen_values(state, number))} was never run")


def _trials_end_reason(state: BestState, prospects: Prospects) -> str | None:
    """Return the reason that the trials end, with the chance and price of going on; None if they do not."""
    if not prospects.likely and not prospects.with_unseen_values:
        likely = f"a chance above {100 * LIKELY_CHANCE:.0f} % of being {WORTHWHILE_PERCENT} % better"
        return f"no setting left has {likely}, and every value was run"
    if not prospects.is_budget_spent:
        return None
    chance, price_s = prospects.outlook
    if round(100 * chance) > 0:
        found = f"chance of finding a setting that is {WORTHWHILE_PERCENT} % better {chance_text(chance)}"
        price_text = f"{duration(price_s)} more: {found}"
    else:
        values = (value for number in prospects.with_unseen_values for value in _unseen_values(state, number))
        price_text = f"never run: {', '.join(dict.fromkeys(values))}"
    return f"the budget of {duration(state.question.budget_s)} pays for no further trial; {price_text}"


def _unseen_values(state: BestState, number: int) -> Iterator[str]:
    """Yield the values of a candidate that no trial had, as `name=value`."""
    levels = state.posterior.levels
    tried_points = [levels.points[trial.candidate_number] for trial in state.journal.trials]
    for index, name in enumerate(levels.names):
        level = levels.points[number][index]
        if all(point[index] != level for point in tried_points):
            yield f"{name}={value_text(name, levels.values[name][level])}"


def _repeat_before_leaving(state: BestState, decision: BestDecision) -> BestDecision:
    """Return the decision, or, before the search leaves the warm process, a repeat of its first trial: shows drift."""
    action, reference = decision.step.action, state.reference_trial
    stays = action == "end" or (action == "trial" and not decision.needs_new_process)
    if stays or reference is None:
        return decision
    trials = state.warm_trials[state.warm_trials.index(reference) :]
    timed = [trial for trial in trials if trial.outcome in TIMED_OUTCOMES]
    has_ended = trials[-1].outcome in ("oom", "failed")
    repeats = [trial for trial in state.warm_trials if trial.repeats]
    if (
        has_ended
        or len({trial.candidate_number for trial in timed}) < 2
        or any(trial in timed for trial in repeats)
        or len(repeats) >= MAX_VOID_ATTEMPTS
    ):
        return decision
    reason = "the first setting measured in this process again: a change would be drift"
    step = BestStep(action="trial", why=reason, candidate_number=reference.candidate_number, repeats=True)
    return BestDecision(step, step_rule=StepRule(min_steps=max(MIN_TIMED_STEPS, len(reference.step_ms))))


def next_cold_run(cold: ColdRuns) -> BestStep | None:
    """Return the next cold run; None when the answer is confirmed, or after too many void runs."""
    if sum(run.outcome == "void" for run in cold.state.journal.cold_runs) >= MAX_VOID_COLD_RUNS:
        return None
    # The leader runs under the limit before the race: without it trials may go on.
    return (
        _under_limit(cold, cold.finalists[0])
        or _race(cold)
        or _under_limit(cold, cold.winner_number)
        or _confirm(cold)
        or _under_limit(cold, cold.answer_number)
        or _turn_back(cold)
    )


def _under_limit(cold: ColdRuns, number: int) -> BestStep | None:
    """Return a candidate's run under memory_limit; None if it had one, or needs none."""
    if not cold.state.needs_limit_run or cold.count(number, UNDER_LIMIT):
        return None
    return BestStep(action=UNDER_LIMIT, why="the best setting, under memory_limit", candidate_number=number)


def _race(cold: ColdRuns) -> BestStep | None:
    """Return the next run of the race, A B B A; None when the race is decided."""
    if len(cold.finalists) < 2 or any(run.role == CONFIRM for run in cold.state.journal.cold_runs):
        return None
    for turn, order in ((1, cold.finalists), (2, [*reversed(cold.contenders)])):
        missing_numbers = [number for number in order if cold.count(number, RACE) < turn]
        is_begun = len(missing_numbers) < len(order)
        if len(order) < 2 or (not is_begun and not cold.are_affordable(missing_numbers)):
            return None
        if missing_numbers:
            reason = f"one of {len(cold.finalists)} settings within {100 * NEAR_LOG_GAIN:.0f} % of the leader"
            return BestStep(action=RACE, why=reason, candidate_number=missing_numbers[0])
    return None


def _confirm(cold: ColdRuns) -> BestStep | None:
    """Return the next run of winner, baseline, baseline, winner; None when both have two runs."""
    winner_number, baseline_number = cold.winner_number, cold.baseline_number
    order = [winner_number, baseline_number, baseline_number, winner_number]
    if winner_number == baseline_number or baseline_number in cold.state.ruled_out:
        order = [winner_number, winner_number]
    if all(cold.count(number, RACE) >= 2 for number in order):
        return None
    for index, number in enumerate(order):
        if cold.count(number, CONFIRM) < order[: index + 1].count(number):
            role = "baseline" if number == baseline_number else "winner"
            return BestStep(action=CONFIRM, why=f"the {role} in a fresh process", candidate_number=number)
    return None


def _turn_back(cold: ColdRuns) -> BestStep | None:
    """Return the run of the answer with one knob turned back, greatest gain first; None if runs or budget are spent."""
    answer_number, values = cold.answer_number, cold.state.log_objectives[0]
    overridden = cold.overridden_knobs(answer_number)
    if len(overridden) < 2 or len(cold.counted) >= MAX_BEFORE_TURN_BACK:
        return None
    turned_back = [(number, knob) for knob in overridden for number in cold.without_override(answer_number, knob)]
    for number, knob in sorted(turned_back, key=lambda pair: values[pair[0]]):
        if not cold.count(number, *COLD_ROLES) and cold.are_affordable([number]):
            reason = f"the winner with {knob} turned back to the baseline's value, to measure the gain of {knob}"
            return BestStep(action=TURN_BACK, why=reason, candidate_number=number, knob=knob)
    return None


class Prospects:
    """The expected improvement of each remaining candidate over the leader, its chance and its cost.

    Arrays are by candidate number; only the figures of `open_candidates` have a meaning.
    """

    def __init__(self, state: BestState, cold: ColdRuns) -> None:
        self._state, self._cold = state, cold

    @cached_property
    def open_candidates(self) -> list[int]:
        """Untried candidates that a trial could make the leader; the race, not a second trial, separates equals."""
        state = self._state
        closed = state.counted_trials.keys() | state.bound_numbers
        return [number for number in state.remaining if number not in closed]

    @cached_property
    def gains(self) -> LogGains:
        """The gain of each candidate over the leader."""
        assert self._state.leader_number is not None
        return self._state.log_gains(self._state.leader_number)

    @cached_property
    def chances(self) -> Array:
        """The probability that each candidate is 2 % better than the leader; 0 for all without a leader."""
        if self._state.leader_number is None:
            return np.zeros(len(self._state.candidates))
        return self.gains.chance_above(WORTHWHILE_LOG_GAIN)

    @cached_property
    def likely(self) -> list[int]:
        """Open candidates that are likely enough to be 2 % better than the leader."""
        return [number for number in self.open_candidates if self.chances[number] > LIKELY_CHANCE]

    @cached_property
    def affordable(self) -> set[int]:
        """Open candidates whose trial is expected to end within the time of the trials, its process closed."""
        state, budget_s = self._state, self._state.question.budget_s
        left_s = max(budget_s - self._cold.reserve_s(), (1 - CONFIRMING_SHARE) * budget_s) - state.spent_s
        closing_s = self._closing_s
        return {
            number
            for number in self.open_candidates
            if self.costs_s[number] <= left_s - (closing_s if state.is_warm(number) else 0.0)
        }

    @cached_property
    def is_budget_spent(self) -> bool:
        """True if some candidate is worth a trial and the budget pays for none of those."""
        worth = {*self.likely, *self.with_unseen_values}
        return bool(worth) and self.affordable.isdisjoint(worth)

    @cached_property
    def improvements_per_s(self) -> Array:
        """The expected improvement of each candidate in ln of the objective, per second of its cost."""
        mean, deviation = self.gains
        density = np.exp(-0.5 * (mean / deviation) ** 2) / math.sqrt(2 * math.pi)
        improvements: Array = (mean * self.gains.chance_above(0.0) + deviation * density) / self.costs_s
        return improvements

    @cached_property
    def costs_s(self) -> Array:
        """The expected seconds of each trial: its steps, and the start of a process if it needs a new one.

        A new process also costs a repeat in the process that it replaces. The repeat is counted even if that process
        repeats nothing, so that fewer processes are started: 12, else 13.
        """
        state = self._state
        before_s = {
            process: 0.0 if process == state.warm_process_key else self._closing_s + state.starts.seconds(process)
            for process in set(state.process_keys)
        }
        starts_s = np.array([before_s[process] for process in state.process_keys])
        costs: Array = self._steps * state.step_s + state.starts.switch_s + starts_s
        return costs

    @cached_property
    def _closing_s(self) -> float:
        """Expected seconds of repeating the warm process's first trial, before the search leaves that process."""
        reference = self._state.reference_trial
        return 0.0 if reference is None else self._steps * float(self._state.step_s[reference.candidate_number])

    @cached_property
    def _steps(self) -> int:
        """Steps of a trial: its timed ones bring its standard error below `ENOUGH_ERROR`."""
        deviation = self._state.measured.step_deviation
        return UNTIMED_TRIAL_STEPS + steps_for(deviation, ENOUGH_ERROR, MIN_TIMED_STEPS, MAX_TIMED_STEPS)

    @cached_property
    def with_unseen_values(self) -> list[int]:
        """Open candidates with values of knobs that were never run; a value that failed or did not fit was run."""
        points, trials = self._state.posterior.levels.array, self._state.journal.trials
        tried = [trial.candidate_number for trial in trials if trial.outcome != "void"]
        is_seen = [np.isin(levels, levels[tried]) for levels in points.T]
        all_seen = np.all(is_seen, axis=0) if is_seen else np.ones(len(points), dtype=bool)
        return [number for number in self.open_candidates if not all_seen[number]]

    @cached_property
    def outlook(self) -> tuple[float, float]:
        """The chance that further trials find 2 % more, and their seconds.

        Candidates that share a process have much in common: the best candidate of each process counts, independently.
        """
        best_of_process: dict[KnobsKey, int] = {}
        counted = [number for number in self.open_candidates if self.chances[number] > COUNTED_CHANCE]
        for number in sorted(counted, key=lambda number: -self.chances[number]):
            best_of_process.setdefault(self._state.process_keys[number], number)
        numbers = [*best_of_process.values()]
        return 1 - float(np.prod(1 - self.chances[numbers])), float(self.costs_s[numbers].sum())


@dataclasses.dataclass(frozen=True)
class Difference:
    """The ln of one candidate's objective less another's, and half of its 95 % interval."""

    mean: float
    half_width: float

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero."""
        return abs(self.mean) > self.half_width


class ColdRuns:
    """The cold runs of a state: their figures and costs, and the finalists, the winner and the ties that they leave."""

    def __init__(self, state: BestState) -> None:
        self.state = state
        self.baseline_number = state.space.baseline_number
        self._gains: dict[int, LogGains] = {}
        self.counted = [run for run in state.journal.cold_runs if run.outcome != "void"]
        """The cold runs that are not void, in their order."""
        measured = [run for run in self.counted if run.role in SPEED_ROLES and run.outcome == "measured"]
        self.race_figures = self._log_objectives(run for run in measured if run.role == RACE)
        self.figures = self._log_objectives(measured)
        """The ln of the objective in each run that measured a speed, by candidate number."""
        self.log_rates: dict[int, list[float]] = defaultdict(list)
        """The ln samples/s of each such run."""
        for run in measured:
            if run.samples_per_s:
                self.log_rates[run.candidate_number].append(math.log(run.samples_per_s))

    def _log_objectives(self, runs: Iterable[ColdRun]) -> dict[int, list[float]]:
        question, by_candidate = self.state.question, defaultdict(list)
        for run in runs:
            rate = run.samples_per_joule if question.objective == "samples_per_joule" else run.samples_per_s
            if rate:
                candidate = self.state.candidates[run.candidate_number]
                by_candidate[run.candidate_number].append(log_objective(question, candidate, rate, run.start_s))
        return by_candidate

    def half_width(self, figures: Mapping[int, Sequence[float]], runs: float = 1) -> float:
        """Return half of the 95 % interval of the mean of so many runs, by the noise pooled over repeated runs."""
        state = self.state
        squares, freedom = PRIOR_RUNS * (state.posterior.scales.process**2 + COLD_ERROR**2), PRIOR_RUNS
        for values in figures.values():
            if len(values) > 1:
                squares += statistics.variance(values) * (len(values) - 1)
                freedom += len(values) - 1
        return student_95(freedom) * math.sqrt(squares / freedom / runs)

    def difference_in(
        self, figures: Mapping[int, Sequence[float]], number: int, other_number: int
    ) -> Difference | None:
        """Return the difference of two candidates by these figures; None unless both have some."""
        values, others = figures.get(number), figures.get(other_number)
        if not values or not others:
            return None
        runs = 1 / (1 / len(values) + 1 / len(others))
        return Difference(statistics.fmean(values) - statistics.fmean(others), self.half_width(figures, runs))

    def difference(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates: by cold runs if both had some, else by the trials."""
        return self.difference_in(self.figures, number, other_number) or self.by_trials(number, other_number)

    def by_trials(self, number: int, other_number: int) -> Difference:
        """Return the difference of two candidates by the trials and the effects alone."""
        gains = self._gains_over(other_number)
        return Difference(float(gains.mean[number]), NORMAL_95 * float(gains.deviation[number]))

    def _gains_over(self, other_number: int) -> LogGains:
        if other_number not in self._gains:
            self._gains[other_number] = self.state.log_gains(other_number)
        return self._gains[other_number]

    @property
    def has_begun(self) -> bool:
        """True once a cold run was started for its speed: from then on there are no more trials.

        A run under memory_limit does not count: such a run may rule out every measured candidate.
        """
        runs = (line for line in self.state.journal.lines if isinstance(line, BestLaunched | ColdRun))
        return any(run.role in SPEED_ROLES for run in runs)

    def count(self, number: int, *roles: ColdRole) -> int:
        """Return the number of runs of a candidate in these roles that are not void."""
        return sum(run.candidate_number == number and run.role in roles for run in self.counted)

    @cached_property
    def finalists(self) -> list[int]:
        """The leader, and the measured candidates near it that may be as fast, the fastest first."""
        state, leader_number = self.state, self.state.leader_number
        if leader_number is None:
            return []
        gains = self._gains_over(leader_number)
        chances = gains.chance_above(0.0)
        near = [
            number
            for number in state.remaining
            if number in state.counted_trials
            and (
                number == leader_number
                or (gains.mean[number] > -NEAR_LOG_GAIN and chances[number] > MIN_FASTEST_CHANCE)
            )
        ]
        return sorted(near, key=lambda number: -gains.mean[number])[:MAX_FINALISTS]

    @cached_property
    def contenders(self) -> list[int]:
        """The finalists that are not clearly slower than the fastest in the race."""
        behind = self._behind_fastest
        return [number for number in self.finalists if number not in behind or not behind[number].is_clear]

    @cached_property
    def _behind_fastest(self) -> dict[int, Difference]:
        """The lead of the fastest in the race over each raced finalist; empty without a race."""
        raced = [number for number in self.finalists if number in self.race_figures]
        fastest = max(raced, key=lambda number: statistics.fmean(self.race_figures[number]), default=None)
        leads = {
            number: self.difference_in(self.race_figures, fastest, number) for number in raced if fastest is not None
        }
        return {number: lead for number, lead in leads.items() if lead is not None}

    @cached_property
    def equally_fast(self) -> list[int]:
        """The contenders that the race cannot tell from the fastest; the leader alone without a race."""
        leads = self._behind_fastest.items()
        return [number for number, lead in leads if not lead.is_clear and lead.mean < EQUAL_LOG_GAIN] or self.finalists[
            :1
        ]

    @cached_property
    def winner_number(self) -> int:
        """The fastest of the race; ties go to less memory, then fewer overridden knobs, then a cheaper start."""
        least_bytes = lowest(map(self.state.journal.memory_bytes, self.equally_fast)) or 0

        def preference(number: int) -> tuple[bool, int, float]:
            needs_more = (self.state.journal.memory_bytes(number) or 0) > least_bytes * (1 + EQUAL_MEMORY_SHARE)
            return needs_more, len(self.overridden_knobs(number)), self.state.start_s(number)

        return min(self.equally_fast, key=preference)

    @cached_property
    def answer_number(self) -> int:
        """The winner, or the baseline if that may be the answer and the runs that confirm show no gain over it."""
        winner_number, baseline_number = self.winner_number, self.baseline_number
        gain = self.difference_in(self.figures, winner_number, baseline_number)
        if gain is None or baseline_number not in self.state.remaining:
            return winner_number
        return winner_number if gain.mean >= EQUAL_LOG_GAIN or (gain.is_clear and gain.mean > 0) else baseline_number

    @cached_property
    def ties(self) -> list[int]:
        """The contenders that the runs cannot tell from the answer."""
        others = [number for number in self.contenders if number != self.answer_number]
        return [number for number in others if not self.difference(number, self.answer_number).is_clear]

    def overridden_knobs(self, number: int) -> list[str]:
        """Return the knobs that differ from the baseline's, without accumulation if the batch decides it."""
        levels = self.state.posterior.levels
        point, base = levels.points[number], levels.points[self.baseline_number]
        return [name for name, level, base_level in zip(levels.names, point, base, strict=True) if level != base_level]

    def without_override(self, number: int, knob: str) -> list[int]:
        """Return the candidate with one knob turned back; empty if no such candidate remains."""
        levels = self.state.posterior.levels
        base = levels.points[self.baseline_number][levels.names.index(knob)]
        turned_back = levels.with_level(number, knob, base)
        return [other for other in self.state.remaining if other == turned_back]

    @cached_property
    def steps(self) -> int:
        """Timed steps of each run: enough for `COLD_ERROR`, but confirming takes half of the budget at most."""
        state = self.state
        needed_steps = steps_for(state.measured.step_deviation, COLD_ERROR, MIN_COLD_STEPS, MAX_COLD_STEPS)
        budget_per_run_s = CONFIRMING_SHARE * state.question.budget_s / CONFIRMING_RUNS
        affordable = min((budget_per_run_s - state.start_s(number)) / state.step_s[number] for number in self._sides)
        return max(MIN_COLD_STEPS, min(needed_steps, int(affordable)))

    def are_affordable(self, numbers: Sequence[int]) -> bool:
        """True if the budget pays for one run of every candidate in `numbers`."""
        return self.state.spent_s + sum(map(self._run_s, numbers)) <= self.state.question.budget_s

    def reserve_s(self) -> float:
        """Expected seconds of the runs that confirm: two of the leader and two of the baseline."""
        return 2 * sum(map(self._run_s, self._sides))

    def _run_s(self, number: int) -> float:
        return self.state.start_s(number) + self.steps * float(self.state.step_s[number])

    @property
    def _sides(self) -> list[int]:
        """The leader, if there is one, and the baseline."""
        return [number for number in (self.state.leader_number, self.baseline_number) if number is not None]
