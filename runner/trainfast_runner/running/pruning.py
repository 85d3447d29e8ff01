"""Disk space of old runs, searches and caches, and their deletion; live ones are never touched."""

from __future__ import annotations

import calendar
import fcntl
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import (
    STAMP_CHARACTERS,
    STAMP_FORMAT,
    Home,
    conductor_lock,
    is_conducted,
    search_directories,
)
from trainfast_runner.records.run_directory import (
    RUN_FILE,
    is_alive,
    is_listed,
    is_locked,
    read_run_file,
    unreadable_reason,
)
from trainfast_runner.running.present_state import BEING_MADE_S, is_abandoned, unfinished_host
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE

FOLDERS_OF_FILES = ("inspected", "traced")
"""Folders of small files, written and read by one command at a time."""
FOLDERS_OF_FOLDERS = ("tokens", "images", "extensions")
"""Folders of folders, which a training has open for as long as it runs."""
STAT_BLOCK_BYTES = 512
"""Unit of `st_blocks` (inode(7))."""
_HALF_MADE = re.compile(r"\.(\d+)\.tmp$|^\..+\.(\d+)(?:-\d+)?$")


@dataclass(frozen=True)
class UnneededEntry:
    """A file or folder that can be deleted, its size on the disk, and the reason as text."""

    path: Path
    size_bytes: int
    reason: str


def unneeded_entries(cache: Path, older_than_s: float, now_s: float, *, is_training: bool) -> list[UnneededEntry]:
    """Entries unused for longer than `older_than_s`, half-made files, and locks that no process holds.

    Entries that a training may have open are left out while one `is_training`.
    """
    return [
        UnneededEntry(path, disk_bytes(path), reason)
        for name in (*FOLDERS_OF_FILES, *(() if is_training else FOLDERS_OF_FOLDERS))
        for path in _entries(cache / name)
        if (reason := _unneeded_reason(path, older_than_s, now_s)) is not None
    ]


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder of the cache; empty if it is missing, or another user's."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def remove(entry: UnneededEntry) -> bool:
    """Delete an entry; False if its lock was taken meanwhile, or it cannot be deleted."""
    path = entry.path
    try:
        if path.suffix != ".lock":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            return True
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def disk_bytes(path: Path) -> int:
    """Bytes on the disk of a file, or of a folder with its contents; links are not followed."""
    return sum(status.st_blocks * STAT_BLOCK_BYTES for status in _statuses(path))


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """The status of a file, or of a folder and all that it contains, without links' targets."""
    inner = [] if path.is_symlink() else [(folder, [*folders, *files]) for folder, folders, files in os.walk(path)]
    for folder, names in [(str(path.parent), [path.name]), *inner]:
        for name in names:
            with suppress(OSError):
                yield os.lstat(os.path.join(folder, name))


def _unneeded_reason(path: Path, older_than_s: float, now_s: float) -> str | None:
    if path.suffix == ".lock":
        with suppress(OSError):
            return None if is_locked(path, fcntl.LOCK_EX) else "an unused lock"
        return None
    if (writer := _HALF_MADE.search(path.name)) is not None:
        return None if os.path.exists(f"/proc/{writer[1] or writer[2]}") else "left half-made"
    unused_s = now_s - _last_use_s(path)
    return f"not read or changed for {unused_s / 86400:.0f} days by its file times" if unused_s > older_than_s else None


def _last_use_s(path: Path) -> float:
    """The newest time of an entry's files: reading sets it at most a day late (relatime), or never (noatime).

    A folder counts by its change alone, because listing it here reads it. Infinite for an entry that is gone.
    """
    times_s = (
        status.st_mtime if stat.S_ISDIR(status.st_mode) else max(status.st_mtime, status.st_atime)
        for status in _statuses(path)
    )
    return max(times_s, default=math.inf)


CACHE_UNUSED_S = 30 * 86400.0
"""Unused time after which a cache entry is deleted, without an age from the user."""
UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
"""Seconds of each unit of an age."""
NEWER_THAN_ALL = "~"
"""A text that sorts after every id."""


@dataclass(frozen=True)
class PrunePlan:
    """The entries to delete: runs and searches by id with their bytes, cache entries, locks. `live` ones stay."""

    runs: dict[str, int]
    searches: dict[str, int]
    caches: list[UnneededEntry]
    locks: list[UnneededEntry]
    live: list[str]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to delete."""
        return not (self.runs or self.searches or self.caches or self.locks)

    @property
    def total_bytes(self) -> int:
        """Bytes that deleting all entries frees."""
        files = (*self.caches, *self.locks)
        return sum((*self.runs.values(), *self.searches.values(), *(file.size_bytes for file in files)))


def seconds_of(age: str) -> float:
    """An age as it is typed: 12h, 30d, 2w. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", age.strip().lower())
    if match is not None and match[2] in UNITS_S:
        return float(match[1]) * UNITS_S[match[2]]
    nearest_age = None if match is None else f"{match[1]}{match[2][:1] if match[2][:1] in UNITS_S else 'd'}"
    raise UserError(
        f"--older-than {age}: not an age", key="--older-than", allowed=["12h", "30d", "2w"], nearest=nearest_age
    )


