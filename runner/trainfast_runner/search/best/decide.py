"""Decide the next step of a best-fit search from its state, with the reason in words. Touches nothing.

The baseline is tried first; then, in its process, the largest batch, and each warm knob's other values at that batch.
From then on the next trial is that of the greatest expected improvement a second, until no candidate
is likely to be 2 % better and every value of every knob was run once, or the budget ends. Cold runs choose among the
leaders and confirm the winner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec

from trainfast_runner.results.distributions import NORMAL_95
from trainfast_runner.search.best.candidates import (
    ENOUGH_ERROR,
    MAX_TIMED_STEPS,
    MIN_TIMED_STEPS,
    ORDINARY_RULE,
    TOO_LARGE,
    UNTIMED_TRIAL_STEPS,
    LogGain,
    StepRule,
    seq_len_of,
)
from trainfast_runner.search.best.cold_runs import (
    COLD_ERROR,
    NEAR_LOG_GAIN,
    SPEED_ROLES,
    TRIALS_SHARE,
    ColdCosts,
    ColdRanking,
)
from trainfast_runner.search.best.ruled_out import MAX_VOID_ATTEMPTS, UNUSABLE_OUTCOMES, void_text
from trainfast_runner.search.best.state import WORTHWHILE_LOG_GAIN, WORTHWHILE_PERCENT, BestState, state_of_best_journal
from trainfast_runner.search.best_journal import CONFIRM, RACE, TURN_BACK, UNDER_LIMIT, BestStep, ColdRole
from trainfast_runner.search.journal import EndState
from trainfast_runner.search.measured_speeds import steps_for
from trainfast_runner.search.searches import KnobsKey, value_text
from trainfast_runner.units import chance_text, duration

HOPELESS_SHARE = 0.7
"""Chosen, not measured: a trial ends early when its best step is below this share of the leader's pace."""


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
    """Return the next step."""
    state = count_drifted_if_budget_spent(state)
    ranking, costs = ColdRanking(state), ColdCosts(state)
    prospects = Prospects(state, costs)
    decision = None
    if state.leader_number is None or not ranking.has_begun:
        decision = _next_trial(state, prospects)
    decision = decision or _next_cold_run(ranking, costs, prospects)
    return _with_figures(_repeat_before_leaving(state, decision), state, prospects)


def _next_trial(state: BestState, prospects: Prospects) -> BestDecision | None:
    """Return the next trial, or the end of a search that measures nothing; None once the trials are over."""
    decision = _baseline_trial(state) or _without_leader(state) or _trial_in_first_process(state, prospects)
    return decision or _most_promising_trial(state, prospects)


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


def _trial_in_first_process(state: BestState, prospects: Prospects) -> BestDecision | None:
    """Return a trial in the baseline's process: the largest batch that fits, then each warm knob's other values."""
    process_knobs = state.candidates[state.space.baseline_number].process_knobs
    if any(state.candidates[trial.candidate_number].process_knobs != process_knobs for trial in state.journal.trials):
        return None
    if state.spent_s > TRIALS_SHARE * state.question.budget_s:
        return None
    tried_numbers = {
        trial.candidate_number for trial in state.journal.trials if trial.run_id not in state.measured.void_run_ids
    }
    for number, reason in _first_process_trials(state):
        if number not in tried_numbers and number in prospects.affordable:
            return _trial_of(state, number, reason)
    return None


