"""The settings of a script's run that the hooks obey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """`script` of `run.json`, as far as the hooks read it; `records.script_run.ScriptAsked` has all its fields."""

    steps: int | None = None
    """Steps after which the script is ended; None for a script that ends by itself."""
    timing_warmup: int = 3
    """First steps that are not measured."""
    samples_per_step: int | None = None
    """Samples of each step and rank, as the user gives them: no hook knows better."""
    steps_from_log: str | None = None
    """A regular expression that matches a line of output for each step; the hooks then count none."""
    flagged: Sequence[str] = ()
    """Knobs that flags of the script's own take."""
    trainer_fields: Mapping[str, Any] = {}
    """Fields of TrainingArguments that the hooks set."""
    loader_defaults: Mapping[str, Any] = {}
    """Defaults of DataLoader's arguments that the hooks set."""
    trial: bool = False
    """True for a trial of a search: its memory is limited, and the trial leaves no files."""
    longest_first: bool = False
    """True for a trial of a batch search, whose untimed steps take the longest samples."""


def settings_of(recorded: Mapping[str, Any]) -> Settings:
    """Return the settings in `recorded`, which is `script` of `run.json`."""
    return Settings(**{name: value for name, value in recorded.items() if name in Settings._fields})
