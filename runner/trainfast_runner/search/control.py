"""Control a search from outside: start it as a process of its own, pause, resume and cancel it.

`python -m trainfast_runner.search.control` is that process. It reads a `SearchRequest` from stdin and prints one line:
`{"search_dir": ...}` once this or another process holds the search, or `{"error": ...}`. SIGTERM cancels.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import Identity, boot_id, reap_when_ended, send
from trainfast_runner.machine.training_python import whole_text
from trainfast_runner.records.capped_file import last_line
from trainfast_runner.records.home import PAUSE_FILE, Home, is_conducted
from trainfast_runner.records.run_file import RecordedSpec
from trainfast_runner.search.best_journal import BestRequest
from trainfast_runner.search.journal import Conducted, newest_conducted
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import RunSpec, spec_of_record

CONDUCTOR_MODULE = "trainfast_runner.search.control"
"""The module that conducts a search in a process of its own."""
ANSWERS_WITHIN_S = 60.0
"""Chosen, not measured: a conductor first asks the training Python about the model, which takes 10 s on a slow disk."""
LOG_FILE = "conductor.log"
"""In the search's directory: the conductor's stderr after its first answer; its starter reads what comes before."""


class SearchRequest(RecordedSpec, frozen=True, kw_only=True):
    """A request for a batch search, or with `best` for a best-fit search."""

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
    Raises the conductor's UserError, or one with the last line of its stderr if it does not answer in time.
    """
    request = SearchRequest(
        home=str(home.path), **spec.record_fields(), python=python, fresh=fresh, best=best, script=spec.script
    )
    # Files: a conductor that hangs reads no pipe, and one that has ended breaks it. In memory: a disk may be full.
    with os.fdopen(os.memfd_create("request"), "w+b") as asked, os.fdopen(os.memfd_create("errors"), "w+b") as errors:
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
            line = b"" if is_late else process.stdout.readline()
        try:
            answer = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            process.kill()
            problem = f"did not answer within {ANSWERS_WITHIN_S:g} s" if is_late else "ended before it answered"
            reason = last_line(whole_text(errors).splitlines())
            words = f"the search process {problem}{f': {reason}' if reason else ''}"
            raise UserError(words, key="search", exit_code=4) from None
    if "error" in answer:
        raise UserError(**answer["error"])
    return Path(answer["search_dir"])


def pause(directory: Path) -> None:
    """Pause the search after its current probe or trial."""
    (directory / PAUSE_FILE).touch(mode=0o600)


def resume(directory: Path) -> None:
    """Resume a paused search."""
    (directory / PAUSE_FILE).unlink(missing_ok=True)


def cancel(directory: Path) -> bool:
    """Ask the conductor to stop its run and end; the journal stays, and the same command continues it.

    Returns False without a conductor.
    """
    conductor = conductor_of(directory)
    return conductor is not None and send(conductor, signal.SIGTERM)


def conductor_of(directory: Path) -> Identity | None:
    """Return the process that conducts the search; None without one, or if its line is of another boot."""
    if not is_conducted(directory):
        return None
    line = newest_conducted(directory)
    return Identity(line.pid, line.start_ticks) if line is not None and line.boot_id == boot_id() else None


def main() -> None:
    """Conduct one search to its end; exit code 0 for any outcome, 1 after an error."""
    is_cancelled, began_ns = False, time.monotonic_ns()

    def cancel_search(_number: int, _frame: object) -> None:
        nonlocal is_cancelled
        is_cancelled = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, cancel_search)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def report_held(directory: Path) -> None:
        os.dup2(os.open(directory / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stderr.fileno())
        _answer({"search_dir": str(directory)})

    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchRequest)
        conduct_request(request, report_held, is_cancelled=lambda: is_cancelled, began_ns=began_ns)
    except UserError as error:
        _answer({"error": error.parts()})
        print(error.line(), file=sys.stderr)
        sys.exit(1)


def _answer(value: object) -> None:
    """Print the only answer: the starter may close its end, and a later answer goes nowhere."""
    with suppress(BrokenPipeError):  # the starter has gone, the search goes on
        os.write(1, msgspec.json.encode(value) + b"\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def conduct_request(
    request: SearchRequest, report_held: Callable[[Path], None], is_cancelled: Callable[[], bool], began_ns: int
) -> None:
    """Open and conduct the search of a request, unless another process does. Raises UserError.

    `report_held` is called once the lock of the search is held.
    """
    # Imported late: the app starts searches without them.
    from trainfast_runner.search.batch_conductor import BatchConductor, open_batch, plan_spec_batch
    from trainfast_runner.search.best.conductor import BestConductor
    from trainfast_runner.search.best.question import open_best, plan_spec_best
    from trainfast_runner.search.conductor import AlreadyConducted, SearchCaller, conduct
    from trainfast_runner.search.searches import SearchOptions

    home, spec = Home(Path(request.home)), replace(spec_of_record(request), script=request.script)
    options = SearchOptions(fresh=request.fresh)

    def on_line(line: object) -> None:
        if isinstance(line, Conducted):
            report_held(directory)

    caller = SearchCaller(on_line, is_cancelled, began_ns)
    try:
        if request.best is not None:
            best_plan = plan_spec_best(spec, request.best, request.python)
            directory = open_best(best_plan, home, options)
            conduct(BestConductor, directory, best_plan, home, options, caller)
        else:
            batch_plan = plan_spec_batch(spec, request.python)
            directory = open_batch(batch_plan, home, options)
            conduct(BatchConductor, directory, batch_plan, home, options, caller)
    except AlreadyConducted:
        report_held(directory)  # the starter follows it


if __name__ == "__main__":
    main()
