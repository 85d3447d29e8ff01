"""Choose the next cold run: a race among the leaders, the winner beside the baseline, each knob turned back alone.

Runs follow each other as A B B A, so that drift of the machine affects all of them equally.
"""

from __future__ import annotations

from trainfast_runner.search.best.choose.cold_costs import ColdCosts
from trainfast_runner.search.best.choose.cold_ranking import NEAR_LOG_GAIN, SPEED_ROLES, ColdRanking
from trainfast_runner.search.best.choose.ruled_out import MAX_VOID_ATTEMPTS
from trainfast_runner.search.journal.best import CONFIRM, RACE, TURN_BACK, UNDER_LIMIT, BestStep, ColdRole

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
