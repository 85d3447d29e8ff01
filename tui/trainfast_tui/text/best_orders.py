"""A person's orders to a live best-fit search in words: those in force, and the values that an order can be about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_runner.settings.knobs import BY_NAME
from trainfast_tui.text.best_figures import knob_words
from trainfast_tui.text.best_state import setting_words

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot
    from trainfast_runner.search.best.best_so_far import BestSoFar
    from trainfast_runner.search.best.person_orders import KnobOrder
    from trainfast_runner.search.journal.best import Candidate, Ordered, Space


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
