"""The report of discovery: the flags of a script's own parser, as the hooks in it wrote them."""

from __future__ import annotations

from typing import Any

import msgspec

DISCOVERED_FILE = "discovered.json"
FRAMEWORKS = ("HF Trainer", "accelerate", "Lightning", "torch")
"""The frameworks that train scripts. The first found counts: a Trainer uses accelerate."""


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag of a script, or one value of its Hydra configuration.

    `type` is int, float, bool, str, list, `switch` for a flag without a value, or `off switch` for one that turns its
    setting off. `value` is what the command gives it, else its default. `off` is the flag that turns a switch off.
    """

    names: list[str]
    type: str = "str"
    default: Any = None
    value: Any = None
    choices: list[str] = []
    off: str | None = None
    help: str = ""
    assigned: bool = False
    """True if the command line takes it as `NAME=VALUE`."""

    @property
    def name(self) -> str:
        """The longest name of the flag."""
        return max(self.names, key=len)


class Discovered(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a script's run to its parser.

    `stopped_at` is where it ended, `parser` the kind of its parser, None without one. `fields` are those of a
    TrainingArguments that the script filled itself. `uses` names the frameworks that its own names come from.
    """

    stopped_at: str
    parser: str | None = None
    flags: list[Flag] = []
    fields: dict[str, Any] = {}
    uses: list[str] = []

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