def _first_process_trials(state: BestState) -> list[tuple[int, str]]:
    """Return the candidates to try in the baseline's process, with the reasons."""
    levels, baseline_number = state.posterior.levels, state.space.baseline_number
    process_knobs = state.candidates[baseline_number].process_knobs
    in_process = {number for number in state.remaining if state.candidates[number].process_knobs == process_knobs}
    trials: list[tuple[int, str]] = []
    largest_number, other_knobs = baseline_number, "with all else as in the baseline"
    if "batch_size" in levels.names:
        sizes = range(len(levels.values["batch_size"]))
        numbers = [levels.with_level(baseline_number, "batch_size", level) for level in sizes]
        fitting_numbers = [number for number in numbers if number is not None and number in in_process]
        largest_number = max(
            fitting_numbers, key=lambda number: state.candidates[number].batch_size, default=baseline_number
        )
        if largest_number != baseline_number:
            trials.append((largest_number, "the largest batch that fits"))
            other_knobs = f"at batch_size={state.candidates[largest_number].batch_size}"
    for name in levels.names:
        for level, value in enumerate(levels.values[name]):
            number = levels.with_level(largest_number, name, level)
            if number in in_process and number not in (None, largest_number) and name != "batch_size":
                trials.append((number, f"{name}={value_text(name, value)} {other_knobs}"))
    return trials


def _most_promising_trial(state: BestState, prospects: Prospects) -> BestDecision | None:
    """Return the trial of the greatest expected improvement a second; None when the trials end."""
    if _trials_end_reason(state, prospects):
        return None
    likely_numbers = [number for number in prospects.likely if number in prospects.affordable]
    unseen_numbers = [number for number in prospects.with_unseen_values if number in prospects.affordable]
    number = max(likely_numbers or unseen_numbers, key=prospects.improvement_per_s)
    if not state.is_warm(number):
        # Trying a new value costs about a second in the warm process, and a process start once that has ended.
        number = max(filter(state.is_warm, unseen_numbers), key=prospects.improvement_per_s, default=number)
    if number in likely_numbers:
        gain = prospects.gains[number].mean
        chance = chance_text(prospects.chances[number])
        reason = f"{chance} chance of {WORTHWHILE_PERCENT} % more, expected {100 * math.expm1(gain):+.1f} %"
        return _trial_of(state, number, reason)
    unseen_values = ", ".join(_unseen_values(state, number))
    return _trial_of(state, number, f"{unseen_values} was never run")


def _trials_end_reason(state: BestState, prospects: Prospects) -> str | None:
    """Return the reason that the trials end; None if they do not."""
    if not prospects.likely and not prospects.with_unseen_values:
        return (
            f"no setting left has a chance above {100 * LIKELY_CHANCE:.0f} % of being {WORTHWHILE_PERCENT} % better,"
            " and every value was run"
        )
    if prospects.is_budget_spent:
        budget = duration(state.question.budget_s)
        return f"the budget of {budget} pays for no further trial; {_price_text(state, prospects)}"
    return None


def _price_text(state: BestState, prospects: Prospects) -> str:
    """Return, in words, the chance of a gain beyond the budget and its seconds, or the values never tried."""
    outlook = prospects.outlook
    if round(100 * outlook.chance) > 0:
        chance = chance_text(outlook.chance)
        price_text = (
            f"{duration(outlook.price_s)} more: chance of finding a setting that is {WORTHWHILE_PERCENT} % better"
        )
        return f"{price_text} {chance}"
    values = (value for number in prospects.with_unseen_values for value in _unseen_values(state, number))
    return f"never run: {', '.join(dict.fromkeys(values))}"


def _without_leader(state: BestState) -> BestDecision | None:
    """Return the trial of the smallest candidate if the baseline has no figure; None once a candidate was measured."""
    if state.leader_number is not None:
        return None
    untried = [number for number in state.remaining if number not in state.counted_trials]
    if not untried:
        if state.excluded_by_instructions.keys() - state.ruled_out.keys():
            return _end("failed", "your instructions leave no setting that can be measured")
        verdicts = {verdict.verdict for verdict in state.ruled_out.values()}
        if verdicts <= {TOO_LARGE, "incompatible"}:
            return _end("nothing_fits", "no setting fits")
        return _end("failed", "no setting could be measured")
    if state.spent_s > state.question.budget_s:
        return _end("failed", f"no setting could be measured in the budget of {duration(state.question.budget_s)}")
    needed_bytes = {number: state.candidates[number].predicted_bytes or 0 for number in untried}
    number = min(untried, key=lambda number: (needed_bytes[number], state.candidates[number].batch_size))
    return _trial_of(state, number, f"{_no_baseline_reason(state)}: the smallest setting first")


