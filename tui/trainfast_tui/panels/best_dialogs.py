"""The dialogs that ask for the parts of the next best-fit search's question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.search.best_journal import BestRequest, read_budget
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import read_vary
from trainfast_tui.panels.ask import ask_choice, ask_text
from trainfast_tui.text.best_words import EVERY_KNOB, OBJECTIVES, vary_text

if TYPE_CHECKING:
    from textual.app import App


Fields = dict[str, object]
"""Fields of `BestRequest` by name."""


def ask_part(
    app: App[None],
    part: str,
    request: BestRequest,
    planned: Mapping[str, Sequence[KnobValue]],
    steps: int,
    on_request: Callable[[BestRequest], None],
) -> None:
    """Ask for `vary`, `batch`, `objective` or `budget` of this question, and pass it on with the answer.

    `planned` are the values of the present search where the question names none; `steps` are those of the next run.
    """

    def change(fields: Fields) -> None:
        on_request(msgspec.structs.replace(request, **fields))

    def ask(title: str, hint: str, value: str, read: Callable[[str], Fields]) -> None:
        ask_text(app, title, hint, value, lambda text: change(read(text)))

    def on_objective(name: str) -> None:
        if name != "time":
            change({"objective": name, "for_steps": None})
            return
        hint = "Steps of the real training; a slow start such as compilation pays off only in a long one."
        value = str(request.for_steps or steps)
        ask("Optimizer steps", hint, value, lambda text: {"objective": name, "for_steps": _read_count(text, "steps")})

    match part:
        case "vary":
            current = vary_text(request.vary or planned)
            hint = f"knob=a,b,c knob=d,e: the values to try. Empty: {EVERY_KNOB}."
            ask("Knobs to vary", hint, current, lambda text: {} if text.strip() == current else _read_vary(text))
        case "batch":
            current = "" if request.global_batch is None else str(request.global_batch)
            hint = "Samples of one optimizer step. Empty: as the knobs are set, or any if the batch is varied."
            ask("Global batch", hint, current, _read_batch)
        case "objective":
            hints = [(name, objective.hint) for name, objective in OBJECTIVES.items()]
            ask_choice(app, "Search for", hints, on_objective, current=request.objective)
        case "budget":
            minutes, seconds = divmod(request.budget_s, 60)
            current = f"{request.budget_s:g}s" if seconds else f"{minutes:g}m"
            hint = "Time for finding the best: 90s, 10m, 1.5h."
            ask("Time budget", hint, current, lambda text: {"budget_s": read_budget(text)})


def _read_batch(text: str) -> Fields:
    return {"global_batch": _read_count(text, "global batch") if text.strip() else None}


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
