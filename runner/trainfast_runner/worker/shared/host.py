"""The files that a process keeps locked while it lives, and the one way to wait for a lock."""

import fcntl
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

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


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, mode 0700. Raises OSError."""
    if not os.path.isdir(folder):
        if not os.path.isdir(folder.parent):
            make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def can_move_cursor(environment: Mapping[str, str]) -> bool:
    """True if TERM names a terminal whose cursor programs can move; one that terminfo does not know may well."""
    return environment.get("TERM", "") not in ("", "dumb", "unknown")


PASSIVE, DEFAULT = "passive", "default"
"""The policies of a waiting OpenMP thread: sleep, or spin first."""
PASSIVE_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""For libgomp, and for libiomp and libomp, whose threads spin 200 ms under any policy unless KMP_BLOCKTIME is 0."""
WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables that set how long a waiting thread spins: OpenMP's, libgomp's, and two of libiomp and libomp."""


def wait_policy(environment: Mapping[str, str]) -> str:
    """Return `passive`, `default` (the library's own: it spins first), or the settings as NAME=VALUE."""
    settings = {name: environment[name] for name in WAIT_SETTINGS if name in environment}
    if not settings:
        return DEFAULT
    upper_settings = {name: value.upper() for name, value in settings.items()}
    if "OMP_WAIT_POLICY" in upper_settings and upper_settings.items() <= PASSIVE_SETTINGS.items():
        return PASSIVE
    return ", ".join(f"{name}={value}" for name, value in settings.items())


DISK_FULL_BELOW_BYTES = 1 << 24
"""A disk with less space than this counts as full: DeepSpeed writes blocks of 1 MiB from several threads."""


def states_folder(offload_path: str | Path, run_directory: Path) -> Path:
    """The folder under `offload_path` for the states of one run, which is the run's alone: it has the run's id."""
    return Path(offload_path, f"trainfast-offload-{run_directory.name}")


def delete_states(offload_path: Path | None, run_directory: Path) -> None:
    """Delete the states that an ended run has offloaded, if it offloaded any."""
    if offload_path is not None:
        import shutil  # of all that use this file, only the end of a run that offloads needs it

        shutil.rmtree(states_folder(offload_path, run_directory), ignore_errors=True)


def free_bytes(parent: Path) -> int:
    """Bytes that this user may still write below `parent`. Raises OSError."""
    disk = os.statvfs(parent)
    return disk.f_bavail * disk.f_frsize
