"""A person's orders to a live best-fit search: those in force, and the values that an order can be about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from trainfast_runner.settings.knobs import KNOBS_BY_NAME

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot
    from trainfast_runner.search.best.best_so_far import BestSoFar
    from trainfast_runner.search.journal.best import Candidate, Ordered

ValueOrder = Literal["pin", "skip"]
"""An order about one value of a knob."""


def open_values(search: BestSnapshot, do: ValueOrder) -> dict[tuple[str, str], int]:
    """Return the values that a knob can be pinned to, or that can be skipped, as typed, with their candidates' number.

    Only candidates that the orders so far leave count; an order that would leave none is not among them.
    """
    from trainfast_runner.search.best.person_orders import PIN, excluded_by_orders

    candidates = search.so_far.candidates
    all_orders = [*search.so_far.orders, *search.waiting]
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
        counts = Counter(KNOBS_BY_NAME[name].text_of(candidate.knobs[name]) for candidate in remaining)
        counts_by_value |= {
            (name, text): count for text, count in counts.items() if do == PIN or count < len(remaining)
        }
    return counts_by_value


def _has_several(candidates: Sequence[Candidate], name: str) -> bool:
    return len({repr(candidate.knobs[name]) for candidate in candidates if candidate.ruled_out is None}) > 1


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
