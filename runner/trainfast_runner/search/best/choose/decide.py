"""Decide the next step of a best-fit search from its knowledge, with the reason in words. Touches nothing.

The baseline opens; in its process the largest batch, and each warm knob's other values there. Then the next trial is
the one of the greatest expected improvement a second (`prospects.py`), until nothing is likely to be 2 % better and
every value of every knob was run once, or the budget ends. Runs in fresh processes choose among the leaders and confirm
the winner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from trainfast_runner.results.distributions import NORMAL_95
from trainfast_runner.search.best.choose.cold_ranking import COLD_ERROR, CONFIRMING_SHARE, ColdRanking
from trainfast_runner.search.best.choose.next_cold_run import next_cold_run
from trainfast_runner.search.best.choose.prospects import Prospects
from trainfast_runner.search.best.choose.ruled_out import MOST_VOID, UNUSABLE
from trainfast_runner.search.best.choose.state import BestState
from trainfast_runner.search.best.step_rule import LEAST_TIMED_STEPS, ORDINARY, StepRule
from trainfast_runner.search.best.too_large import TOO_LARGE
from trainfast_runner.search.journal.best import TIMED_OUTCOMES, BestStep
from trainfast_runner.settings.knobs import BY_NAME
from trainfast_runner.units import chance_text

HOPELESS = 0.7
"""A trial ends early when its best step is below this share of the leader's pace."""


@dataclass(frozen=True)
class BestDecision:
    """The next step as the journal gets it, and further orders to the conductor.

    `needs_new_process` and `step_rule` are about a trial, `step_rule` about a cold run, too; `end_state` is that of an
    end.
    """

    step: BestStep
    needs_new_process: bool = False
    step_rule: StepRule = ORDINARY
    end_state: str = ""


def decide(state: BestState) -> BestDecision:
    """Return the next step."""
    ranking = ColdRanking(state)
    prospects = Prospects(ranking)
    decision = _next_trial(ranking, prospects) or _finish(ranking, prospects)
    return _with_figures(_closing_visit(state, decision), state, prospects)


def _next_trial(ranking: ColdRanking, prospects: Prospects) -> BestDecision | None:
    """The next trial, or the end of a search that measures nothing; None once the trials are over."""
    state = ranking.state
    if ranking.begun and state.leader is not None:
        return None
    first = _baseline(state) or _without_leader(state) or _trial_in_first_process(state, prospects)
    return first or _most_promising_trial(state, prospects)


def _baseline(state: BestState) -> BestDecision | None:
    """The first trial of all, until it was measured or does not fit."""
    number = state.space.baseline
    if number in state.counted_trials:
        return None
    ran = [trial for trial in state.trials if trial.candidate_number == number]
    if any(trial.outcome in UNUSABLE for trial in ran):
        return _end("failed", f"the baseline failed: {ran[-1].reason}")
    if sum(trial.outcome == "void" for trial in ran) >= MOST_VOID:
        return _end("failed", f"other processes took the machine in {MOST_VOID} trials of the baseline")
    return None if number in state.ruled_out else _trial_of(state, number, "the baseline, to compare with")


def _trial_in_first_process(state: BestState, prospects: Prospects) -> BestDecision | None:
    """In the baseline's process: the largest batch that fits, then each warm knob's other values there."""
    process = state.candidates[state.space.baseline].process_knobs
    if any(state.candidates[trial.candidate_number].process_knobs != process for trial in state.trials):
        return None
    if state.spent_s > CONFIRMING_SHARE * state.question.budget_s:
        return None
    ran = {trial.candidate_number for trial in state.trials if trial.run_id not in state.measured.void}
    for number, why in _first_process_trials(state):
        if number not in ran and number in prospects.affordable:
            return _trial_of(state, number, why)
    return None


