"""The end of a process that the user selected: only their own, and never a later one with its pid."""

from __future__ import annotations

import os
import signal

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes.identity import Identity, identify, send
from trainfast_runner.machine.processes.listing import owner_uid, user_name


def check_endable(identity: Identity) -> None:
    """Raise UserError if this process must not be signalled: another user's, this program, or a later one with its
    pid."""
    pid = identity.pid
    current = identify(pid)
    if current is None:
        raise UserError(f"process {pid} has ended already", key="pid")
    if current != identity:
        raise UserError(f"pid {pid} belongs to another process by now: nothing was signalled", key="pid")
    if pid in (1, os.getpid()):
        raise UserError(
            "this is trainfast-tui itself" if pid == os.getpid() else "process 1 runs the machine",
            key="pid",
        )
    uid = owner_uid(pid)
    if uid is None:
        raise UserError(f"the owner of process {pid} is unknown: nothing was signalled", key="pid")
    if uid != os.getuid():
        raise UserError(f"process {pid} belongs to {user_name(uid)}, not to you: ask them to end it", key="pid")


def end_process(identity: Identity, *, kill: bool = False) -> str:
    """Send SIGTERM, or SIGKILL with `kill`; returns a sentence about it. Raises UserError when `check_endable` does."""
    check_endable(identity)
    signum = signal.SIGKILL if kill else signal.SIGTERM
    if not send(identity, signum):
        raise UserError(f"process {identity.pid} could not be signalled: it has ended meanwhile", key="pid")
    return f"{signum.name} sent to process {identity.pid}."
