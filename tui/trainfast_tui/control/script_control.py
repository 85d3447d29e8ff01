"""Look into a script of the user's own for the session, in a thread that runs the script in a process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from trainfast_tui.control.messages import Post, ScreenMessage
from trainfast_tui.control.threads import CancellableWork

if TYPE_CHECKING:
    from trainfast_runner.errors import UserError
    from trainfast_runner.records.discovered import Discovered


class ScriptDiscovered(ScreenMessage, frozen=True):
    """The flags of the script in this command are known."""

    command: tuple[str, ...]
    discovered: Discovered


class DiscoveryRefused(ScreenMessage, frozen=True):
    """The script in this command could not be looked into."""

    command: tuple[str, ...]
    error: UserError


class ScriptControl:
    """Discovers one script at a time. `python` runs it in place of its command's interpreter, None for that one."""

    def __init__(self, python: str | None) -> None:
        self._python = python
        self._work = CancellableWork("discovery")

    def discover(self, command: Sequence[str], post: Post) -> None:
        """Find the flags of the script in this command: posts ScriptDiscovered or DiscoveryRefused."""
        command = tuple(command)
        self._work.start(partial(self._discover, command), post, partial(DiscoveryRefused, command))

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the script that is looked into, and wait at most `wait_s` seconds until its process is gone."""
        self._work.cancel(wait_s)

    def _discover(self, command: tuple[str, ...], cancelled: threading.Event) -> ScriptDiscovered | None:
        from trainfast_runner.running.scripts.discovery import discover

        discovered = discover(command, self._python, cancelled=cancelled)
        return None if cancelled.is_set() else ScriptDiscovered(command, discovered)