def _first_process_trials(state: BestState) -> list[tuple[int, str]]:
    """The trials in the baseline's process, each with its reason."""
    levels, first = state.posterior.levels, state.space.baseline
    process = state.candidates[first].process_knobs
    group = {number for number in state.alive if state.candidates[number].process_knobs == process}
    trials: list[tuple[int, str]] = []
    base = first
    if "batch_size" in levels.names:
        sizes = [levels.with_level(first, "batch_size", level) for level in range(len(levels.values["batch_size"]))]
        fitting = [number for number in sizes if number is not None and number in group]
        base = max(fitting, key=lambda number: _batch(state, number), default=first)
        if base != first:
            trials.append((base, "the largest batch that fits"))
    for name in levels.names:
        for level, value in enumerate(levels.values[name]):
            number = levels.with_level(base, name, level)
            if number in group and number not in (None, base) and name != "batch_size":
                trials.append((number, f"{name}={_value_text(name, value)} at that batch"))
    return trials


def _most_promising_trial(state: BestState, prospects: Prospects) -> BestDecision | None:
    """The trial of the greatest expected improvement a second; None when the trials end."""
    if _why_trials_end(state, prospects):
        return None
    tries = [number for number in prospects.likely if number in prospects.affordable]
    unseen = [number for number in prospects.with_unseen_values if number in prospects.affordable]
    number = max(tries or unseen, key=prospects.improvement_per_s)
    if not state.is_warm(number):
        # A value costs a second in the process that waits, and a start once it is gone.
        number = max(filter(state.is_warm, unseen), key=prospects.improvement_per_s, default=number)
    if number in tries:
        gain = prospects.gains[number].mean
        why = f"{chance_text(prospects.chances[number])} chance of 2 % more, expected {100 * math.expm1(gain):+.1f} %"
        return _trial_of(state, number, why)
    new = ", ".join(_new_values(state, number))
    return _trial_of(state, number, f"{new} was never run")


def _why_trials_end(state: BestState, prospects: Prospects) -> str | None:
    """The reason why the trials end; None while they go on."""
    if not prospects.likely and not prospects.with_unseen_values:
        return "no setting left has a chance above 5 % to be 2 % better, and every value was run"
    if prospects.is_budget_spent:
        return f"the budget of {state.question.budget_s:g} s: {_price_words(state, prospects)}"
    return None


def _price_words(state: BestState, prospects: Prospects) -> str:
    """The use of going on beyond the budget and its price, for a search with something left to try."""
    outlook = prospects.outlook
    if round(100 * outlook.chance) > 0:
        return f"going on for {outlook.price_s:.0f} s finds 2 % more with a chance of {chance_text(outlook.chance)}"
    values = list(
        dict.fromkeys(value for number in prospects.with_unseen_values for value in _new_values(state, number))
    )
    return f"never run: {', '.join(values)}"


def _without_leader(state: BestState) -> BestDecision | None:
    """The smallest candidate, where the baseline was tried and nothing was measured; None once something was."""
    if state.leader is not None:
        return None
    untried = [number for number in state.alive if number not in state.counted_trials]
    if not untried:
        if state.excluded_by_orders.keys() - state.ruled_out.keys():
            return _end("failed", "your orders leave no setting that can be measured")
        verdicts = {verdict.verdict for verdict in state.ruled_out.values()}
        if verdicts <= {TOO_LARGE, "incompatible"}:
            return _end("nothing_fits", "no setting fits")
        return _end("failed", "no setting could be measured")
    if state.spent_s > state.question.budget_s:
        return _end("failed", f"no setting could be measured in the budget of {state.question.budget_s:g} s")
    sizes = {number: (state.candidates[number].predicted_bytes or 0, _batch(state, number)) for number in untried}
    number = min(untried, key=lambda number: sizes[number])
    return _trial_of(state, number, f"{_why_no_baseline(state)}: the smallest setting first")


def _why_no_baseline(state: BestState) -> str:
    """The reason why the baseline does not lead."""
    baseline = state.space.baseline
    verdict = state.ruled_out.get(baseline)
    if verdict is not None and verdict.verdict != TOO_LARGE:
        return f"the baseline cannot run ({verdict.reason})"
    if verdict is None and baseline in state.excluded_by_orders:
        return f"the baseline is left out ({state.excluded_by_orders[baseline]})"
    return "the baseline does not fit"