def _no_baseline_reason(state: BestState) -> str:
    """Return the reason that the baseline has no figure."""
    number = state.space.baseline_number
    verdict = state.ruled_out.get(number)
    if verdict is not None and verdict.verdict != TOO_LARGE:
        return f"the baseline cannot run ({verdict.reason})"
    if verdict is None and number in state.excluded_by_instructions:
        return f"the baseline is left out ({state.excluded_by_instructions[number]})"
    return "the baseline does not fit"


def _next_cold_run(ranking: ColdRanking, costs: ColdCosts, prospects: Prospects) -> BestDecision:
    """Return the next cold run, or the end."""
    step = next_cold_run(ranking, costs)
    if step is None:
        return _end("answered", _trials_end_reason(ranking.state, prospects) or "the runs that confirm had begun")
    return BestDecision(step, step_rule=StepRule(costs.steps, costs.steps, COLD_ERROR))


def _repeat_before_leaving(state: BestState, decision: BestDecision) -> BestDecision:
    """Return the decision, or a repeat of the process's first trial instead.

    A process of unknown drift repeats its first trial before the search leaves the process.
    """
    action, reference = decision.step.action, state.reference_trial
    stays = action == "end" or (action == "trial" and not decision.needs_new_process)
    if stays or reference is None or not state.needs_repeat:
        return decision
    repeated = [trial for trial in state.warm_trials if trial.repeats]
    if len(repeated) >= MAX_VOID_ATTEMPTS or any(
        trial.outcome in ("oom", "failed") for trial in state.warm_trials[-1:]
    ):
        return decision
    reason = "the first setting measured in this process again: a change would be drift"
    step = BestStep(action="trial", why=reason, candidate_number=reference.candidate_number, repeats=True)
    return BestDecision(step, step_rule=StepRule(min_steps=max(MIN_TIMED_STEPS, len(reference.step_ms))))


def _trial_of(state: BestState, number: int, reason: str) -> BestDecision:
    step_rule = StepRule(give_up_ms=_give_up_ms(state, number))
    step = BestStep(action="trial", why=reason, candidate_number=number)
    return BestDecision(step, needs_new_process=not state.is_warm(number), step_rule=step_rule)


def _give_up_ms(state: BestState, number: int) -> float | None:
    """Return the step in ms that makes the objective of a candidate `HOPELESS_SHARE` of the leader's.

    None without a leader, for joules, and if the start alone takes longer.
    """
    objective = state.question.objective
    if state.leader_number is None or objective == "samples_per_joule":
        return None
    candidate = state.candidates[number]
    goal = HOPELESS_SHARE * math.exp(state.log_objective(state.leader_number).value)
    if objective == "time":
        left_s = 1 / goal - state.start_s(number)
        return 1000 * left_s / (state.question.for_steps or 1) if left_s > 0 else None
    samples = candidate.samples_per_step
    work = samples * seq_len_of(state.question, candidate) if objective == "tokens_per_s" else samples
    return 1000 * work / goal


def _end(end_state: EndState, reason: str) -> BestDecision:
    return BestDecision(BestStep(action="end", why=reason), end_state=end_state)


def _with_figures(decision: BestDecision, state: BestState, prospects: Prospects) -> BestDecision:
    """Return the decision with the leader's figures, and the chance and price of finding more."""
    leader_number = prospects.leader_number
    if leader_number is None:
        return decision
    mean = state.posterior.mean[leader_number]
    half_width = NORMAL_95 * math.sqrt(max(state.posterior.variance[leader_number], 0.0))
    step = msgspec.structs.replace(
        decision.step,
        leader_number=leader_number,
        rate=math.exp(mean),
        low=math.exp(mean - half_width),
        high=math.exp(mean + half_width),
        chance=prospects.outlook.chance,
        price_s=prospects.outlook.price_s,
    )
    return dataclasses.replace(decision, step=step)


