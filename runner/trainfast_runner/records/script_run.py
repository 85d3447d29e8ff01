"""A run of the user's own script: the command as asked, and the findings of the hooks in the script."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from trainfast_runner.records.script_in_command import script_index, script_name

FIRST_TORCH = "2.5"
"""The first torch that loads the hooks: it calls the entry points of group `torch.backends`."""


class ScriptAsked(msgspec.Struct, frozen=True, kw_only=True):
    """`script` of `run.json`; the hooks in the script read it too."""

    command: list[str]
    """The command as typed."""
    argv: list[str]
    """The command as started."""
    steps: int | None = None
    """None for a script that ends by itself."""
    timing_warmup: int = 3
    samples_per_step: int | None = None
    steps_from_log: str | None = None
    """A regular expression that matches a line of output for each step; the hooks then count none."""
    flagged: list[str] = []
    """Knobs that flags of the script's own take."""
    flag_words: dict[str, Any] = msgspec.field(default_factory=dict, name="places")
    """Words of the command for knobs (JSON `places`), as in `[script.knobs]` of a preset:
    text with {} for the value, or words by value."""
    trainer_fields: dict[str, Any] = {}
    """Fields of TrainingArguments that the hooks set."""
    loader_defaults: dict[str, Any] = {}
    """Defaults of DataLoader's arguments that the hooks set."""
    hooks_blocked: str | None = msgspec.field(default=None, name="door_closed")
    """The reason that the hooks cannot load (JSON `door_closed`); None if they can."""
    unconfirmed: list[str] = []
    """Knobs set without a flag that the script may not take: an argument of its own wins over them."""
    trial: bool = False
    """True for a trial of a search: its memory is limited and it leaves nothing behind."""
    longest_first: bool = False
    """True for a trial of a batch search, whose untimed steps take the longest samples."""


class Overridden(msgspec.Struct, frozen=True, kw_only=True):
    """A knob that was asked for and that ran otherwise."""

    knob: str
    asked: Any
    ran: Any
    """The value that ran; None if the script does not show it."""
    by: str
    """The framework that overrode the knob, or the script."""


class BatchWidths(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of the model's inputs in a trial of a batch search, in values a sample; None where none was seen."""

    narrowest: int | None = None
    widest: int | None = None
    longest_first: bool = False
    """True if the untimed steps took the longest samples that the data set told of."""
    looked_at: int = 0
    """Samples whose length was seen."""
    samples: int = 0
    """Samples that the sampler may give."""

    @property
    def differ(self) -> bool:
        """True if batches of several widths were seen."""
        return (self.narrowest or 0) < (self.widest or 0)

    @property
    def has_widest(self) -> bool:
        """True if no batch of the data set is wider than the widest that was seen."""
        return not self.differ or (self.longest_first and self.looked_at >= self.samples)


class ScriptFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`script` of `result.json`."""

    command: list[str]
    cwd: str | None = None
    """The folder that the command started in."""
    exit_code: int | None = None
    """Exit code of the command, negative for a signal; None if it never started."""
    framework: str | None = None
    """The framework whose steps were counted."""
    hooks: list[str] = []
    """The hooks that ran."""
    samples_from: str | None = None
    """The source of a step's samples."""
    unknown: dict[str, str] = {}
    """The reason of each null field of the step records."""
    overridden: list[Overridden] = []
    suppressed: list[str] = []
    """Actions that a trial kept the script from; a plain run suppresses none."""
    evaluation_seconds: float | None = None
    """Time of evaluations, which is in no step; None if no hook reported."""

    def is_of_one_script(self, other: ScriptFigures) -> bool:
        """True if both commands start one script: one file, or one name where a folder is unknown."""
        ours, theirs = self._script(), other._script()
        if not self.cwd or not other.cwd:
            return os.path.basename(ours) == os.path.basename(theirs)
        return os.path.normpath(os.path.join(self.cwd, ours)) == os.path.normpath(os.path.join(other.cwd, theirs))

    def _script(self) -> str:
        """The file or module that the command trains with, else its program."""
        index = script_index(self.command)
        return script_name([*self.command, ""][index or 0])


class HookLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `door.jsonl`: `opened` in each process that imported torch, or `trouble` of the hooks."""

    t_ns: int
    kind: str
    pid: int | None = None
    rank: int | None = None
    torch: str | None = None
    detail: str | None = None
