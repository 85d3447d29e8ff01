"""A best-fit search in words while it goes on: its state, the best so far, and the worth of going on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_runner.settings.knobs import BY_NAME
from trainfast_tui.text import format as fmt
from trainfast_tui.text.best_objective import objective_words
from trainfast_tui.text.best_search import budget_words, gain_words, knob_words, noise_words
from trainfast_tui.text.cooling import search_cooling_words

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot
    from trainfast_runner.search.best.best_so_far import BestSoFar
    from trainfast_runner.search.best.person_orders import KnobOrder
    from trainfast_runner.search.journal.best import Candidate, Ordered, Space

VERBS = {
    "trial": "trying",
    "race": "racing",
    "confirm": "confirming in a fresh process",
    "limit": "running under memory_limit",
    "turn_back": "turning back",
}


def setting_words(space: Space, number: int, *, short: bool = False) -> str:
    """Name a setting by the knobs in which it differs from the baseline.

    With `short` the accumulation is left out where it follows from the batch at one global batch.
    """
    candidate, baseline = space.candidates[number], space.candidates[space.baseline]
    changed = {name: value for name, value in candidate.knobs.items() if value != baseline.knobs.get(name)}
    if short and "batch_size" in changed and candidate.samples_per_step == baseline.samples_per_step:
        changed.pop("grad_accum", None)
    return knob_words(changed) or "the baseline"


def best_search_words(search: BestSnapshot, now_ns: int | None = None) -> str:
    """Describe the search at `now_ns` (CLOCK_MONOTONIC), or its end, in one line."""
    so_far, ended = search.so_far, search.so_far.ended
    if so_far.cooling is not None and search.state in ("running", "starting"):
        return search_cooling_words(so_far.cooling, now_ns)
    if so_far.waits_for is not None and search.state in ("running", "starting"):
        return f"waiting for {fmt.plain(so_far.waits_for)} to end"
    if search.state == "answered" and ended is not None and ended.answer is not None:
        return _answer_words(so_far)
    if search.state == "nothing_fits" and ended is not None:
        missing = f": the smallest is {fmt.size(ended.missing_bytes)} too large" if ended.missing_bytes else ""
        return f"no setting fits{missing}; v varies other knobs, Esc goes back to turn some"
    if search.state == "failed" and ended is not None:
        return f"failed: {fmt.plain(ended.reason)}; v puts another question, Esc goes back to turn knobs"
    if search.state == "running":
        return doing_words(so_far)
    if search.state == "cancelled" and ended is not None:
        from trainfast_runner.search.journal.lines import CANCELLED

        why = "" if ended.reason in ("", CANCELLED) else f": {fmt.plain(ended.reason)}"
        return f"stopped{why}; its journal is kept, f5 resumes"
    words = {
        "starting": "starting: the model is built, and the candidates are listed with their memory",
        "pausing": "pausing after this step",
        "paused": "paused: no process is running",
        "interrupted": "interrupted: no process works on it; f5 resumes",
    }
    return words.get(search.state, search.state)


def doing_words(so_far: BestSoFar) -> str:
    """Name the step under way and its setting."""
    step, space = so_far.chosen, so_far.space
    if step is None or step.candidate_number is None or space is None or not so_far.is_under_way:
        return "deciding the next step"
    knob = f" {step.knob} of" if step.knob else ""
    return f"{VERBS.get(step.action, 'running')}{knob} {setting_words(space, step.candidate_number)}"


def _answer_words(so_far: BestSoFar) -> str:
    answer = so_far.ended.answer if so_far.ended is not None else None
    assert answer is not None
    assert so_far.space is not None
    tried = answer.tried_in_budget
    budget = "" if tried is None else f"{budget_words(tried, len(so_far.candidates))}; "
    if answer.within_percent is not None:
        return f"{budget}no winner: {noise_words(answer.within_percent)}"
    if answer.best == so_far.space.baseline and tried is None:
        return "the baseline itself is the fastest"
    if tried is not None:
        budget += "best so far: "
    words = setting_words(so_far.space, answer.best)
    if (gain := answer.gain_percent) is not None:
        words += f": {gain_words(gain)}"
    return budget + words


def best_words(so_far: BestSoFar) -> str:
    """The objective of the best setting so far with its 95 % interval; empty before anything was measured."""
    return "" if so_far.best is None else objective_words(so_far.objective, so_far.for_steps, so_far.best[1])


def chance_words(so_far: BestSoFar) -> str:
    """The chance that going on finds 2 % more, and its price; empty before two settings were measured.

    With one measurement both are assumptions. A price beyond the budget is never paid.
    """
    step, question = so_far.chosen, so_far.question
    measured = {so_far.attempts[index].candidate_number for index in so_far.rates}
    if step is None or step.chance is None or step.action != "trial" or len(measured) < 2:
        return ""
    price = "" if step.price_s is None else f", for about {fmt.duration(step.price_s)}"
    if step.price_s is not None and question is not None and step.price_s > question.budget_s - so_far.spent_s():
        price = ", but for more time than the budget has left"
    return f"{step.chance:.0%} chance that going on finds 2 % more{price}".replace("%", " %", 1)


def settings_of(so_far: BestSoFar, number: int) -> tuple[tuple[str, str], ...]:
    """The knobs of a candidate as they are typed."""
    return tuple((name, BY_NAME[name].text_of(value)) for name, value in so_far.candidates[number].knobs.items())


def open_values(search: BestSnapshot, do: str) -> dict[tuple[str, str], int]:
    """Values that a knob can be pinned to, or that can be skipped, as typed; each with the number of its candidates.

    Of the candidates that the orders so far leave; an order that would leave none is not among them.
    """
    from trainfast_runner.search.best.person_orders import PIN, excluded_by_orders

    candidates = search.so_far.candidates
    all_orders: list[Ordered | KnobOrder] = [*search.so_far.orders, *search.waiting]
    names = [name for name in (candidates[0].knobs if candidates else ()) if _has_several(candidates, name)]
    counts_by_value: dict[tuple[str, str], int] = {}
    for name in names:
        # A knob's next pin replaces its present one.
        orders = [order for order in all_orders if not (do == PIN and order.do == PIN and order.knob == name)]
        out = excluded_by_orders(candidates, orders)
        remaining = [
            candidate
            for number, candidate in enumerate(candidates)
            if candidate.ruled_out is None and number not in out
        ]
        counts = Counter(BY_NAME[name].text_of(candidate.knobs[name]) for candidate in remaining)
        counts_by_value |= {
            (name, text): count for text, count in counts.items() if do == PIN or count < len(remaining)
        }
    return counts_by_value


def _has_several(candidates: Sequence[Candidate], name: str) -> bool:
    return len({repr(candidate.knobs[name]) for candidate in candidates if candidate.ruled_out is None}) > 1


def order_words(order: Ordered | KnobOrder, space: Space | None) -> str:
    """Name an order: `pin precision=bf16`, `unpin precision`, `skip the setting batch_size=8 precision=bf16`."""
    if order.candidate_number is not None:
        known = space is not None and 0 <= order.candidate_number < len(space.candidates)
        named = (
            setting_words(space, order.candidate_number) if space is not None and known else f"{order.candidate_number}"
        )
        return f"{order.do} the setting {named}"
    return f"{order.do} {order.knob}" if order.do == "unpin" else f"{order.do} {knob_words({order.knob: order.value})}"


def orders_in_force(so_far: BestSoFar) -> list[Ordered]:
    """Return the orders that the conductor has taken and that no later one replaced."""
    in_force: dict[tuple[str, object], Ordered] = {}
    for order in so_far.orders:
        if order.do == "skip":
            in_force["skip " + order.knob, repr((order.value, order.candidate_number))] = order
            continue
        in_force.pop(("pin", order.knob), None)
        if order.do == "pin":
            in_force["pin", order.knob] = order
    return list(in_force.values())
