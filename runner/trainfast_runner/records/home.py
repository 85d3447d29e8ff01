"""`$TRAINFAST_HOME`: the directories of runs and searches, and their names."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import platformdirs

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records import run_directory
from trainfast_runner.records.json_lines import text_of, write_atomically
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.worker.shared.host import SEARCH_LOCK_FILE, OnWait, make_private

LAUNCH_LOCK_FILE = "launch.lock"
STAMP_FORMAT = "%Y%m%d-%H%M%S"
STAMP_CHARACTERS = len("20261121-054455")
"""Length of the timestamp at the start of an id; the rest of an id does not sort."""
ID_PATTERN = re.compile(r"\d{8}-\d{6}-[a-z0-9-]+-[0-9a-f]{4}")
"""The ids that `new_id` makes."""
MAX_NAME_CHARACTERS = 40
"""Chosen, not measured: the most characters of a preset's name in an id."""
MATCHES_SHOWN, IDS_COMPARED = 5, 200
"""The newest ids that an error lists for a prefix of several, and those among which it looks for the nearest."""
LAUNCHES_FILE = "launches"
"""The ids of all runs in the order of their launches, one a line: the number of a launch is that of its line."""


def new_id(stamp: str, name: str, fallback: str) -> str:
    """An id from the time and `name`, or `fallback` when no character of `name` is allowed in an id."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME_CHARACTERS] or fallback
    return f"{stamp}-{word}-{os.urandom(2).hex()}"


def home_directory() -> Path:
    """`$TRAINFAST_HOME`, or `trainfast-tui` in the XDG state directory. Need not exist.

    Raises UserError for a user without a home directory, and for a name that is not UTF-8.
    """
    configured = os.environ.get("TRAINFAST_HOME")
    expanded = os.path.expanduser(configured or _own_directory(platformdirs.user_state_dir) or "~")
    # "~" is left of a user without an entry in the password file, as containers have them, and without HOME.
    fault = f"there is no home directory for {expanded.partition('/')[0]}" if expanded.startswith("~") else None
    path = expanded
    try:
        path = os.path.abspath(expanded)
        path.encode()
    except FileNotFoundError:
        fault = f"{expanded} starts in the current directory, which has been deleted"
    except UnicodeEncodeError:
        fault = f"{os.fsencode(expanded)!r} is not UTF-8"
    if fault is not None:
        raise UserError(f"{fault}: set TRAINFAST_HOME to a directory you can write", key="TRAINFAST_HOME")
    return Path(path)


def cache_directory() -> Path:
    """`trainfast-tui` in the XDG cache directory: tokenizers, tokenized text, facts about Pythons and models.

    `cache` in the home for a user who has no directory of their own.
    """
    return Path(_own_directory(platformdirs.user_cache_dir) or home_directory() / "cache")


def config_directory() -> Path:
    """`trainfast-tui` in the XDG configuration directory: the user's own presets.

    `config` in the home for a user who has no directory of their own.
    """
    return Path(_own_directory(platformdirs.user_config_dir) or home_directory() / "config")


def _own_directory(path_of: Callable[[str], str]) -> str | None:
    """Return the product's XDG directory; None for a user without HOME and without an entry in the password file."""
    try:
        path = path_of("trainfast-tui")
    except RuntimeError:  # platformdirs 4.14; before, it returned "~/…"
        return None
    return None if path.startswith("~") else path


