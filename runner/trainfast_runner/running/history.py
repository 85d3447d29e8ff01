"""The history: every run of a home as one row, from nothing but its small `result.json` once it has ended.

Then the disk space of old runs and searches, and their deletion; live ones are never touched.
"""

from __future__ import annotations

import calendar
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.records import run_directory
from trainfast_runner.records.home import (
    STAMP_CHARACTERS,
    STAMP_FORMAT,
    Home,
    conductor_lock,
    is_conducted,
    search_directories,
)
from trainfast_runner.records.json_lines import BLOCK_BYTES, DAMAGE, read_regular
from trainfast_runner.records.result import Doubt, MemoryFigures, Result, RunConditions, StepCount, StepTime, Throughput
from trainfast_runner.records.run_file import RecordedKnobs, ScriptFigures, name_of
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.running.present_state import BEING_MADE_S, other_host, run_state, unfinished_host
from trainfast_runner.running.settling import recover_result, remove_run
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `result.json` that a row has as it is."""

    preset: str = ""
    variant: str | None = None
    state: str
    reason: str = ""
    started_wall_ns: int | None = None
    seconds: float | None = None
    """Time of the whole run."""
    knobs: RecordedKnobs = {}
    overrides: dict[str, Any] = msgspec.field(default_factory=dict, name="changed")
    """Overrides of the preset (JSON `changed`)."""
    steps: StepCount = StepCount()
    synthetic_data: bool | None = None
    role: str | None = None
    """Role in its search: probe, proof, trial or cold; None for a run by itself."""


class RunRow(_Head, frozen=True, kw_only=True):
    """One run in a list; rates are a second and summed over data-parallel ranks."""

    run_id: str
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_ms_p50: float | None = None
    peak_allocated_bytes: int | None = None
    clean: bool = True
    doubts: list[Doubt] = []
    """The conditions that make the figures doubtful."""
    supervised: bool | None = None
    """None once a run has ended, False while it is live without its supervisor."""
    measured_under: str | None = None
    """The reason its speed ranks against no other, as `Result.measured_under`."""
    command: list[str] = []
    """The command of a script; empty for a preset's model."""
    number: int | None = None
    """The number of its launch; None for a run that this home did not launch."""
    host: str | None = None
    """The other machine that the run is on; None for one on this machine, and for an ended one."""

    @property
    def name(self) -> str:
        """The preset as it is written on the command line."""
        return name_of(self.preset, self.variant)


class ResultHead(_Head, frozen=True, kw_only=True):
    """The part of `result.json` that a row shows; decoding no more keeps 10,000 runs under a second."""

    throughput: Throughput = Throughput()
    step_ms: StepTime = StepTime()
    memory: MemoryFigures = MemoryFigures()
    conditions: RunConditions = RunConditions()
    doubts: list[Doubt] | None = None
    script: ScriptFigures | None = None


_decoder = msgspec.json.Decoder(ResultHead)


def iter_rows(home: Home, *, warm_processes: bool = False) -> Iterator[RunRow]:
    """Yield the rows, newest first; a caller that takes ten reads ten files.

    Runs in which a search only tried sizes or candidates are left out unless `warm_processes` is true.
    """
    numbers = home.launch_numbers()
    for run_id in reversed(home.run_ids()):
        row = _ended_row(home, run_id)
        if row is None and home.directory(run_id).is_dir():
            row = row_of(home, run_id)
        if row is not None and (warm_processes or row.role not in WARM_ROLES):
            yield replace(row, number=numbers.get(run_id))


def row_of(home: Home, run_id: str) -> RunRow:
    """The row of one run, live or ended."""
    directory = home.directory(run_id)
    row = _ended_row(home, run_id)
    if row is not None:
        return row
    result = recover_result(directory)
    if result is not None:
        return _row_of_head(result, run_id)
    run = run_directory.read_run_file(directory)
    state = run_state(directory, run)
    return RunRow(
        run_id=run_id,
        preset=run.preset if run else "",
        variant=run.variant if run else None,
        state=state.state,
        reason=state.reason or "",
        started_wall_ns=run.clock.wall_ns if run else None,
        knobs=run.knobs if run else {},
        overrides=run.override_values() if run else {},
        clean=run.clean if run else True,
        role=run.role if run else None,
        command=run.script.command if run and run.script else [],
        host=None if state.ended else other_host(run),
        supervised=None if state.ended else state.supervised or state.state == "starting",
    )


