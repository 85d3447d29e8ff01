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
    from trainfast_runner.records.run_file import Discovered


class ScriptDiscovered(ScreenMessage, frozen=True):
    """The flags of a script are known."""

    discovery_id: int
    """The number that `ScriptControl.discover` gave this discovery."""
    discovered: Discovered


class DiscoveryRefused(ScreenMessage, frozen=True):
    """A script could not be looked into."""

    discovery_id: int
    """The number that `ScriptControl.discover` gave this discovery."""
    error: UserError


class ScriptControl:
    """Discovers one script at a time. `python` runs it in place of its command's interpreter, None for that one."""

    def __init__(self, python: str | None) -> None:
        self._python = python
        self._work = CancellableWork("discovery")
        self._discovery_id = 0

    def discover(self, command: Sequence[str], post: Post) -> int:
        """Find the flags of this command's script; return the discovery's number.

        `post` gets ScriptDiscovered or DiscoveryRefused with it.
        """
        self._discovery_id += 1
        discovery_id = self._discovery_id
        self._work.start(
            partial(self._discover, tuple(command), discovery_id), post, partial(DiscoveryRefused, discovery_id)
        )
        return discovery_id

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the script that is looked into, and wait at most `wait_s` seconds until its process is gone."""
        self._work.cancel(wait_s)

    def _discover(
        self, command: tuple[str, ...], discovery_id: int, cancelled: threading.Event
    ) -> ScriptDiscovered | None:
        from trainfast_runner.running.scripts.discovery import discover

        discovered = discover(command, self._python, cancelled=cancelled)
        return None if cancelled.is_set() else ScriptDiscovered(discovery_id, discovered)
