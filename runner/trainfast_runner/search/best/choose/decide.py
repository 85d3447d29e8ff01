"""Decide the next step of a best-fit search from its state, with the reason in words. Touches nothing.

The baseline is tried first; then, in its process, the largest batch, and each warm knob's other values at that batch.
From then on the next trial is that of the greatest expected improvement a second (`prospects.py`), until no candidate
is likely to be 2 % better and every value of every knob was run once, or the budget ends. Cold runs choose among the
leaders and confirm the winner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import msgspec

from trainfast_runner.results.distributions import NORMAL_95
from trainfast_runner.search.best.choose.cold_costs import COLD_ERROR, TRIALS_SHARE, ColdCosts
from trainfast_runner.search.best.choose.cold_ranking import ColdRanking
from trainfast_runner.search.best.choose.next_cold_run import next_cold_run
from trainfast_runner.search.best.choose.prospects import LIKELY_CHANCE, Prospects, count_drifted_if_budget_spent
from trainfast_runner.search.best.choose.ruled_out import MAX_VOID_ATTEMPTS, UNUSABLE_OUTCOMES, void_text
from trainfast_runner.search.best.choose.state import WORTHWHILE_PERCENT, BestState
from trainfast_runner.search.best.objective import seq_len_of
from trainfast_runner.search.best.step_rule import MIN_TIMED_STEPS, ORDINARY_RULE, StepRule
from trainfast_runner.search.best.too_large import TOO_LARGE
from trainfast_runner.search.candidate_spec import value_text
from trainfast_runner.search.journal.best import BestStep
from trainfast_runner.search.journal.lines import EndState
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
