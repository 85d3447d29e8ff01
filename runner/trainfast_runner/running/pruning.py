"""Disk space of old runs and searches, and their deletion; live ones are never touched."""

from __future__ import annotations

import calendar
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records import home as home_records
from trainfast_runner.records import run_directory
from trainfast_runner.records.json_lines import BLOCK_BYTES
from trainfast_runner.running.present_state import BEING_MADE_S, unfinished_host
from trainfast_runner.running.settling import remove_run
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE


def disk_bytes(path: Path) -> int:
    """Bytes on the disk of a file, or of a folder with its contents; links are not followed."""
    inner = [] if path.is_symlink() else [(folder, [*folders, *files]) for folder, folders, files in os.walk(path)]
    blocks = 0
    for folder, names in [(str(path.parent), [path.name]), *inner]:
        for name in names:
            with suppress(OSError):
                blocks += os.lstat(os.path.join(folder, name)).st_blocks
    return blocks * BLOCK_BYTES


UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
"""Seconds of each unit of an age."""
NEWER_THAN_ALL = "~"
"""A text that sorts after every id."""


@dataclass(frozen=True)
class PrunePlan:
    """The runs and searches to delete, by id with their bytes. `live` ones stay."""

    runs: dict[str, int]
    searches: dict[str, int]
    live: list[str]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to delete."""
        return not (self.runs or self.searches)

    @property
    def total_bytes(self) -> int:
        """Bytes that deleting all of them frees."""
        return sum((*self.runs.values(), *self.searches.values()))


def seconds_of(age: str) -> float:
    """An age as it is typed: 12h, 30d, 2w. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", age.strip().lower())
    if match is not None and match[2] in UNITS_S:
        return float(match[1]) * UNITS_S[match[2]]
    nearest_age = None if match is None else f"{match[1]}{match[2][:1] if match[2][:1] in UNITS_S else 'd'}"
    raise UserError(
        f"--older-than {age}: not an age", key="--older-than", allowed=["12h", "30d", "2w"], nearest=nearest_age
    )


def plan_prune(home: home_records.Home, keep: int | None, older_than_s: float | None) -> PrunePlan:
    """Plan to delete runs and searches neither of the newest `keep` listed runs nor younger than `older_than_s`.

    A search and its runs stay while it is conducted, and a search while a run of it stays. Raises UserError without
    either limit.
    """
    if keep is None and older_than_s is None:
        raise UserError("runs prune needs a limit: --keep N, --older-than AGE or both", key="--keep")
    now_s = time.time()
    kept_ids = [] if keep is None else _kept_runs(home, keep)
    older_cutoff = NEWER_THAN_ALL
    if older_than_s is not None:
        older_cutoff = time.strftime(home_records.STAMP_FORMAT, time.gmtime(max(0.0, now_s - older_than_s)))
    cutoff = min([older_cutoff, *kept_ids])
    """The id before which searches may be deleted; ids sort by time."""
    every_search = home_records.search_directories(home)
    conducted_names = {directory.name for directory in every_search if home_records.is_conducted(directory)}
    runs: dict[str, int] = {}
    live_ids, needed_searches = [], set(conducted_names)
    for directory in map(home.directory, home.run_ids()):
        run_id = directory.name
        if not _is_from_launch(directory):
            continue
        run = run_directory.read_run_file(directory)
        search_id = None if run is None else run.search_id
        if unfinished_host(directory, run) is not None:
            needed_searches.add(search_id or "")
            continue
        is_live = run_directory.is_alive(directory) or _is_being_made(directory, now_s) or search_id in conducted_names
        is_old = run_id < older_cutoff and run_id not in kept_ids
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
    return PrunePlan(runs, searches, live_ids)


def prune(home: home_records.Home, plan: PrunePlan) -> dict[str, int]:
    """Delete the plan's runs and searches and return those that remain by name, with their bytes.

    Those that came alive meanwhile remain, and those that cannot be deleted.
    """
    for run_id in plan.runs:
        with suppress(UserError, OSError):
            remove_run(home, run_id)
    searches = {search_id: home.search_directory(search_id) for search_id in plan.searches}
    for directory in searches.values():
        with suppress(OSError), home_records.conductor_lock(directory) as is_ours:
            if is_ours:
                shutil.rmtree(directory)
    paths = {run_id: home.directory(run_id) for run_id in plan.runs} | searches
    return {name: disk_bytes(path) for name, path in paths.items() if os.path.lexists(path)}


def _kept_runs(home: home_records.Home, keep: int) -> list[str]:
    """The newest `keep` runs of `runs list`, and the runs between them that it leaves out.

    With fewer runs than `keep` an empty id, older than every other, is among them.
    """
    kept: list[str] = []
    for run_id in reversed(home.run_ids() if keep else []):
        kept.append(run_id)
        keep -= run_directory.is_listed(home.directory(run_id))
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
    return (
        not names or run_directory.RUN_FILE in names or ALIVE_LOCK_FILE in names
    ) and run_directory.unreadable_reason(directory) is None


def _is_being_made(directory: Path, now_s: float) -> bool:
    """True if a launch may have made the directory just now, before its lock."""
    try:
        began_s = calendar.timegm(
            time.strptime(directory.name[: home_records.STAMP_CHARACTERS], home_records.STAMP_FORMAT)
        )
    except ValueError:
        return False
    return not (directory / run_directory.RUN_FILE).exists() and abs(now_s - began_s) < BEING_MADE_S
