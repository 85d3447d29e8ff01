"""The orders that a person can give to a live best-fit search."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from trainfast_runner.search.best.person_instructions import (
    PIN,
    SKIP,
    UNPIN,
    ValueInstruction,
    give_instruction,
    instructions_in_force,
    open_values,
    skip_candidate,
)
from trainfast_runner.units import counted
from trainfast_tui.text.search.best_state import candidate_words

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot


class OrderChoice(NamedTuple):
    """An order that a person can choose."""

    effect: str
    """Its effect in words."""
    give: Callable[[], None]
    """Gives the order to the search."""


Orders = dict[str, OrderChoice]
"""Orders by name."""


def pin_orders(search: BestSnapshot) -> Orders:
    """Return the orders to unpin a knob, and those to pin one to a value."""
    pinned = [order.knob for order in instructions_in_force(search.so_far.instructions) if order.do == PIN]
    unpin = partial(give_instruction, search.directory, UNPIN)
    orders: Orders = {f"unpin {name}": OrderChoice("try all its values again", partial(unpin, name)) for name in pinned}
    return orders | _value_orders(search, PIN)


def skip_orders(search: BestSnapshot) -> Orders:
    """Return the order to skip the setting under way, and those to skip a value of a knob."""
    step, space = search.so_far.newest_step, search.so_far.space
    orders: Orders = {}
    if step is not None and step.candidate_number is not None and space is not None:
        words = f"{candidate_words(space, step.candidate_number)}, the one under way"
        skip = partial(skip_candidate, search.directory, step.candidate_number)
        orders[f"setting {step.candidate_number}"] = OrderChoice(words, skip)
    return orders | _value_orders(search, SKIP)


def _value_orders(search: BestSnapshot, do: ValueInstruction) -> Orders:
    """Return the orders to pin or skip (`do`) each value that is open to it, with the number of its candidates."""
    so_far = search.so_far
    values = open_values(so_far.candidates, [*so_far.instructions, *search.untaken_instructions], do)
    give = partial(give_instruction, search.directory, do)
    return {
        f"{name}={value}": OrderChoice(counted(count, "setting"), partial(give, name, value))
        for (name, value), count in values.items()
    }
