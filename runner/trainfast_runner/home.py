"""`$TRAINFAST_HOME`: where runs live, how one is named and found, and whether anything of it is still alive."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import platformdirs

from trainfast_runner.problem import Problem, nearest
from trainfast_runner.records import Result, RunFile

T = TypeVar("T")

RUN_FILE = "run.json"
RESULT_FILE = "result.json"
LOCK_FILE = "alive.lock"


def home_directory() -> Path:
    """`$TRAINFAST_HOME`, or `trainfast-tui` in the XDG state directory. Need not exist."""
    given = os.environ.get("TRAINFAST_HOME")
    return Path(given).expanduser().absolute() if given else Path(platformdirs.user_state_dir("trainfast-tui"))


def cache_directory() -> Path:
    """`trainfast-tui` in the XDG cache directory: tokenizers, tokenized text, facts about Pythons and models."""
    return Path(platformdirs.user_cache_dir("trainfast-tui"))


class Home:
    """The runs below one home directory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or home_directory()
        self.runs = self.path / "runs"

    def ready(self) -> Home:
        """Make the directories, mode 0700. Raises Problem when they cannot be used."""
        try:
            for directory in (self.path, self.runs):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.runs / f".probe-{os.getpid()}-{secrets.token_hex(2)}"
            probe.write_bytes(b"0" * 4096)
            probe.unlink()
        except OSError as error:
            raise home_problem(self.path, error) from None
        return self

    def run_ids(self) -> list[str]:
        """Ids of all runs, oldest first."""
        try:
            with os.scandir(self.runs) as entries:
                return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise home_problem(self.path, error) from None

    def directory(self, run_id: str) -> Path:
        """The directory of a run; need not exist."""
        return self.runs / run_id

    def find(self, reference: str) -> str:
        """The id behind an id, a unique prefix of one, or `last`. Raises Problem."""
        ids = self.run_ids()
        if reference == "last":
            if not ids:
                raise Problem("there is no run yet", key="last", advice="trainfast-tui run tiny-llama")
            return ids[-1]
        if reference in ids:
            return reference
        matching = [id for id in ids if id.startswith(reference)] if reference else []
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise Problem(f"{reference!r} fits {len(matching)} runs", key=reference, allowed=matching[-5:])
        raise Problem(
            f"there is no run {reference!r}",
            key=reference,
            nearest=nearest(reference, ids[-200:]),
            allowed=None if ids else ["no run yet"],
        )

    def new_run(self, slug: str) -> tuple[str, Path]:
        """A new, empty run directory. Raises Problem when the home cannot be written."""
        self.ready()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        word = re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-")[:40] or "run"
        while True:
            run_id = f"{stamp}-{word}-{secrets.token_hex(2)}"
            try:
                self.directory(run_id).mkdir(mode=0o700)
            except FileExistsError:
                continue
            except OSError as error:
                raise home_problem(self.path, error) from None
            return run_id, self.directory(run_id)

    def remove(self, run_id: str) -> None:
        """Delete a run's directory. Raises Problem while anything of it is alive."""
        directory = self.directory(run_id)
        if is_alive(directory):
            raise Problem(f"{run_id} is still running", key=run_id, advice=f"trainfast-tui stop {run_id}")
        shutil.rmtree(directory)


def home_problem(path: Path, error: OSError) -> Problem:
    """Why the home cannot be used and what to do, in one line."""
    cure = {
        errno.ENOSPC: "the disk is full: free some space",
        errno.EDQUOT: "the disk quota is used up: free some space",
        errno.EACCES: "no permission",
        errno.EROFS: "the file system is read-only",
        errno.ENOTDIR: "a part of this path is a file",
        errno.EEXIST: "a part of this path is a file",
    }.get(error.errno or 0, os.strerror(error.errno or 0))
    return Problem(f"cannot use {path}: {cure}; or set TRAINFAST_HOME to another directory", key="TRAINFAST_HOME")


@contextmanager
def shared_lock(directory: Path) -> Iterator[int]:
    """Hold the run's lock as one of those who keep it alive; gives the descriptor."""
    fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


def is_alive(directory: Path) -> bool:
    """Whether any process of the run still holds its lock."""
    try:
        fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read_run_file(directory: Path) -> RunFile | None:
    """`run.json`, or None when it is missing or unreadable."""
    return _read(directory / RUN_FILE, _run_decoder)


def read_result(directory: Path) -> Result | None:
    """`result.json`, or None when the run has not ended or the file is unreadable."""
    return _read(directory / RESULT_FILE, _result_decoder)


_run_decoder = msgspec.json.Decoder(RunFile)
_result_decoder = msgspec.json.Decoder(Result)


def _read(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    try:
        return decoder.decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