def _unseen_values(state: BestState, number: int) -> Iterable[str]:
    """Yield the values of a candidate that no trial had, as `name=value`."""
    levels = state.posterior.levels
    tried_points = [levels.points[trial.candidate_number] for trial in state.journal.trials]
    for index, name in enumerate(levels.names):
        level = levels.points[number][index]
        if all(point[index] != level for point in tried_points):
            yield f"{name}={value_text(name, levels.values[name][level])}"


MAX_VOID_COLD_RUNS = 2 * MAX_VOID_ATTEMPTS
"""After this many void cold runs of any candidates no further one is started."""
MAX_BEFORE_TURN_BACK = 12
"""From this number of counted cold runs on no knob is turned back."""
UNDER_LIMIT_REASON = "the peak may reach memory_limit: one run under the limit"
"""The reason for a run of a candidate near memory_limit, or of unknown need."""
COLD_ROLES: tuple[ColdRole, ...] = (*SPEED_ROLES, UNDER_LIMIT)
"""Roles of all cold runs."""


def next_cold_run(ranking: ColdRanking, costs: ColdCosts) -> BestStep | None:
    """Return the next cold run; None when the answer is confirmed, or after too many void runs."""
    if len(ranking.void_runs) >= MAX_VOID_COLD_RUNS:
        return None
    return _race(ranking, costs) or _confirm(ranking) or _turn_back(ranking, costs) or _under_limit(ranking, costs)


def unconfirmed_reason(ranking: ColdRanking) -> str | None:
    """Return, in words, that void runs left the answer unconfirmed; None if it is confirmed or may still be."""
    void_runs = ranking.void_runs
    if len(void_runs) < MAX_VOID_COLD_RUNS or _confirm(ranking) is None:
        return None
    void_text = f"{len(void_runs)} runs in fresh processes were void; the last: {void_runs[-1].reason}"
    return f"the answer is not confirmed: {void_text}"


def _race(ranking: ColdRanking, costs: ColdCosts) -> BestStep | None:
    """Return the next run of the race, runs under memory_limit first; None when the race is decided."""
    for number in ranking.finalists:
        if ranking.is_near_limit(number) and not ranking.count_runs(number, UNDER_LIMIT):
            return BestStep(action=UNDER_LIMIT, why=UNDER_LIMIT_REASON, candidate_number=number)
    has_confirming = any(run.role == CONFIRM for run in ranking.state.journal.cold_runs)
    if len(ranking.finalists) < 2 or has_confirming:
        return None
    for turn in (1, 2):
        order = ranking.finalists if turn == 1 else ranking.finalists[::-1]
        contenders = ranking.contenders if turn == 2 else ranking.finalists
        if len(contenders) < 2:
            return None
        missing_numbers = [
            number for number in order if number in contenders and ranking.count_runs(number, RACE) < turn
        ]
        if len(missing_numbers) == len(contenders) and not costs.are_affordable(missing_numbers):
            return None
        if missing_numbers:
            reason = f"one of {len(ranking.finalists)} settings within {100 * NEAR_LOG_GAIN:.0f} % of the leader"
            return BestStep(action=RACE, why=reason, candidate_number=missing_numbers[0])
    return None


def _confirm(ranking: ColdRanking) -> BestStep | None:
    """Return the next run of winner, baseline, baseline, winner; None when both have two runs."""
    winner_number, baseline_number = ranking.winner_number, ranking.baseline_number
    if ranking.state.untested_limits and not ranking.count_runs(winner_number, UNDER_LIMIT):
        return BestStep(action=UNDER_LIMIT, why="the winner, under memory_limit", candidate_number=winner_number)
    order = [winner_number, baseline_number, baseline_number, winner_number]
    if winner_number == baseline_number or baseline_number in ranking.state.ruled_out:
        order = [winner_number, winner_number]
    if all(ranking.count_runs(number, RACE) >= 2 for number in order):
        return None
    for index, number in enumerate(order):
        if ranking.count_runs(number, CONFIRM) < order[: index + 1].count(number):
            role = "baseline" if number == baseline_number else "winner"
            return BestStep(action=CONFIRM, why=f"the {role} in a fresh process", candidate_number=number)
    return None


