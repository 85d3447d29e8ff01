"""The files that a process keeps locked while it lives, and the one way to wait for a lock."""

from __future__ import annotations

import fcntl
import math
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .terminal import can_move_cursor

ALIVE_LOCK_FILE = "alive.lock"
"""In the run directory: held shared by each process of the run."""
SEARCH_LOCK_FILE = "search.lock"
"""In the search's directory: held by the process that conducts the search."""


LOCK_PAUSE_S = 0.02
"""Seconds between two tries for a lock."""
TOLD_AFTER_S = 1.0
"""Seconds of waiting for a lock after which its holder is told."""
COMMAND_CHARACTERS = 80
"""Chosen, not measured: the most of a holder's command that is told."""
OnWait = Callable[[str], None]
"""Called at each try for a lock, and may raise to end the wait; once, after `TOLD_AFTER_S`, with the holder in words,
else with an empty text."""


def print_holder(holder: str) -> None:
    """Print on stderr who is waited for."""
    if holder:
        progress_bar_away = "\r\x1b[K" if sys.stderr.isatty() and can_move_cursor(os.environ) else ""
        print(f"{progress_bar_away}waiting for {holder}", file=sys.stderr, flush=True)


def wait_for_lock(fd: int, kind: int, on_wait: OnWait = print_holder, within_s: float = math.inf) -> bool:
    """Lock an open file as `flock` does (`LOCK_EX`, `LOCK_SH`); False if others keep it for `within_s` seconds.

    It tries again and again: a blocking `flock` would go on after a signal.
    """
    began_s, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited_s = time.monotonic() - began_s
        if waited_s >= within_s:
            return False
        tells = waited_s >= TOLD_AFTER_S and not is_told
        on_wait(lock_holder(fd) if tells else "")
        is_told = is_told or tells
        time.sleep(LOCK_PAUSE_S)


def lock_holder(fd: int) -> str:
    """Return the process that has locked an open file, with its command and the file's path, in words."""
    path, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    holder = "another process"
    with suppress(OSError):  # no /proc/locks; or ended, while a child of it keeps the lock
        # "33: FLOCK  ADVISORY  WRITE 18629 fe:00:2146724 0 EOF"; processes that wait for it stand after "->".
        line = rf"^\d+: FLOCK +\S+ +\S+ ([1-9]\d*) {file} "
        found = re.search(line, Path("/proc/locks").read_text(), re.MULTILINE)
        if found is not None:
            pid = found[1]
            holder = f"process {pid}"
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
            is_suspended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            holder += f" ({command[:COMMAND_CHARACTERS]}{', suspended' if is_suspended else ''})"
    return "".join(letter if letter.isprintable() else "?" for letter in f"{holder}, which has locked {path}")


def search_lock(run_directory: Path, search_id: str) -> Path:
    """The lock that a search's conductor holds; the searches' folder is next to that of the runs."""
    return run_directory.parent.parent / "searches" / search_id / SEARCH_LOCK_FILE
