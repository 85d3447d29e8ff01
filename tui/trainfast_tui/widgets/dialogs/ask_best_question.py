"""A dialog for each part of the question of the next best-fit search."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.search.best.planning.request import BestRequest, read_budget
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.vary import read_vary
from trainfast_tui.text.search.best_figures import OBJECTIVES
from trainfast_tui.text.search.best_question import EVERY_KNOB, vary_text
from trainfast_tui.widgets.dialogs.ask import ask_choice, ask_text

if TYPE_CHECKING:
    from textual.app import App

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
        dialogs = {
            "vary": self._ask_vary,
            "batch": self._ask_batch,
            "objective": self._ask_objective,
            "budget": self._ask_budget,
        }
        dialogs[part]()

    def _ask_vary(self) -> None:
        current = vary_text(self.request.vary or self.planned)
        hint = f"knob=a,b,c knob=d,e: the values to try. Empty: {EVERY_KNOB}."
        self._ask_part("Knobs to vary", hint, current, lambda text: {} if text.strip() == current else _read_vary(text))

    def _ask_batch(self) -> None:
        current = "" if self.request.global_batch is None else str(self.request.global_batch)
        hint = "Samples of one optimizer step. Empty: as the knobs are set, or any if the batch is varied."
        self._ask_part("Global batch", hint, current, _read_batch)

    def _ask_objective(self) -> None:
        """Ask for the objective; for the least time also for the number of steps."""

        def on_objective(name: str) -> None:
            if name == "time":
                hint = "Steps of the real training; a slow start such as compilation pays off only in a long one."
                self._ask_part("Optimizer steps", hint, str(self.request.for_steps or self.steps), _read_steps)
            else:
                self._change({"objective": name, "for_steps": None})

        hints = [(name, objective.hint) for name, objective in OBJECTIVES.items()]
        ask_choice(self.app, "Search for", hints, on_objective, current=self.request.objective)

    def _ask_budget(self) -> None:
        minutes, seconds = divmod(self.request.budget_s, 60)
        current = f"{self.request.budget_s:g}s" if seconds else f"{minutes:g}m"
        self._ask_part("Time budget", "Time for finding the best: 90s, 10m, 1.5h.", current, _read_budget)

    def _ask_part(self, title: str, hint: str, value: str, read: Callable[[str], Fields]) -> None:
        ask_text(self.app, title, hint, value, lambda text: self._change(read(text)))

    def _change(self, fields: Fields) -> None:
        self.on_request(msgspec.structs.replace(self.request, **fields))


def _read_vary(text: str) -> Fields:
    # A space after a comma does not end a knob's values.
    return {"vary": read_vary(re.split(r"\s+(?=\w+\s*=)", text.strip()) if text.strip() else [])}


def _read_batch(text: str) -> Fields:
    return {"global_batch": _read_count(text, "global batch") if text.strip() else None}


def _read_steps(text: str) -> Fields:
    return {"objective": "time", "for_steps": _read_count(text, "steps")}


def _read_budget(text: str) -> Fields:
    return {"budget_s": read_budget(text)}


def _read_count(text: str, name: str) -> int:
    """Return a whole number of at least 1. Raises UserError."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise UserError(f"{name}: {text.strip() or 'nothing'} is not a whole number of at least 1", key=name)
    return count
