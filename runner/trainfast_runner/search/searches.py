"""The searches of a home: those that a command continues or a screen shows, and the directory of a new one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.home import STAMP_CHARACTERS, STAMP_FORMAT, Home, home_error, new_id
from trainfast_runner.records.json_lines import DAMAGE, read_all
from trainfast_runner.records.regular_files import open_regular
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.search_directories import (
    JOURNAL_FILE,
    is_conducted,
    newest_search_directories,
    search_directories,
)
from trainfast_runner.records.search_states import ANSWERED_STATES
from trainfast_runner.search.journal.batch import BatchEnded, BatchQuestion, ConfirmationRun, Probe
from trainfast_runner.search.journal.best import BestEnded, BestQuestion, ColdRun, Trial
from trainfast_runner.search.journal.lines import newest_conducted
from trainfast_runner.worker.shared.private_folder import make_private

BATCH_KIND, BEST_KIND = (str(question.__struct_config__.tag) for question in (BatchQuestion, BestQuestion))
"""Kinds of search, by the first line of their journals."""
TRY_KINDS = [line.__struct_config__.tag for line in (Probe, ConfirmationRun, Trial, ColdRun)]
"""Tags of the lines of a probe, a trial or a run."""
END_KINDS = [line.__struct_config__.tag for line in (BatchEnded, BestEnded)]
"""Tags of the lines that end a search."""
SEARCHES_CHECKED_FOR_LIVE = 20
"""Number of newest searches that are checked for a live one."""


class FirstLine(msgspec.Struct, frozen=True):
    """The parts of a journal's first line that identify a search: `kind` is BATCH_KIND or BEST_KIND."""

    kind: str = ""
    key: str = ""
    schema: int = SCHEMA


class LineHead(msgspec.Struct, frozen=True):
    """The tag of a journal's line, and the end state of a search's last one."""

    kind: str = ""
    state: str = ""


def unfinished(home: Home, key: str, kind: str) -> Path | None:
    """Return the newest unanswered search of this key and kind.

    None if the newest search that tried anything has an answer or failed. A search that ended before its first try is
    passed over. Raises as `search_directories`.
    """
    return _newest_open(search_directories(home), lambda line: (line.kind, line.key) == (kind, key))


def search_before_edit(home: Home, directory: Path) -> Path | None:
    """Return the unanswered search that asked this question before the script's files were edited; None without one.

    Raises as `search_directories`.
    """
    question_line = first_line(directory)
    question, dot, _ = question_line.key.partition(".")
    start_stamp = directory.name[:STAMP_CHARACTERS]
    older_directories = [
        path for path in search_directories(home) if path.name[:STAMP_CHARACTERS] <= start_stamp and path != directory
    ]

    def has_question(line: FirstLine) -> bool:
        return bool(dot) and line.kind == question_line.kind and line.key.partition(".")[0] == question

    search = _newest_open(older_directories, has_question)
    return None if search is None or first_line(search).key == question_line.key else search


def _newest_open(directories: Sequence[Path], is_ours: Callable[[FirstLine], bool]) -> Path | None:
    """Return the newest unanswered search whose first line is ours.

    None if there is none, or if a newer one was answered or failed after a try.
    Only journals whose first line is ours are read whole.
    """
    untried_search: Path | None = None
    for directory in reversed(directories):
        question_line = first_line(directory)
        # A newer version's lines may mean something else.
        if question_line.schema > SCHEMA or not is_ours(question_line):
            continue
        lines, _ = read_all(directory / JOURNAL_FILE, LineHead)
        end = next((line.state for line in reversed(lines) if line.kind in END_KINDS), None)
        is_open = end in (None, "cancelled")
        if end in ANSWERED_STATES or any(line.kind in TRY_KINDS for line in lines) or is_conducted(directory):
            return directory if is_open else untried_search
        if is_open and untried_search is None:
            untried_search = directory
    return untried_search


def first_line(directory: Path) -> FirstLine:
    """Return the first line of a search's journal; an empty kind and key if it is unreadable."""
    try:
        with os.fdopen(open_regular(directory / JOURNAL_FILE), "rb") as file:
            return msgspec.json.decode(file.readline(), type=FirstLine)
    except (OSError, *DAMAGE):
        return FirstLine()


def newest_search(home: Home, kind: str = BATCH_KIND) -> Path | None:
    """Return the newest live search of a kind, else the newest of this boot; None without either.

    A search that was cut short before it tried anything does not hide an older one. Raises as `search_directories`.
    """
    directories = newest_search_directories(home, SEARCHES_CHECKED_FOR_LIVE)
    searches = [directory for directory in directories if first_line(directory).kind == kind]
    live_search = next((directory for directory in searches if is_conducted(directory)), None)
    if live_search is not None or not searches:
        return live_search
    searches_of_boot = takewhile(_is_of_this_boot, searches)
    first_search = next(searches_of_boot, None)
    if first_search is None or not _is_cut_short(first_search):
        return first_search
    return next((directory for directory in searches_of_boot if not _is_cut_short(directory)), first_search)


def _is_of_this_boot(directory: Path) -> bool:
    conducted = newest_conducted(directory)
    return conducted is not None and conducted.boot_id == boot_id()


def _is_cut_short(directory: Path) -> bool:
    """True if a search tried nothing and has no end, or was cancelled."""
    lines, _ = read_all(directory / JOURNAL_FILE, LineHead)
    ends = [line.state for line in lines if line.kind in END_KINDS]
    return not any(line.kind in TRY_KINDS for line in lines) and all(state == "cancelled" for state in ends)


def new_search(home: Home, name: str) -> Path:
    """Make an empty search directory, its id made as a run's. Raises UserError when the home cannot be written."""
    directory = home.searches / new_id(time.strftime(STAMP_FORMAT, time.gmtime()), name, "search")
    try:
        make_private(directory.parent)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise home_error(home.path, error) from None
    return directory
