"""Live runs on the devices of a plan: refused, or waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import STAMP_CHARACTERS, Home
from trainfast_runner.records.run_directory import is_unfinished, read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.search_directories import conducted_search_of, may_start_a_run, search_directories
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.running.present_state import live_runs
from trainfast_runner.units import gpus_text

POLL_S = 0.5
"""Chosen, not measured: seconds between two looks at a run that is waited for."""


class DevicesBusy(UserError):
    """A live run of this home uses a device that was asked for; it can be waited for."""


def refuse_busy(plan: RunPlan, home: Home) -> None:
    """Raise DevicesBusy if a live run of this home uses one of the plan's devices."""
    busy = busy_with(plan, home)
    if busy is not None:
        search = f", a run of search {busy.search_id}" if busy.search_id is not None else ""
        raise DevicesBusy(
            f"{_busy_text(plan, busy)} in use by {busy.run_id}{search}",
            key="devices",
            option=f"trainfast-tui stop {busy.run_id}, or --wait",
        )


def busy_with(plan: RunPlan, home: Home) -> RunFile | None:
    """A live run of this home on one of the plan's devices; the CPU is one device."""
    return next((run for run in live_runs(home) if _shares_a_device(run, plan)), None)


def _shares_a_device(run: RunFile, plan: RunPlan) -> bool:
    return run.device == plan.device and (plan.device == "cpu" or bool(set(run.device_uuids) & set(plan.device_uuids)))


def wait_for_devices(plan: RunPlan, home: Home, on_wait: Callable[[RunFile, float], None]) -> None:
    """Return when no live run uses the plan's devices; `on_wait(run, seconds so far)` every POLL_S seconds.

    A run of a search counts until the search ends or is paused: the search starts one process after another.
    """
    began_s = time.monotonic()
    while (run := busy_with(plan, home) or _newest_run_of_live_search(plan, home)) is not None:
        search = conducted_search_of(home, run)
        # Poll only this run until it has ended: there may be thousands.
        while is_unfinished(home.directory(run.run_id)) or (search is not None and may_start_a_run(search)):
            on_wait(run, time.monotonic() - began_s)
            time.sleep(POLL_S)


def _newest_run_of_live_search(plan: RunPlan, home: Home) -> RunFile | None:
    """The newest run of a search that is between two processes on one of the plan's devices.

    None for the plan of a search: two searches would wait for each other.
    """
    if plan.search_id is not None:
        return None
    live_searches = {directory.name for directory in search_directories(home) if may_start_a_run(directory)}
    if not live_searches:
        return None
    # Ids begin with their time, and no run is older than its search.
    oldest_stamp = min(live_searches)[:STAMP_CHARACTERS]
    runs = (read_run_file(home.directory(run_id)) for run_id in reversed(home.run_ids()) if run_id >= oldest_stamp)
    return next(
        (run for run in runs if run is not None and run.search_id in live_searches and _shares_a_device(run, plan)),
        None,
    )


def _busy_text(plan: RunPlan, busy: RunFile) -> str:
    if plan.device == "cpu":
        return "the CPU is"
    shared_indexes = [gpu.index for gpu in plan.gpus if gpu.uuid in busy.device_uuids]
    return f"{gpus_text(shared_indexes)} {'is' if len(shared_indexes) == 1 else 'are'}"
