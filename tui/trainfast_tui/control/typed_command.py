"""The command of a script, as a person types it on the screen."""

from __future__ import annotations

import os

from trainfast_runner.errors import UserError
from trainfast_runner.running.scripts.command import read_command
from trainfast_runner.settings.scripts.script_preset import split_words

SHELL_WORDS = ("|", "||", "&", "&&", ";", "<", ">", ">>", "2>&1")
"""Words that mean something to a shell alone."""


def split_command(text: str) -> list[str]:
    """Split a typed command as a shell splits it, with `~` for the home folder; no shell runs it.

    Raises UserError for a text that is not a command, or one that cannot start in this folder.
    """
    words = [os.path.expanduser(word) for word in split_words(text, "command")]
    shell_word = next((word for word in words if word in SHELL_WORDS), None)
    if shell_word is not None:
        raise UserError(f"no shell runs the command, so {shell_word} has no meaning in it", key="command")
    if not words:
        raise UserError("type the command that starts your script", key="command", advice="python train.py")
    read_command(words)
    return words
