"""`python -m trainfast_runner.search`: conduct one search in a process of its own, as the app starts it.

Reads a `SearchRequest` from stdin and prints one line: `{"search_dir": ...}` once this or another process holds the
search, or `{"error": ...}`. SIGTERM cancels.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.search.batch.conductor import conduct_batch
from trainfast_runner.search.batch.plan import open_batch, plan_spec_batch
from trainfast_runner.search.batch_journal import BatchLine
from trainfast_runner.search.best.conductor import conduct_best
from trainfast_runner.search.best.question import open_best, plan_spec_best
from trainfast_runner.search.best_journal import BestLine
from trainfast_runner.search.conductor import AlreadyConducted, SearchCaller
from trainfast_runner.search.control import SearchRequest
from trainfast_runner.search.journal import Conducted
from trainfast_runner.search.searches import BatchSearchOptions, SearchOptions
from trainfast_runner.settings.spec import spec_of_record

LOG_FILE = "conductor.log"
"""In the search's directory: the conductor's stderr after its first answer; its starter reads what comes before."""


def main() -> None:
    """Conduct one search to its end; exit code 0 for any outcome, 1 after an error."""
    is_cancelled = has_answered = False
    began_ns = time.monotonic_ns()

    def cancel(_number: int, _frame: object) -> None:
        nonlocal is_cancelled
        is_cancelled = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, cancel)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def answer(value: object) -> None:
        nonlocal has_answered
        if not has_answered:
            has_answered = True
            with suppress(BrokenPipeError):  # the starter has gone, the search goes on
                sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
                sys.stdout.flush()
            # No more output: the starter may close its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchRequest)

        def report_held(directory: Path) -> None:
            os.dup2(os.open(directory / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stderr.fileno())
            answer({"search_dir": str(directory)})

        conduct_request(request, report_held, is_cancelled=lambda: is_cancelled, began_ns=began_ns)
    except UserError as error:
        answer({"error": error.parts()})
        print(error.line(), file=sys.stderr)
        sys.exit(1)


def conduct_request(
    request: SearchRequest, report_held: Callable[[Path], None], is_cancelled: Callable[[], bool], began_ns: int
) -> None:
    """Open and conduct the search of a request, unless another process does. Raises UserError.

    `report_held` is called once the lock of the search is held.
    """
    home, spec = Home(Path(request.home)), replace(spec_of_record(request), script=request.script)

    def on_line(line: BatchLine | BestLine) -> None:
        if isinstance(line, Conducted):
            report_held(directory)

    try:
        if request.best is not None:
            best_options = SearchOptions(fresh=request.fresh)
            best_plan = plan_spec_best(spec, request.best, request.python)
            directory = open_best(best_plan, home, best_options)
            conduct_best(directory, best_plan, home, best_options, SearchCaller(on_line, is_cancelled, began_ns))
        else:
            options = BatchSearchOptions(fresh=request.fresh)
            batch_plan = plan_spec_batch(spec, request.python)
            directory = open_batch(batch_plan, home, options)
            conduct_batch(directory, batch_plan, home, options, SearchCaller(on_line, is_cancelled, began_ns))
    except AlreadyConducted:
        report_held(directory)  # the starter follows it


if __name__ == "__main__":
    main()
