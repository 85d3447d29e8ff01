"""Control a search from outside: start it as a process of its own, pause, resume and cancel it."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import Identity, boot_id, reap_when_ended, send
from trainfast_runner.machine.training_python import open_temporary_file, whole_text
from trainfast_runner.records.capped_file import last_line
from trainfast_runner.records.home import PAUSE_FILE, Home, is_conducted
from trainfast_runner.records.run_file import RecordedSpec
from trainfast_runner.search.best.question import BestRequest
from trainfast_runner.search.journal import newest_conducted
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import RunSpec

CONDUCTOR_MODULE = "trainfast_runner.search"
"""The module that conducts a search in a process of its own."""
ANSWERS_WITHIN_S = 60.0
"""Chosen, not measured: a conductor first asks the training Python about the model, which takes 10 s on a slow disk."""
END_POLL_S = 0.02
"""Seconds between checks that the conductor has ended."""


class SearchRequest(RecordedSpec, frozen=True, kw_only=True):
    """The stdin of `python -m trainfast_runner.search`: a request for a batch search, or with `best` a best-fit one."""

    home: str
    python: str | None = None
    fresh: bool = False
    best: BestRequest | None = None
    script: ScriptPreset | None = None
    """The user's own script in place of model and data."""


def start_search(
    spec: RunSpec, home: Home, python: str | None = None, *, fresh: bool = False, best: BestRequest | None = None
) -> Path:
    """Start, or continue, the batch search of `spec`, or the best-fit search that `best` asks for.

    The conductor has a session of its own and outlives the caller. Returns the search's directory once the conductor or
    another process holds the search: after some seconds, in which the spec is checked against the training Python.
    Raises the conductor's UserError.
    """
    request = SearchRequest(
        home=str(home.path), **spec.record_fields(), python=python, fresh=fresh, best=best, script=spec.script
    )
    answer = _conduct(request)
    if "error" in answer:
        raise UserError(**answer["error"])
    return Path(answer["search_dir"])


def _conduct(request: SearchRequest) -> dict[str, Any]:
    """Start a conductor; return its one line of output: its directory or its error.

    Raises UserError, with the last line of its stderr, if there is no such line within `ANSWERS_WITHIN_S`.
    """
    # Files: a conductor that hangs reads no pipe, and one that has ended breaks it.
    with open_temporary_file() as asked, open_temporary_file() as errors:
        asked.write(msgspec.json.encode(request))
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", CONDUCTOR_MODULE],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        reap_when_ended(process)
        assert process.stdout is not None
        with process.stdout:
            is_late = not select.select([process.stdout], [], [], ANSWERS_WITHIN_S)[0]
            answer = b"" if is_late else process.stdout.readline()
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.DecodeError:
            process.kill()
            problem = f"did not answer within {ANSWERS_WITHIN_S:g} s" if is_late else "ended before it answered"
            reason = last_line(whole_text(errors).splitlines())
            words = f"the search process {problem}{f': {reason}' if reason else ''}"
            raise UserError(words, key="search", exit_code=4) from None


def pause(directory: Path) -> None:
    """Pause the search after its current probe or trial."""
    (directory / PAUSE_FILE).touch(mode=0o600)


def resume(directory: Path) -> None:
    """Resume a paused search."""
    (directory / PAUSE_FILE).unlink(missing_ok=True)


def cancel(directory: Path, timeout_s: float = 0.0) -> bool:
    """Ask the conductor to stop its run and end; the journal stays, and the same command continues it.

    Returns False without a conductor. Waits at most `timeout_s` for the conductor to end.
    """
    conductor = conductor_of(directory)
    was_asked = conductor is not None and send(conductor, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while is_conducted(directory) and time.monotonic() < deadline:
        time.sleep(END_POLL_S)
    return was_asked


def conductor_of(directory: Path) -> Identity | None:
    """Return the process that conducts the search; None without one, or if its line is of another boot."""
    if not is_conducted(directory):
        return None
    line = newest_conducted(directory)
    return Identity(line.pid, line.start_ticks) if line is not None and line.boot_id == boot_id() else None
