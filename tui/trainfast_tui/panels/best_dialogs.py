"""The dialogs of a best-fit search: instructions to a live one, and the parts of the next one's question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError
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
from trainfast_runner.search.best_journal import BestRequest, read_budget
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import read_vary
from trainfast_runner.units import counted
from trainfast_tui.panels.ask import ask_choice, ask_text
from trainfast_tui.text.best_words import EVERY_KNOB, OBJECTIVES, candidate_words, vary_text

if TYPE_CHECKING:
    from textual.app import App

    from trainfast_runner.search.best.answer import BestSnapshot


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


Fields = dict[str, object]
"""Fields of `BestRequest` by name."""


@dataclass(frozen=True)
class QuestionDialogs:
    """A dialog for each part of the question of a search."""

    app: App[None]
    request: BestRequest
    """The question before the dialog."""
    planned: Mapping[str, Sequence[KnobValue]]
    """The varied values of the present search, where `request` names none."""
    steps: int
    """The steps of the next run, proposed as the length of a training run."""
    on_request: Callable[[BestRequest], None]
    """Gets the question with the answer."""

    def ask(self, part: str) -> None:
        """Ask for `vary`, `batch`, `objective` or `budget`."""
        {
            "vary": self._ask_vary,
            "batch": self._ask_batch,
            "objective": self._ask_objective,
            "budget": self._ask_budget,
        }[part]()

    def _ask_vary(self) -> None:
        current = vary_text(self.request.vary or self.planned)
        hint = f"knob=a,b,c knob=d,e: the values to try. Empty: {EVERY_KNOB}."
        self._ask_part("Knobs to vary", hint, current, lambda text: {} if text.strip() == current else _read_vary(text))

    def _ask_batch(self) -> None:
        current = "" if self.request.global_batch is None else str(self.request.global_batch)
        hint = "Samples of one optimizer step. Empty: as the knobs are set, or any if the batch is varied."

        def read(text: str) -> Fields:
            return {"global_batch": _read_count(text, "global batch") if text.strip() else None}

        self._ask_part("Global batch", hint, current, read)

    def _ask_objective(self) -> None:
        """Ask for the objective; for the least time also for the number of steps."""

        def read_steps(text: str) -> Fields:
            return {"objective": "time", "for_steps": _read_count(text, "steps")}

        def on_objective(name: str) -> None:
            if name == "time":
                hint = "Steps of the real training; a slow start such as compilation pays off only in a long one."
                self._ask_part("Optimizer steps", hint, str(self.request.for_steps or self.steps), read_steps)
            else:
                self._change({"objective": name, "for_steps": None})

        hints = [(name, objective.hint) for name, objective in OBJECTIVES.items()]
        ask_choice(self.app, "Search for", hints, on_objective, current=self.request.objective)

    def _ask_budget(self) -> None:
        minutes, seconds = divmod(self.request.budget_s, 60)
        current = f"{self.request.budget_s:g}s" if seconds else f"{minutes:g}m"
        hint = "Time for finding the best: 90s, 10m, 1.5h."
        self._ask_part("Time budget", hint, current, lambda text: {"budget_s": read_budget(text)})

    def _ask_part(self, title: str, hint: str, value: str, read: Callable[[str], Fields]) -> None:
        ask_text(self.app, title, hint, value, lambda text: self._change(read(text)))

    def _change(self, fields: Fields) -> None:
        self.on_request(msgspec.structs.replace(self.request, **fields))


def _read_vary(text: str) -> Fields:
    # A space after a comma does not end a knob's values.
    return {"vary": read_vary(re.split(r"\s+(?=\w+\s*=)", text.strip()) if text.strip() else [])}


def _read_count(text: str, name: str) -> int:
    """Return a whole number of at least 1. Raises UserError."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise UserError(f"{name}: {text.strip() or 'nothing'} is not a whole number of at least 1", key=name)
    return count