def _ended_row(home: Home, run_id: str) -> RunRow | None:
    """The row of a `result.json`; None when there is none, or it is damaged."""
    try:
        head = _decoder.decode(read_regular(f"{home.runs}/{run_id}/{run_directory.RESULT_FILE}"))
    except (OSError, *DAMAGE):
        return None
    return _row_of_head(head, run_id)


def _row_of_head(head: ResultHead | Result, run_id: str) -> RunRow:
    return RunRow(
        run_id=run_id,
        **{name: getattr(head, name) for name in _Head.__struct_fields__},
        doubts=head.doubts or [],
        samples_per_s=head.throughput.samples_per_s.typical,
        tokens_per_s=head.throughput.tokens_per_s.typical,
        step_ms_p50=head.step_ms.p50,
        peak_allocated_bytes=head.memory.peak_allocated_bytes,
        clean=head.conditions.clean,
        command=head.script.command if head.script is not None else [],
        measured_under=head.throughput.measured_under,
    )


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


def plan_prune(home: Home, keep: int | None, older_than_s: float | None) -> PrunePlan:
    """Plan to delete runs and searches neither of the newest `keep` listed runs nor younger than `older_than_s`.

    A search and its runs stay while it is conducted, and a search while a run of it stays. Raises UserError without
    either limit.
    """
    if keep is None and older_than_s is None:
        raise UserError("runs prune needs a limit: --keep N, --older-than AGE or both", key="--keep")
    now_s = time.time()
    kept_ids = [] if keep is None else _kept_runs(home, keep)
    oldest_s = None if older_than_s is None else max(0.0, now_s - older_than_s)
    older_cutoff = NEWER_THAN_ALL if oldest_s is None else time.strftime(STAMP_FORMAT, time.gmtime(oldest_s))
    cutoff = min([older_cutoff, *kept_ids])
    """The id before which searches may be deleted; ids sort by time."""
    every_search = search_directories(home)
    conducted_names = {directory.name for directory in every_search if is_conducted(directory)}
    runs: dict[str, int] = {}
    live_ids, needed_searches = [], set(conducted_names)
    for directory in filter(_is_from_launch, map(home.directory, home.run_ids())):
        run_id, run = directory.name, run_directory.read_run_file(directory)
        search_id = run.search_id or "" if run is not None else ""
        is_old = run_id < older_cutoff and run_id not in kept_ids
        if not is_old or unfinished_host(directory, run) is not None:
            needed_searches.add(search_id)
        elif run_directory.is_alive(directory) or _is_being_made(directory, now_s) or search_id in conducted_names:
            live_ids.append(run_id)
            needed_searches.add(search_id)
        else:
            runs[run_id] = disk_bytes(directory)
    live_ids += sorted(search_id for search_id in conducted_names if search_id < cutoff)
    searches = {
        directory.name: disk_bytes(directory)
        for directory in every_search
        if directory.name < cutoff and directory.name not in needed_searches
    }
    return PrunePlan(runs, searches, live_ids)


def prune(home: Home, plan: PrunePlan) -> dict[str, int]:
    """Delete the plan's runs and searches and return those that remain by name, with their bytes.

    Those that came alive meanwhile remain, and those that cannot be deleted.
    """
    for run_id in plan.runs:
        with suppress(UserError, OSError):
            remove_run(home, run_id)
    searches = {search_id: home.search_directory(search_id) for search_id in plan.searches}
    for directory in searches.values():
        with suppress(OSError), conductor_lock(directory) as is_ours:
            if is_ours:
                shutil.rmtree(directory)
    paths = {run_id: home.directory(run_id) for run_id in plan.runs} | searches
    return {name: disk_bytes(path) for name, path in paths.items() if os.path.lexists(path)}


def _kept_runs(home: Home, keep: int) -> list[str]:
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
    is_ours = not names or run_directory.RUN_FILE in names or ALIVE_LOCK_FILE in names
    return is_ours and run_directory.unreadable_reason(directory) is None


def _is_being_made(directory: Path, now_s: float) -> bool:
    """True if a launch may have made the directory just now, before its lock."""
    try:
        began_s = calendar.timegm(time.strptime(directory.name[:STAMP_CHARACTERS], STAMP_FORMAT))
    except ValueError:
        return False
    return not (directory / run_directory.RUN_FILE).exists() and abs(now_s - began_s) < BEING_MADE_S