def _finish(ranking: ColdRanking, prospects: Prospects) -> BestDecision:
    """Runs in fresh processes, then the end."""
    step = next_cold_run(ranking)
    if step is None:
        return _end("answered", _why_trials_end(ranking.state, prospects) or "the runs that confirm had begun")
    return BestDecision(step, step_rule=StepRule(ranking.steps, ranking.steps, COLD_ERROR))


def _closing_visit(state: BestState, decision: BestDecision) -> BestDecision:
    """The decision, or before it leaves a process the repeat of that process's first candidate, which shows drift."""
    action = decision.step.action
    stays = action == "end" or (action == "trial" and not decision.needs_new_process)
    timed = [trial for trial in state.trials_of_visit if trial.outcome in TIMED_OUTCOMES]
    if stays or len({trial.candidate_number for trial in timed}) < 2 or any(trial.repeats for trial in timed):
        return decision
    repeated = [trial for trial in state.trials_of_visit if trial.repeats]
    if len(repeated) >= MOST_VOID or any(trial.outcome in ("oom", "failed") for trial in state.trials_of_visit[-1:]):
        return decision
    why = "the first setting of this process again: a change would be drift"
    step = BestStep(action="trial", candidate_number=timed[0].candidate_number, why=why, repeats=True)
    return BestDecision(step, step_rule=StepRule(least=max(LEAST_TIMED_STEPS, len(timed[0].step_ms))))


def _trial_of(state: BestState, number: int, why: str) -> BestDecision:
    give_up = None
    leader = state.leader
    if leader is not None and state.question.objective != "samples_per_joule":
        pace = math.exp(state.posterior.mean[leader])
        give_up = 1000 * state.candidates[number].samples_per_step / (HOPELESS * pace)
        if state.question.objective in ("time", "tokens_per_s"):
            give_up = _give_up_by_value(state, number, leader)
    step = BestStep(action="trial", candidate_number=number, why=why)
    return BestDecision(step, needs_new_process=not state.is_warm(number), step_rule=StepRule(give_up_ms=give_up))


def _give_up_by_value(state: BestState, number: int, leader: int) -> float | None:
    """The step in ms that makes the objective `HOPELESS` of the leader's; None where the start alone is longer."""
    candidate, goal = state.candidates[number], state.log_objective(leader).value + math.log(HOPELESS)
    if state.question.objective == "tokens_per_s":
        return 1000 * candidate.samples_per_step * state.seq_len(candidate) / math.exp(goal)
    left_s = math.exp(-goal) - state.start_s(number)
    return 1000 * left_s / (state.question.for_steps or 1) if left_s > 0 else None


def _end(end_state: str, why: str) -> BestDecision:
    return BestDecision(BestStep(action="end", why=why), end_state=end_state)


def _with_figures(decision: BestDecision, state: BestState, prospects: Prospects) -> BestDecision:
    """The decision with the leader's figures and the price of going on."""
    leader = prospects.leader
    if leader is None:
        return decision
    mean = state.posterior.mean[leader]
    half = NORMAL_95 * math.sqrt(max(state.posterior.variance[leader], 0.0))
    chance, price = prospects.outlook
    low, rate, high = (math.exp(mean + shift) for shift in (-half, 0.0, half))
    figures = {"leader": leader, "rate": rate, "low": low, "high": high, "chance": chance, "price_s": price}
    return replace(decision, step=msgspec.structs.replace(decision.step, **figures))


def _new_values(state: BestState, number: int) -> Iterable[str]:
    levels = state.posterior.levels
    ran = [levels.points[trial.candidate_number] for trial in state.trials]
    for knob, name in enumerate(levels.names):
        level = levels.points[number][knob]
        if all(point[knob] != level for point in ran):
            yield f"{name}={_value_text(name, levels.values[name][level])}"


def _batch(state: BestState, number: int) -> int:
    return int(state.candidates[number].knobs.get("batch_size", 1))


def _value_text(name: str, value: object) -> str:
    return (
        BY_NAME[name].text_of(value) if name in BY_NAME and isinstance(value, int | float | str | None) else str(value)
    )
