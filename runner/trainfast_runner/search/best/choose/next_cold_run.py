"""Choose the next cold run: a race among the leaders, the winner beside the baseline, each knob turned back alone.

Runs follow each other as A B B A, so that a machine that warms up or slows down does so for all alike.
"""

from __future__ import annotations

from collections import defaultdict

from trainfast_runner.search.best.choose.cold_ranking import SPEED_ROLES, ColdRanking
from trainfast_runner.search.best.choose.ruled_out import MOST_VOID
from trainfast_runner.search.journal.best import CONFIRM, RACE, TURN_BACK, UNDER_LIMIT, BestStep

MOST_BEFORE_TURN_BACK = 12
"""No knob is turned back once the search has this many runs in fresh processes that count."""
NEARLY_ALL = "it needs nearly all of memory_limit: one run under it"
ROLES = (*SPEED_ROLES, UNDER_LIMIT)


def next_cold_run(ranking: ColdRanking) -> BestStep | None:
    """Return the next run in a fresh process; None when the answer is confirmed."""
    if sum(run.outcome == "void" for run in ranking.state.cold_runs) >= 2 * MOST_VOID:
        return None
    return _race(ranking) or _confirm(ranking) or _turn_back(ranking) or _under_limit(ranking)


def _race(ranking: ColdRanking) -> BestStep | None:
    """The next run of the race, those under memory_limit first; None when it is decided."""
    for number in ranking.finalists:
        if ranking.is_near_limit(number) and not ranking.count_runs(number, UNDER_LIMIT):
            return BestStep(action=UNDER_LIMIT, candidate_number=number, why=NEARLY_ALL)
    if len(ranking.finalists) < 2 or _confirming(ranking):
        return None
    for turn in (1, 2):
        order = ranking.finalists if turn == 1 else ranking.finalists[::-1]
        contenders = ranking.contenders if turn == 2 else ranking.finalists
        if len(contenders) < 2:
            return None
        missing = [number for number in order if number in contenders and ranking.count_runs(number, RACE) < turn]
        if len(missing) == len(contenders) and not ranking.are_affordable(missing):
            return None
        if missing:
            why = f"one of {len(ranking.finalists)} settings within 3 % of the leader"
            return BestStep(action=RACE, candidate_number=missing[0], why=why)
    return None


def _confirming(ranking: ColdRanking) -> bool:
    return any(run.role == CONFIRM for run in ranking.state.cold_runs)


def _confirm(ranking: ColdRanking) -> BestStep | None:
    """The next run of winner, baseline, baseline, winner; None when both have two runs."""
    winner, baseline = ranking.winner, ranking.baseline
    if ranking.state.untested_limits and not ranking.count_runs(winner, UNDER_LIMIT):
        return BestStep(action=UNDER_LIMIT, candidate_number=winner, why="the winner, under memory_limit")
    if baseline in ranking.state.ruled_out:
        order = [winner, winner]
    elif winner == baseline:
        order = [baseline, baseline]
    else:
        order = [winner, baseline, baseline, winner]
    raced = {number: ranking.count_runs(number, RACE) for number in order}
    if all(count >= 2 for count in raced.values()):
        return None
    confirmed: dict[int, int] = defaultdict(int)
    for number in order:
        confirmed[number] += 1
        if ranking.count_runs(number, CONFIRM) < confirmed[number]:
            whose = "baseline" if number == baseline else "winner"
            return BestStep(action=CONFIRM, candidate_number=number, why=f"the {whose} in a fresh process")
    return None


def _turn_back(ranking: ColdRanking) -> BestStep | None:
    """The run of the answer with one knob turned back that gave most, as long as runs and budget allow."""
    state, answer = ranking.state, ranking.answer
    changed = ranking.changed(answer)
    if len(changed) < 2 or ranking.counted_runs >= MOST_BEFORE_TURN_BACK:
        return None
    turned = []
    for knob in changed:
        other = ranking.turned_back(answer, knob)
        if other is not None and not ranking.count_runs(other, *ROLES):
            turned.append((state.posterior.difference(answer, other)[0], knob, other))
    for _, knob, other in sorted(turned, reverse=True):
        if ranking.are_affordable([other]):
            why = f"the winner with {knob} turned back: the loss is its gain"
            return BestStep(action=TURN_BACK, candidate_number=other, why=why, knob=knob)
    return None


def _under_limit(ranking: ColdRanking) -> BestStep | None:
    """The run under memory_limit of the answer, then of candidates near that limit as long as the budget allows."""
    if ranking.state.untested_limits and not ranking.count_runs(ranking.answer, UNDER_LIMIT):
        return BestStep(action=UNDER_LIMIT, candidate_number=ranking.answer, why="the answer, under memory_limit")
    number = next((number for number in ranking.unchecked if ranking.are_affordable([number])), None)
    return None if number is None else BestStep(action=UNDER_LIMIT, candidate_number=number, why=NEARLY_ALL)
