"""Decide the next step of a best-fit search from its state, with the reason in words. Touches nothing.

The baseline is tried first; then, in its process, the largest batch. From then on the next trial is that of the
greatest expected improvement a second, until no candidate is likely to be 2 % better and every value of every knob was
run once, or the budget ends. Cold runs choose among the leaders and confirm the winner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property

import msgspec
import numpy as np

from trainfast_runner.results.distributions import NORMAL_95
from trainfast_runner.search.best.candidates import (
    ENOUGH_ERROR,
    MAX_TIMED_STEPS,
    MIN_TIMED_STEPS,
    ORDINARY_RULE,
    TOO_LARGE,
    UNTIMED_TRIAL_STEPS,
    StepRule,
    seq_len_of,
)
from trainfast_runner.search.best.cold_runs import COLD_ERROR, CONFIRMING_SHARE, NEAR_LOG_GAIN, SPEED_ROLES, ColdRuns
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
    BestStep,
    ColdRole,
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
        decision = decision or _largest_batch_trial(state, prospects) or _most_promising_trial(state, prospects)
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


def _largest_batch_trial(state: BestState, prospects: Prospects) -> BestDecision | None:
    """Return the trial of the largest batch that the baseline's process can take; None once another was tried."""
    levels, baseline_number = state.posterior.levels, state.space.baseline_number
    if "batch_size" not in levels.names or {trial.candidate_number for trial in state.journal.trials} != {
        baseline_number
    }:
        return None
    sizes = range(len(levels.values["batch_size"]))
    numbers = {levels.with_level(baseline_number, "batch_size", level) for level in sizes} & {*state.remaining}
    in_process = [number for number in numbers if number is not None and _share_process(state, number, baseline_number)]
    number = max(in_process, key=lambda number: state.candidates[number].batch_size, default=baseline_number)
    return _trial_of(state, number, "the largest batch that fits") if number in prospects.affordable else None


def _share_process(state: BestState, number: int, other_number: int) -> bool:
    return state.process_keys[number] == state.process_keys[other_number]


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