class Home:
    """The runs and searches below one home directory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or home_directory()
        self.runs = self.path / "runs"
        self.searches = self.path / "searches"

    @classmethod
    def of_run(cls, directory: Path) -> Home:
        """The home that a run's directory is in."""
        return cls(directory.parent.parent)

    def create(self) -> Home:
        """Make the directories, mode 0700. Raises UserError when they cannot be used."""
        try:
            for directory in (self.path, self.runs):
                make_private(directory)
            probe = self.runs / f".probe-{os.getpid()}-{os.urandom(2).hex()}"
            probe.write_bytes(b"0" * 4096)
            probe.unlink()
        except OSError as error:
            raise home_error(self.path, error) from None
        return self

    def newest_run_ids(self, count: int) -> list[str]:
        """Ids of the newest runs, the newest first."""
        return self.run_ids()[::-1][:count]

    def run_ids(self) -> list[str]:
        """Ids of all runs in the order of their launches: the folders named by an id, as TensorBoard too writes there.

        Runs without a launch number, as copied ones, come first, in the order of their ids.
        """
        try:
            with os.scandir(self.runs) as entries:
                ids = [entry.name for entry in entries if ID_PATTERN.fullmatch(entry.name) and _is_folder(entry)]
            numbers = self.launch_numbers()
            return sorted(ids, key=lambda run_id: (numbers.get(run_id, 0), run_id))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise home_error(self.path, error) from None

    def runs_of(self, search_ids: Collection[str]) -> Iterator[RunFile]:
        """Yield the runs of these searches, newest first; ids begin with their time, and no run is older."""
        oldest = min(search_ids, default="")[:STAMP_CHARACTERS]
        for run_id in reversed(self.run_ids()) if search_ids else ():
            run = run_directory.read_run_file(self.directory(run_id)) if run_id >= oldest else None
            if run is not None and run.search_id in search_ids:
                yield run

    def launch_numbers(self) -> dict[str, int]:
        """The number of each launch of this home by the run's id; also of deleted runs."""
        return {run_id: number for number, run_id in enumerate(self._launched_ids(), 1)}

    def live_directories(self) -> Iterator[Path]:
        """Yield the directories of live runs, newest first."""
        return filter(run_directory.is_unfinished, map(self.directory, reversed(self.run_ids())))

    def directory(self, run_id: str) -> Path:
        """The directory of a run; need not exist."""
        return self.runs / run_id

    def search_directory(self, search_id: str) -> Path:
        """The directory of a search; need not exist."""
        return self.searches / search_id

    def find(self, reference: str, searches: Sequence[str] = ()) -> str:
        """Return the id of a run by its id, a unique prefix of one, its launch number, or `last`.

        `last` is the run that was launched last, of those that are listed.

        The ids of `searches` are looked through too. Raises UserError.
        """
        runs = self.run_ids()
        if reference == "last":
            listed = (run_id for run_id in reversed(runs) if run_directory.is_listed(self.directory(run_id)))
            newest = next(listed, None)
            if newest is None:
                raise UserError("there is no run yet", key="last", advice="trainfast-tui run tiny-llama")
            return newest
        ids = [*searches, *runs]
        numbers = self.launch_numbers() if reference.isdecimal() else {}
        number = reference.lstrip("0")  # as text: Python converts no number of thousands of digits
        matching_ids = (
            [run_id for run_id in ids if run_id == reference]
            or [run_id for run_id in runs if run_id in numbers and str(numbers[run_id]) == number]
            or [run_id for run_id in ids if reference and run_id.startswith(reference)]
        )
        if len(matching_ids) == 1:
            return matching_ids[0]
        if matching_ids:
            message = f"{reference!r} matches {len(matching_ids)} {'runs and searches' if searches else 'runs'}"
            raise UserError(message, key=reference, allowed=matching_ids[-MATCHES_SHOWN:])
        if not ids:
            message = f"there is no run {reference!r}: no runs yet"
            raise UserError(message, key=reference, advice="trainfast-tui run tiny-llama")
        containing_ids = (run_id for run_id in reversed(ids) if reference and reference in run_id)
        raise UserError(
            f"there is no {'run or search' if searches else 'run'} {reference!r}",
            key=reference,
            nearest=next(containing_ids, None)
            or nearest(reference, [*searches[-IDS_COMPARED:], *runs[-IDS_COMPARED:]]),
            advice="trainfast-tui runs list",
        )

    def new_run(self, slug: str) -> tuple[str, Path]:
        """A new, empty run directory. Raises UserError when the home cannot be written."""
        self.create()
        stamp = time.strftime(STAMP_FORMAT, time.gmtime())  # UTC, in which no hour comes twice
        while True:
            run_id = new_id(stamp, slug, "run")
            try:
                self.directory(run_id).mkdir(mode=0o700)
            except FileExistsError:
                continue
            except OSError as error:
                raise home_error(self.path, error) from None
            return run_id, self.directory(run_id)

    def number_launch(self, run_id: str) -> int:
        """Note a launch and return its number; the caller holds the launch lock. Raises OSError."""
        lines = self._launched_ids()
        if not lines:
            # Lost, or never there: the records have the numbers of the runs that are left.
            runs = filter(None, map(run_directory.read_run_file, map(self.directory, self.run_ids())))
            numbers = {run.number: run.run_id for run in runs if run.number}
            lines = [numbers.get(number, "") for number in range(1, max(numbers, default=0) + 1)]
        lines.append(run_id)
        write_atomically(self.path / LAUNCHES_FILE, "".join(f"{line}\n" for line in lines).encode())
        return len(lines)

    def _launched_ids(self) -> list[str]:
        path = self.path / LAUNCHES_FILE
        return text_of(path).splitlines() if path.is_file() else []

    def launching(self, on_wait: OnWait) -> AbstractContextManager[int]:
        """Hold the launch lock: a device that is free within stays free for this launch."""
        path = self.path / LAUNCH_LOCK_FILE
        if path.exists() and not os.access(path, os.W_OK):
            path.unlink()  # another user's, as after a launch with sudo
        return run_directory.locked(path, on_wait=on_wait)

    def remove(self, run_id: str) -> None:
        """Delete a run's directory. Raises UserError while a process of the run is alive."""
        directory = self.directory(run_id)
        if run_directory.is_alive_after_grace(directory):
            raise UserError(f"{run_id} is still running", key=run_id, advice=f"trainfast-tui stop {run_id}")
        shutil.rmtree(directory)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def home_error(path: Path, error: OSError) -> UserError:
    """The reason that the home cannot be used, with the cure, in one line."""
    reason, cure = reason_of(error), "set TRAINFAST_HOME to another directory"
    joined = f"{reason}, or {cure}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"{reason}; {cure}"
    return UserError(f"cannot use {path}: {joined}", key="TRAINFAST_HOME")


