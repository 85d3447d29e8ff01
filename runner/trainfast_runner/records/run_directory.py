"""One run's directory: the names of its files, its `run.json` and `result.json`, and whether the run has ended."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from trainfast_runner.records.file_locks import is_alive
from trainfast_runner.records.json_lines import DAMAGE, UNREADABLE, open_regular, owner_of, read_regular
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.warm_process import WARM_ROLES
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE

T = TypeVar("T")

RUN_FILE = "run.json"
RESULT_FILE = "result.json"
EVENTS_FILE = "events.jsonl"
TELEMETRY_FILE = "telemetry.jsonl"
LEAVING_S = 5.0
"""Time for a supervisor from `result.json` to its own end."""
POLL_S = 0.02
"""Chosen, not measured: seconds between two looks at its end."""


class _ProvisionalFlag(msgspec.Struct, frozen=True):
    provisional: bool = False


def rank_file(directory: Path, name: str, rank: int) -> Path:
    """`steps.jsonl` of rank 0, `steps.rank1.jsonl` of rank 1, and so on; `name` is steps or worker."""
    return directory / (f"{name}.jsonl" if rank == 0 else f"{name}.rank{rank}.jsonl")


def rank_files(directory: Path, name: str) -> dict[int, Path]:
    """The files of that name that exist, by rank in order."""
    pattern = re.compile(rf"{name}(?:\.rank(\d+))?\.jsonl")
    files = {}
    for path in directory.glob(f"{name}*.jsonl"):
        if match := pattern.fullmatch(path.name):
            files[int(match[1] or 0)] = path
    return dict(sorted(files.items()))


def read_run_file(directory: Path) -> RunFile | None:
    """`run.json`, or None when it is missing, damaged, or not this user's to read."""
    return _decoded_file(directory / RUN_FILE, RunFile)


def is_listed(directory: Path) -> bool:
    """True unless a search tried settings in the run, which its search shows, or it is unreadable."""
    run = read_run_file(directory)
    return unreadable_reason(directory) is None if run is None else run.role not in WARM_ROLES


def unreadable_reason(directory: Path) -> str | None:
    """The reason that a run's files cannot be read, with their owner; None if each can, or is missing."""
    for name in (RUN_FILE, RESULT_FILE, ALIVE_LOCK_FILE):
        try:
            os.close(open_regular(directory / name))
        except OSError as error:
            if error.errno in UNREADABLE:
                return f"{name} cannot be read: {error.strerror}; it belongs to {owner_of(directory / name)}"
    return None


def read_result(directory: Path) -> Result | None:
    """`result.json`, or None when the run has not ended, or the file is damaged or not this user's to read.

    Also None while the supervisor computes the figures of a provisional result.
    """
    result = read_written_result(directory)
    if result is None or not result.provisional:
        return result
    # The supervisor may have replaced it and ended since.
    return None if is_alive(directory) else read_written_result(directory)


def read_written_result(directory: Path) -> Result | None:
    """`result.json`, a provisional one included, or None when it is missing, damaged, or not this user's to read."""
    return _decoded_file(directory / RESULT_FILE, Result)


def is_unfinished(directory: Path) -> bool:
    """True while a process of the run is alive and its result, figures included, is not written."""
    return is_alive(directory) and unreadable_reason(directory) is None and not _has_whole_result(directory)


def is_alive_after_grace(directory: Path) -> bool:
    """True if the run is alive; a run with a result first gets the time that its supervisor needs to end."""
    deadline_s = time.monotonic() + LEAVING_S
    while is_alive(directory):
        if time.monotonic() > deadline_s or not (directory / RESULT_FILE).exists():
            return True
        time.sleep(POLL_S)
    return False


def _has_whole_result(directory: Path) -> bool:
    """False for a provisional `result.json`; True for an unreadable one, which a newer version may have written."""
    path = directory / RESULT_FILE
    head = _decoded_file(path, _ProvisionalFlag)
    return path.exists() if head is None else not head.provisional


def _decoded_file(path: Path, record: type[T]) -> T | None:
    try:
        return msgspec.json.decode(read_regular(path), type=record)
    except (FileNotFoundError, NotADirectoryError, *DAMAGE):
        return None
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise


EXIT_CODES = {
    "finished": 0,
    "oom": 3,
    "failed": 4,
    "stopped": 130,
    "killed": 4,
    "lost": 5,
    "failed_to_start": 4,
    "unreadable": 2,
}
END_STATES = frozenset(EXIT_CODES)
"""States of a run that is not followed: it has ended, or this user cannot read it."""
STATES = ("starting", "running", "stopping", *EXIT_CODES)
"""Every state, in the order in which they are listed."""
STATE_WORDS = {"oom": "out of memory", "failed_to_start": "failed to start"}
NO_STEP = "no optimizer step seen"
"""Begins the reason of a script's run that finished without a step."""


def exit_code_of(state: str) -> int:
    """Return the exit code of a command whose run ended in this state; that of "failed" for a newer version's state."""
    return EXIT_CODES.get(state, EXIT_CODES["failed"])


def state_text(state: str) -> str:
    """A state in words."""
    return STATE_WORDS.get(state, state.replace("_", " "))


def notable_reason(state: str, reason: str) -> str:
    """The reason to print beside a state; empty for a finished run, unless none of its steps was seen."""
    return reason if state != "finished" or reason.startswith(NO_STEP) else ""
