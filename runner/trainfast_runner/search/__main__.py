"""`python -m trainfast_runner.search`: conduct one search in a process of its own, as the app starts it.

Reads an `Order` from stdin and prints one line: `{"search_dir": ...}` once it holds the search, or `{"error": ...}`.
SIGTERM cancels.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.running import planning
from trainfast_runner.search.conduct import conduct
from trainfast_runner.search.control import Order
from trainfast_runner.search.journal import AnyLine, Conducted
from trainfast_runner.search.opening import Options, check_plan, open_search
from trainfast_runner.settings.spec import of_record


def main() -> None:
    """Conduct one search to its end; exit code 0 whatever it found, 1 when it could not start."""
    cancelled: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: cancelled.append(signum))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    answered: list[bool] = []
    began_ns = time.monotonic_ns()

    def answer(value: object) -> None:
        if not answered:
            answered.append(True)
            sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
            sys.stdout.flush()
            # No more output: the starter may close its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    try:
        order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
        home = Home(Path(order.home))
        options = Options(fresh=order.fresh, cool_to_c=order.cool_to_c)
        plan = planning.plan_run(of_record(order), order.python)
        check_plan(plan, options)
        directory = open_search(plan, home, options)

        def on_line(line: AnyLine) -> None:
            if isinstance(line, Conducted):
                answer({"search_dir": str(directory)})

        conduct(
            directory, plan, home, options, on_line=on_line, is_cancelled=lambda: bool(cancelled), began_ns=began_ns
        )
    except UserError as problem:
        answer({"error": {"message": problem.line(), "key": problem.key, "exit_code": problem.exit_code}})
        sys.exit(1)


if __name__ == "__main__":
    main()
