"""The wait before a run for devices in use, with progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.search_directories import conducted_search_of, has_journal
from trainfast_runner.running.busy_devices import wait_for_devices
from trainfast_runner.running.planning import RunPlan
from trainfast_tui.cli.printing.progress import Progress
from trainfast_tui.text.format import duration


def await_devices(plan: RunPlan, home: Home, on_poll: Callable[[], None] = lambda: None) -> int:
    """Wait until no other run or search uses the plan's devices; return the nanoseconds that this took.

    `on_poll` is called at each look, and may raise to end the wait.
    """
    progress, began_ns = Progress(), time.monotonic_ns()

    def show(run_file: RunFile, seconds: float) -> None:
        on_poll()
        search = conducted_search_of(home, run_file)
        waited_for = f"search {search.name}" if search is not None and has_journal(search) else run_file.run_id
        progress.show_activity(f"waiting for {waited_for} to end, {duration(seconds)} so far")

    try:
        wait_for_devices(plan, home, show)
    finally:
        progress.close()
    return time.monotonic_ns() - began_ns