def plan_prune(home: Home, cache: Path, keep: int | None, older_than_s: float | None) -> PrunePlan:
    """Plan to delete entries that are neither of the newest `keep` listed runs nor younger than `older_than_s`.

    No run and no search is planned without either limit. A search and its runs stay while it is conducted, and a
    search while a run of it stays.
    """
    now_s = time.time()
    kept_ids = [] if keep is None else _kept_runs(home, keep)
    older_cutoff = NEWER_THAN_ALL if older_than_s is None else _stamp_of(now_s - older_than_s)
    is_limited = keep is not None or older_than_s is not None
    cutoff = min([older_cutoff, *kept_ids]) if is_limited else ""
    """The id before which searches may be deleted; ids sort by time."""
    every_search = search_directories(home)
    conducted_names = {directory.name for directory in every_search if is_conducted(directory)}
    runs: dict[str, int] = {}
    live_ids, needed_searches = [], set(conducted_names)
    for directory in map(home.directory, home.run_ids()):
        run_id = directory.name
        if not _is_from_launch(directory):
            continue
        run = read_run_file(directory)
        search_id = None if run is None else run.search_id
        if unfinished_host(directory, run) is not None and not is_abandoned(directory):
            needed_searches.add(search_id or "")
            continue
        is_live = is_alive(directory) or _is_being_made(directory, now_s) or search_id in conducted_names
        is_old = is_limited and run_id < older_cutoff and run_id not in kept_ids
        if is_live and is_old:
            live_ids.append(run_id)
        if is_live or not is_old:
            needed_searches.add(search_id or "")
        else:
            runs[run_id] = disk_bytes(directory)
    live_ids += sorted(search_id for search_id in conducted_names if search_id < cutoff)
    searches = {
        directory.name: disk_bytes(directory)
        for directory in every_search
        if directory.name < cutoff and directory.name not in needed_searches
    }
    is_training = bool(conducted_names) or next(home.live_directories(), None) is not None
    unused_s = CACHE_UNUSED_S if older_than_s is None else older_than_s
    unneeded_cache = unneeded_entries(cache, unused_s, now_s, is_training=is_training)
    locks = [entry for entry in unneeded_cache if entry.path.suffix == ".lock"]
    return PrunePlan(runs, searches, [entry for entry in unneeded_cache if entry not in locks], locks, live_ids)


def prune(home: Home, plan: PrunePlan) -> dict[str, int]:
    """Delete the plan's entries and return those that remain by name, with their bytes.

    Runs and searches that came alive meanwhile remain, and entries that cannot be deleted.
    """
    for run_id in plan.runs:
        with suppress(UserError, OSError):
            home.remove(run_id)
    searches = {search_id: home.search_directory(search_id) for search_id in plan.searches}
    for directory in searches.values():
        with suppress(OSError), conductor_lock(directory) as is_ours:
            if is_ours:
                shutil.rmtree(directory)
    files = [entry for entry in (*plan.caches, *plan.locks) if not remove(entry)]
    paths = {run_id: home.directory(run_id) for run_id in plan.runs} | searches
    paths |= {str(file.path): file.path for file in files}
    return {name: disk_bytes(path) for name, path in paths.items() if os.path.lexists(path)}


def _stamp_of(time_s: float) -> str:
    return time.strftime(STAMP_FORMAT, time.gmtime(max(0.0, time_s)))


def _kept_runs(home: Home, keep: int) -> list[str]:
    """The newest `keep` runs of `runs list`, and the runs between them that it leaves out.

    With fewer runs than `keep` an empty id, older than every other, is among them.
    """
    kept: list[str] = []
    for run_id in reversed(home.run_ids() if keep else []):
        kept.append(run_id)
        keep -= is_listed(home.directory(run_id))
        if keep == 0:
            break
    return [*kept, ""] if keep else kept


def _is_from_launch(directory: Path) -> bool:
    """True for a directory with `run.json` or the run's lock in it, and for an empty one: a dead launch left it.

    Another program's folder may be named like an id. It is listed as a lost run, but never deleted here; nor is a run
    that this user cannot read.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return (not names or RUN_FILE in names or ALIVE_LOCK_FILE in names) and unreadable_reason(directory) is None


def _is_being_made(directory: Path, now_s: float) -> bool:
    """True if a launch may have made the directory just now, before its lock."""
    try:
        began_s = calendar.timegm(time.strptime(directory.name[:STAMP_CHARACTERS], STAMP_FORMAT))
    except ValueError:
        return False
    return not (directory / RUN_FILE).exists() and abs(now_s - began_s) < BEING_MADE_S
