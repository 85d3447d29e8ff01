"""The instructions that a person can give to a live best-fit search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

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


@dataclass(frozen=True)
class InstructionChoice:
    """An instruction that a person can choose."""

    effect: str
    """Its effect in words."""
    give: Callable[[], None]
    """Gives the instruction to the search."""


InstructionChoices = dict[str, InstructionChoice]
"""Instructions by name."""


def pin_choices(search: BestSnapshot) -> InstructionChoices:
    """Return the instructions to unpin a knob, and those to pin one to a value."""
    pinned_knobs = [
        instruction.knob for instruction in instructions_in_force(search.so_far.instructions) if instruction.do == PIN
    ]
    unpin = partial(give_instruction, search.directory, UNPIN)
    choices: InstructionChoices = {
        f"unpin {name}": InstructionChoice("try all its values again", partial(unpin, name)) for name in pinned_knobs
    }
    return choices | _value_choices(search, PIN)


def skip_choices(search: BestSnapshot) -> InstructionChoices:
    """Return the instruction to skip the candidate under way, and those to skip a value of a knob."""
    step, space = search.so_far.newest_step, search.so_far.space
    choices: InstructionChoices = {}
    if step is not None and step.candidate_number is not None and space is not None:
        words = f"{candidate_words(space, step.candidate_number)}, the one under way"
        skip = partial(skip_candidate, search.directory, step.candidate_number)
        choices[f"setting {step.candidate_number}"] = InstructionChoice(words, skip)
    return choices | _value_choices(search, SKIP)


def _value_choices(search: BestSnapshot, do: ValueInstruction) -> InstructionChoices:
    """Return the instructions to pin or skip (`do`) each open value, with the number of its candidates."""
    so_far = search.so_far
    values = open_values(so_far.candidates, [*so_far.instructions, *search.untaken_instructions], do)
    give = partial(give_instruction, search.directory, do)
    return {
        f"{name}={value}": InstructionChoice(counted(count, "setting"), partial(give, name, value))
        for (name, value), count in values.items()
    }
