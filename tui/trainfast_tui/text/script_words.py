"""The findings of discovery in a script of the user's own, in words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_runner.units import counted
from trainfast_tui.text.format import plain

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import Discovered, Flag


def warning_words(command: Sequence[str]) -> str:
    """Return what is about to run, and what it may do."""
    return (
        f"running {plain(shlex.join(command))} up to its argument parser, to find its flags;"
        " whatever it does before that, such as deleting or writing files, is done"
    )


def discovery_words(discovered: Discovered) -> str:
    """Return where discovery stopped the script, its parser, and the number of its flags."""
    kind = f"{discovered.parser}, " if discovered.parser else ""
    return f"stopped at {discovered.stopped_at}: {kind}{counted(len(discovered.flags), 'flag')}"


def default_words(flag: Flag) -> str:
    """Return the default of a flag; empty without one."""
    return plain("" if flag.default is None else str(flag.default))
