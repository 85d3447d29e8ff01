"""A script of the user's own in words: what discovery found in it, and its command as it is typed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.running.scripts.command import read_command
from trainfast_runner.settings.script_preset import split_words
from trainfast_tui.text.format import count, plain

if TYPE_CHECKING:
    from trainfast_runner.records.discovered import Discovered, Flag

SHELL_WORDS = ("|", "||", "&", "&&", ";", "<", ">", ">>", "2>&1")
"""Words that mean something to a shell alone."""


def found_words(discovered: Discovered) -> str:
    """Return where discovery stopped the script, its parser, and the number of its flags."""
    kind = f"{discovered.parser}, " if discovered.parser else ""
    return f"stopped at {discovered.stopped_at}: {kind}{count(len(discovered.flags))} flags"


def default_words(flag: Flag) -> str:
    """Return the default of a flag; empty without one."""
    return plain("" if flag.default is None else str(flag.default))


def command_words(text: str) -> list[str]:
    """Split a typed command as a shell splits it, with `~` for the home folder; no shell runs it.

    Raises UserError for a text that is no command, or one that cannot start in this folder.
    """
    words = [os.path.expanduser(word) for word in split_words(text, "command")]
    for_shell = next((word for word in words if word in SHELL_WORDS), None)
    if for_shell is not None:
        raise UserError(f"no shell runs the command, so {for_shell} has no meaning in it", key="command")
    if not words:
        raise UserError("type the command that starts your script", key="command", advice="python train.py")
    read_command(words)
    return words