def _turn_back(ranking: ColdRanking, costs: ColdCosts) -> BestStep | None:
    """Return the run of the answer with one knob turned back, greatest gain first; None if runs or budget are spent."""
    state, answer_number = ranking.state, ranking.answer_number
    overridden = ranking.overridden_knobs(answer_number)
    if len(overridden) < 2 or ranking.run_count >= MAX_BEFORE_TURN_BACK:
        return None
    gains = []
    for knob in overridden:
        number = ranking.without_override(answer_number, knob)
        if number is not None and not ranking.count_runs(number, *COLD_ROLES):
            log_gain = state.log_objective(answer_number).value - state.log_objective(number).value
            gains.append((log_gain, knob, number))
    for _, knob, number in sorted(gains, reverse=True):
        if costs.are_affordable([number]):
            reason = f"the winner with {knob} turned back to the baseline's value, to measure the gain of {knob}"
            return BestStep(action=TURN_BACK, why=reason, candidate_number=number, knob=knob)
    return None


def _under_limit(ranking: ColdRanking, costs: ColdCosts) -> BestStep | None:
    """Return the run under memory_limit of the answer, then of candidates near the limit that the budget pays for."""
    answer_number = ranking.answer_number
    if ranking.state.untested_limits and not ranking.count_runs(answer_number, UNDER_LIMIT):
        return BestStep(action=UNDER_LIMIT, why="the answer, under memory_limit", candidate_number=answer_number)
    number = next((number for number in ranking.unchecked if costs.are_affordable([number])), None)
    return None if number is None else BestStep(action=UNDER_LIMIT, why=UNDER_LIMIT_REASON, candidate_number=number)


LIKELY_CHANCE = 0.05
"""Trials continue while some candidate has this chance of being 2 % better than the leader."""
COUNTED_CHANCE = 0.01
"""Chosen, not measured: the outlook leaves out candidates with a smaller chance."""


class Outlook(NamedTuple):
    """The chance that further trials find 2 % more, and their seconds."""

    chance: float
    price_s: float


def count_drifted_if_budget_spent(state: BestState) -> BestState:
    """Count the trials of processes that drifted, with the drift as noise, if no time is left to repeat them.

    Returns the state unchanged while there is time.
    """
    if not state.measured.void_run_ids or not Prospects(state, ColdCosts(state)).is_budget_spent:
        return state
    return state_of_best_journal(state.journal.lines, state.spent_s, state.warm_run_id, voids_drifted=False)


