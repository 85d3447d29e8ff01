"""A person's orders to a live best-fit search: lines of `orders.jsonl`, appended by anyone, read by the conductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, Literal

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import home_error
from trainfast_runner.records.json_lines import Appender, read_all
from trainfast_runner.search.journal.best import Candidate, Ordered, OrderWord
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, knob

ORDERS_FILE = "orders.jsonl"
SKIP: Final = "skip"
PIN: Final = "pin"
UNPIN: Final = "unpin"
ORDER_WORDS: tuple[OrderWord, ...] = (SKIP, PIN, UNPIN)
ValueOrder = Literal["pin", "skip"]
"""An order about one value of a knob."""


def give_order(directory: Path, do: str, name: str, value: object = None) -> None:
    """Order a live search to skip a value, or to pin or unpin a knob; the search obeys before its next step.

    Raises UserError for an unknown order, knob or value, and when the order cannot be written.
    """
    if do not in ORDER_WORDS:
        raise UserError(f"{do}: no such order", key=do, allowed=ORDER_WORDS)
    typed_value = knob(name).read(value) if do != UNPIN else None
    _append(directory, Ordered(do=do, knob=name, value=typed_value))


def skip_candidate(directory: Path, number: int) -> None:
    """Order a live search never to try this candidate; the search obeys before its next step."""
    _append(directory, Ordered(do=SKIP, candidate_number=number))


def excluded_by_orders(candidates: Sequence[Candidate], orders: Iterable[Ordered]) -> dict[int, str]:
    """Return the candidates that the orders leave out, by number, with the order in words."""
    out: dict[int, str] = {}
    skipped: set[tuple[str, object]] = set()
    pinned: dict[str, object] = {}
    for order in orders:
        if order.candidate_number is not None:
            out[order.candidate_number] = "you skipped it"
        elif order.do == SKIP:
            skipped.add((order.knob, order.value))
        elif order.do == PIN:
            pinned[order.knob] = order.value
        else:
            pinned.pop(order.knob, None)
    if not skipped and not pinned:
        return out
    for number, candidate in enumerate(candidates):
        for name, value in candidate.knobs.items():
            if (name, value) in skipped:
                out[number] = f"you skipped {name}={value}"
            elif name in pinned and pinned[name] != value:
                out[number] = f"you pinned {name}={pinned[name]}"
    return out


def orders_in_force(orders: Iterable[Ordered]) -> list[Ordered]:
    """Return the orders that no later one replaced."""
    in_force: dict[tuple[str, str, str], Ordered] = {}
    for order in orders:
        if order.do == SKIP:
            in_force[SKIP, order.knob, repr((order.value, order.candidate_number))] = order
            continue
        in_force.pop((PIN, order.knob, ""), None)
        if order.do == PIN:
            in_force[PIN, order.knob, ""] = order
    return list(in_force.values())


def open_values(
    candidates: Sequence[Candidate], orders: Sequence[Ordered], do: ValueOrder
) -> dict[tuple[str, str], int]:
    """Return the number of candidates by knob and typed value, for values that can be pinned or skipped (`do`).

    Candidates that earlier orders left out do not count. A value is left out if its order would leave no candidate.
    """
    names = [name for name in (candidates[0].knobs if candidates else ()) if _has_several(candidates, name)]
    counts_by_value: dict[tuple[str, str], int] = {}
    for name in names:
        # A knob's next pin replaces its present one.
        others = [order for order in orders if not (do == PIN and order.do == PIN and order.knob == name)]
        out = excluded_by_orders(candidates, others)
        remaining = [
            candidate
            for number, candidate in enumerate(candidates)
            if candidate.excluded_as is None and number not in out
        ]
        counts = Counter(KNOBS_BY_NAME[name].text_of(candidate.knobs[name]) for candidate in remaining)
        counts_by_value |= {
            (name, text): count for text, count in counts.items() if do == PIN or count < len(remaining)
        }
    return counts_by_value


def _has_several(candidates: Sequence[Candidate], name: str) -> bool:
    """True if the candidates that can run have more than one value of this knob."""
    return len({repr(candidate.knobs[name]) for candidate in candidates if candidate.excluded_as is None}) > 1


def read_orders(directory: Path) -> list[Ordered]:
    """Return every readable order, oldest first; empty if none was given."""
    orders, _ = read_all(directory / ORDERS_FILE, Ordered)
    return orders


def _append(directory: Path, order: Ordered) -> None:
    """Append the order. Raises UserError if it cannot be written."""
    try:
        with closing(Appender(directory / ORDERS_FILE)) as file:
            file.write(order)
    except OSError as error:
        raise home_error(directory, error) from None
