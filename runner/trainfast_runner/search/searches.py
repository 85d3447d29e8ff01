"""The searches of a home: the one a command continues, the one a screen shows, and a new one's directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from trainfast_runner.machine.processes.identity import boot_id
from trainfast_runner.records.home import STAMP, STAMP_CHARACTERS, Home, home_error, new_id
from trainfast_runner.records.json_lines import DAMAGE, read_all
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.search_directories import (
    JOURNAL_FILE,
    is_conducted,
    newest_search_directories,
    search_directories,
)
from trainfast_runner.records.search_states import ANSWERED_STATES
from trainfast_runner.search.journal.batch import (
    BatchEnded,
    BatchLine,
    BatchQuestion,
    ConfirmationRun,
    Probe,
    read_batch_journal,
)
from trainfast_runner.search.journal.best import BestEnded, BestLine, BestQuestion, ColdRun, Trial
from trainfast_runner.search.journal.lines import newest_conducted

ReadJournal = Callable[[Path], Sequence[BatchLine | BestLine]]
"""Reads the journal of a search."""
BATCH_KIND, BEST_KIND = (str(question.__struct_config__.tag) for question in (BatchQuestion, BestQuestion))
"""Kinds of search, by the first line of their journals."""
TRY_LINES = (Probe, ConfirmationRun, Trial, ColdRun)
"""Lines of something that was tried."""
TRY_KINDS = [line.__struct_config__.tag for line in TRY_LINES]
END_KINDS = [line.__struct_config__.tag for line in (BatchEnded, BestEnded)]
"""Kinds of these lines, and of a search's last line."""
NEWEST_SEARCHES_READ = 20
"""Newest searches that are checked for a live one."""


class LineHead(msgspec.Struct, frozen=True):
    """The kind of a journal's line, and the state that an end has."""

    kind: str = ""
    state: str = ""


def unfinished(home: Home, key: str, read: ReadJournal = read_batch_journal) -> Path | None:
    """Return the newest unanswered search of this key; None if the newest one that tried anything has an answer.

    A search that ended before its first try is passed over. `read` reads one kind of journal; searches of the other
    kind are skipped. Raises as `search_directories`.
    """
    search = _newest_open(search_directories(home), lambda own_key: own_key == key, read)
    return None if search is None else search[0]


def search_before_edit(home: Home, directory: Path, read: ReadJournal = read_batch_journal) -> Path | None:
    """Return the unanswered search that asked this question before the script's files were edited; None without one.

    `read` and errors as for `unfinished`.
    """
    first = read(directory)[0]
    key = first.key if isinstance(first, BatchQuestion | BestQuestion) else ""
    question, dot, _ = key.partition(".")
    begun = directory.name[:STAMP_CHARACTERS]
    older = [path for path in search_directories(home) if path.name[:STAMP_CHARACTERS] <= begun and path != directory]
    search = _newest_open(older, lambda own_key: bool(dot) and own_key.partition(".")[0] == question, read)
    return None if search is None or search[1] == key else search[0]


def _newest_open(
    directories: Sequence[Path], is_ours: Callable[[str], bool], read: ReadJournal
) -> tuple[Path, str] | None:
    """Return the newest unanswered search whose key is ours, with its key.

    None if there is none or a newer one was answered.
    """
    empty: tuple[Path, str] | None = None
    for directory in reversed(directories):
        lines = read(directory)
        first = lines[0] if lines else None
        # A newer version's lines may mean something else.
        if isinstance(first, BatchQuestion | BestQuestion) and is_ours(first.key) and first.schema <= SCHEMA:
            ended = next((line for line in reversed(lines) if isinstance(line, BatchEnded | BestEnded)), None)
            search = (directory, first.key)
            is_open = ended is None or ended.state == "cancelled"
            is_answered = ended is not None and ended.state in ANSWERED_STATES
            if is_answered or any(isinstance(line, TRY_LINES) for line in lines) or is_conducted(directory):
                return search if is_open else empty
            if is_open and empty is None:
                empty = search
    return empty


def kind_of(directory: Path) -> str | None:
    """The kind of the search: BATCH_KIND or BEST_KIND; None when its first line is unreadable."""
    try:
        with (directory / JOURNAL_FILE).open("rb") as file:
            return msgspec.json.decode(file.readline(), type=LineHead).kind
    except (OSError, *DAMAGE):
        return None


def newest_search(home: Home, kind: str = BATCH_KIND) -> Path | None:
    """The newest live search of a kind, else the newest of this boot; None when there is neither.

    One that was cut short before it tried anything does not hide an older one. Raises UserError when they cannot be
    listed.
    """
    searches = [path for path in newest_search_directories(home, NEWEST_SEARCHES_READ) if kind_of(path) == kind]
    live = next((directory for directory in searches if is_conducted(directory)), None)
    if live is not None or not searches:
        return live
    here = takewhile(_is_of_this_boot, searches)
    first = next(here, None)
    if first is None or not _is_cut_short(first):
        return first
    return next((directory for directory in here if not _is_cut_short(directory)), first)


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
    directory = home.searches / new_id(time.strftime(STAMP, time.gmtime()), name, "search")
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise home_error(home.path, error) from None
    return directory