class Prospects:
    """The expected improvement of each remaining candidate over the leader, its chance and its cost."""

    def __init__(self, state: BestState, costs: ColdCosts) -> None:
        self._state, self._cold_costs = state, costs
        self.leader_number = state.leader_number

    @cached_property
    def open_candidates(self) -> list[int]:
        """Untried candidates that a trial could make the leader; the race, not a second trial, separates equals."""
        state, leader_number = self._state, self.leader_number
        untried = [number for number in state.remaining if number not in state.counted_trials]
        return [number for number in untried if leader_number is None or not state.is_bound(number, leader_number)]

    @cached_property
    def gains(self) -> dict[int, LogGain]:
        """The gain of each open candidate over the leader."""
        if self.leader_number is None:
            return {}
        return self._state.log_gains(self.open_candidates, self.leader_number)

    @cached_property
    def chances(self) -> dict[int, float]:
        """The probability that each open candidate is 2 % better than the leader."""
        return {number: gain.chance_above(WORTHWHILE_LOG_GAIN) for number, gain in self.gains.items()}

    @cached_property
    def likely(self) -> list[int]:
        """Candidates that are likely enough to be 2 % better than the leader."""
        return [number for number, chance in self.chances.items() if chance > LIKELY_CHANCE]

    @cached_property
    def affordable(self) -> set[int]:
        """Open candidates whose trial is expected to end within the time of the trials, its process closed."""
        state, budget_s = self._state, self._state.question.budget_s
        left_s = max(budget_s - self._cold_costs.reserve_s(), TRIALS_SHARE * budget_s) - state.spent_s
        left_if_warm_s = left_s - self._closing_s
        return {
            number
            for number, cost_s in self._costs_s.items()
            if cost_s <= (left_if_warm_s if state.is_warm(number) else left_s)
        }

    @cached_property
    def is_budget_spent(self) -> bool:
        """True if some candidate is worth a trial and the budget pays for none of those."""
        worth = {*self.likely, *self.with_unseen_values}
        return bool(worth) and self.affordable.isdisjoint(worth)

    def improvement_per_s(self, number: int) -> float:
        """Return the expected improvement in ln of the objective, per second of its cost."""
        gain = self.gains[number]
        ratio = gain.mean / gain.deviation
        density = math.exp(-0.5 * ratio * ratio) / math.sqrt(2 * math.pi)
        return (gain.mean * gain.chance_above(0.0) + gain.deviation * density) / self.cost_s(number)

    def cost_s(self, number: int) -> float:
        """Return the expected seconds of a trial: its steps, and the start of a process if it needs a new one."""
        return self._costs_s[number]

    @cached_property
    def _costs_s(self) -> dict[int, float]:
        state, steps = self._state, UNTIMED_TRIAL_STEPS + self.steps
        # A new process also costs a repeat in the process that it replaces. The repeat is counted even if that process
        # repeats nothing, so that fewer processes are started: 12, else 13.
        before_s = {
            process: 0.0 if process == state.warm_process_key else self._closing_s + state.starts.seconds(process)
            for process in set(state.process_keys)
        }
        return {
            number: steps * state.step_s(number) + state.switch_s + before_s[state.process_keys[number]]
            for number in self.open_candidates
        }

    @cached_property
    def _closing_s(self) -> float:
        """Expected seconds of repeating the warm process's first trial, before the search leaves that process."""
        reference = self._state.reference_trial
        return (
            0.0
            if reference is None
            else (UNTIMED_TRIAL_STEPS + self.steps) * self._state.step_s(reference.candidate_number)
        )

    @cached_property
    def steps(self) -> int:
        """Timed steps that bring the standard error of a trial below `ENOUGH_ERROR`."""
        return steps_for(self._state.measured.step_deviation, ENOUGH_ERROR, MIN_TIMED_STEPS, MAX_TIMED_STEPS)

    @cached_property
    def with_unseen_values(self) -> list[int]:
        """Open candidates with values of knobs that were never run."""
        state = self._state
        levels = state.posterior.levels
        points = levels.points
        # A value that failed or did not fit was run, too.
        tried_numbers = {
            trial.candidate_number
            for trial in state.journal.trials
            if trial.outcome != "void" and trial.run_id not in state.measured.void_run_ids
        }
        if not tried_numbers:
            return self.open_candidates
        seen_levels = [set(column) for column in zip(*(points[number] for number in tried_numbers), strict=True)]
        unfinished = [
            index for index, name in enumerate(levels.names) if len(seen_levels[index]) < len(levels.values[name])
        ]
        return [
            number
            for number in self.open_candidates
            if any(points[number][index] not in seen_levels[index] for index in unfinished)
        ]

    @cached_property
    def outlook(self) -> Outlook:
        """The chance that further trials find 2 % more, and their price.

        Candidates that share a process have much in common: the best candidate of each process counts, independently.
        """
        best_of_process: dict[KnobsKey, int] = {}
        counted = [number for number, chance in self.chances.items() if chance > COUNTED_CHANCE]
        for number in sorted(counted, key=lambda number: -self.chances[number]):
            best_of_process.setdefault(self._state.process_keys[number], number)
        no_gain_chance = math.prod(1 - self.chances[number] for number in best_of_process.values())
        return Outlook(1 - no_gain_chance, sum(self.cost_s(number) for number in best_of_process.values()))
