"""The report of discovery: the flags of a script's own parser, as the hooks in it wrote them."""

from __future__ import annotations

from typing import Any

import msgspec

DISCOVERED_FILE = "discovered.json"
FRAMEWORKS = ("HF Trainer", "accelerate", "Lightning", "torch")
"""The frameworks that train scripts. The first found counts: a Trainer uses accelerate."""


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag of a script, or one value of its Hydra configuration."""

    names: list[str]
    type: str = "str"
    """int, float, bool, str, list, `switch` for a flag without a value, or `off switch` for one that turns its setting
    off."""
    default: Any = None
    value: Any = None
    """The value that the command gives, else the default."""
    choices: list[str] = []
    off: str | None = None
    """The flag that turns a switch off."""
    help: str = ""
    assigned: bool = False
    """True if the command line takes it as `NAME=VALUE`."""

    @property
    def name(self) -> str:
        """The longest name of the flag."""
        return max(self.names, key=len)


class Discovered(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a script's run to its parser."""

    stopped_at: str
    """The point at which the script ended."""
    parser: str | None = None
    """The kind of its parser; None without one."""
    flags: list[Flag] = []
    fields: dict[str, Any] = {}
    """Fields of a TrainingArguments that the script filled itself."""
    uses: list[str] = []
    """The frameworks that its own names come from."""

    @property
    def framework(self) -> str | None:
        """The framework that trains, one of `FRAMEWORKS`; None if the script stopped before it showed one."""
        if self.fields:
            return "HF Trainer"
        if self.stopped_at == "a Lightning Trainer":
            return "Lightning"
        shown = next((name for name in FRAMEWORKS if name in self.uses), None)
        if shown is not None:
            return shown
        if self.stopped_at in ("the first optimizer", "the first forward pass"):
            return "torch"
        # A Trainer has its arguments, and a script with them ends there, before any optimizer.
        return "HF Trainer" if self.parser == "HfArgumentParser" else None