def reason_of(error: OSError) -> str:
    """The reason that a directory cannot be used, in a few words."""
    return {
        errno.ENOSPC: "the disk is full: free some space",
        errno.EDQUOT: "the disk quota is used up: free some space",
        errno.EACCES: "no permission",
        errno.EROFS: "the file system is read-only",
        errno.ENOTDIR: "a part of this path is a file",
        errno.EEXIST: "a part of this path is a file",
    }.get(error.errno or 0, os.strerror(error.errno or 0))


JOURNAL_FILE = "journal.jsonl"
PAUSE_FILE = "paused"
"""File during whose existence the conductor takes no further step."""


def search_directories(home: Home) -> list[Path]:
    """Every search of a home, oldest first: the folders named by an id, with a journal; empty if another user's.

    Raises UserError when they cannot be listed for another reason. `new_search` refuses another user's folder.
    """
    try:
        with os.scandir(home.searches) as entries:
            ids = [entry.name for entry in entries if ID_PATTERN.fullmatch(entry.name)]
    except (FileNotFoundError, PermissionError):
        return []
    except OSError as error:
        raise home_error(home.path, error) from None
    return [directory for search_id in sorted(ids) if has_journal(directory := home.search_directory(search_id))]


def conductor_lock(directory: Path) -> AbstractContextManager[bool]:
    """Hold the search's lock as its one conductor; False while another conductor holds it."""
    return run_directory.exclusive_lock(directory / SEARCH_LOCK_FILE, create=True)


def is_conducted(directory: Path) -> bool:
    """True if a conductor works on this search now."""
    try:
        return run_directory.is_locked(directory / SEARCH_LOCK_FILE, fcntl.LOCK_SH)
    except OSError:
        return False


def conducted_search_of(home: Home, run: RunFile) -> Path | None:
    """The directory of the search that started the run, while a conductor works on it; None for any other run.

    `bench` holds such a lock too, in a directory without a journal (`has_journal`).
    """
    directory = None if run.search_id is None else home.search_directory(run.search_id)
    return directory if directory is not None and is_conducted(directory) else None


def has_journal(directory: Path) -> bool:
    """True for the directory of a search, False for that of a bench."""
    return os.path.exists(directory / JOURNAL_FILE)  # False for another user's folder, where `Path.exists` raises


def may_start_a_run(directory: Path) -> bool:
    """True if a conductor works on this search and is not paused: its next process may start at any time."""
    return is_conducted(directory) and not (directory / PAUSE_FILE).exists()


LIVE_STATES = ("starting", "running", "pausing", "paused")
"""States in which a conductor works on the search; `pausing` finishes its step first."""
PAUSE_STATES = ("pausing", "paused")
UNFINISHED_STATES = ("interrupted", "cancelled")
"""States from which a search can be resumed; `interrupted` has neither a conductor nor an end."""
ANSWERED_STATES = ("answered", "nothing_fits")
"""States of a search with an answer about its knobs; one that `failed` has none."""
