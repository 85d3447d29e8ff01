"""Rows of a bench that one warm process trains in turn: they differ only in knobs that need no new process."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.search_directories import conductor_lock
from trainfast_runner.running import launch
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.bench.trial_result import trial_result
from trainfast_runner.search.bench.variants import Bench
from trainfast_runner.search.candidate_spec import takes_warm_trials
from trainfast_runner.search.conducting.run_ends import Cancelled, end_run, wait_for_result
from trainfast_runner.search.conducting.warm_process import WarmProcess
from trainfast_runner.search.searches import new_search
from trainfast_runner.settings.knob_type import whole_number
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.worker.shared.lock_files import OnWait
from trainfast_runner.worker.shared.search_roles import TRIAL

WARM_KNOBS = tuple(name for name, entry in KNOBS_BY_NAME.items() if entry.changes_in_warm_process)
"""The knobs by which the rows of one process may differ."""


def warm_groups(bench: Bench) -> dict[str, str]:
    """Return the group of each row that can share a process with another, by row id; the other rows are cold."""
    keys = {row.id: key for row in bench.rows if (key := _process_key(row.spec)) is not None}
    rows = Counter(keys.values())
    return {id: key for id, key in keys.items() if rows[key] > 1}


def _process_key(spec: RunSpec) -> str | None:
    """Everything about a row that only a new process can change; None if the row needs a process of its own."""
    knobs = spec.knobs
    # Under a limit memory is measured in every step, and the speed is marked.
    if not takes_warm_trials(knobs) or knobs["memory_limit"] is not None:
        return None
    process_knobs = {name: value for name, value in knobs.items() if KNOBS_BY_NAME[name].needs_process(value)}
    return msgspec.json.encode((spec.model, spec.data, process_knobs), order="deterministic").decode()


class WarmRows:
    """The warm process of one group of rows; call `end` before the process of another group starts.

    `raise_if_cancelled` is called while a row trains and may raise Cancelled.
    """

    def __init__(self, home: Home, locks: ExitStack, raise_if_cancelled: Callable[[], None]) -> None:
        self._home, self._locks, self._raise_if_cancelled = home, locks, raise_if_cancelled
        self._search_id: str | None = None
        self._process: WarmProcess | None = None
        self._group = ""

    def has_process(self, group: str) -> bool:
        """True if rows of this group need no new process now."""
        return self._process is not None and self._group == group

    def start(self, plan: RunPlan, group: str, on_wait: OnWait) -> None:
        """Start the process of a group by the plan of its first row; `on_wait` as for `launch.start`.

        Raises UserError, as when a device is busy.
        """
        if self._search_id is None:
            search = new_search(self._home, plan.spec.preset)
            self._locks.callback(shutil.rmtree, search, ignore_errors=True)
            self._locks.enter_context(conductor_lock(search))
            self._search_id = search.name
        planned = dataclasses.replace(plan, role=TRIAL, search_id=self._search_id)
        directory = launch.start(planned, self._home, on_wait)
        self._process, self._group = WarmProcess(directory, plan.world_size, self._raise_if_cancelled), group

    def train(self, plan: RunPlan) -> Result:
        """Train a row of the group as long as a run would, and return its result; the process may end with it."""
        process = self._process
        assert process is not None
        knobs = plan.spec.knobs
        untimed, steps = whole_number(knobs, "timing_warmup"), whole_number(knobs, "steps")
        replies = None
        try:
            if process.ready() is not None:
                replies = process.trial({name: knobs[name] for name in WARM_KNOBS}, untimed, steps - untimed)
            if replies is not None and not process.ended_by_error:
                return trial_result(process.directory, knobs, replies)
            result = process.wait_for_end()
        except Cancelled:
            end_run(process.directory)
            result = wait_for_result(process.directory, lambda: None)
            process.close()
        self._process = None
        return msgspec.structs.replace(result, knobs=knobs)

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is None:
            return
        try:
            self._process.end()
        except Cancelled:
            end_run(self._process.directory)
            self._process.close()
        self._process = None


@contextmanager
def open_warm_rows(home: Home, raise_if_cancelled: Callable[[], None]) -> Iterator[WarmRows]:
    """Yield warm rows, whose processes end at the latest with this one: they watch the lock of a search."""
    with ExitStack() as locks:
        rows = WarmRows(home, locks, raise_if_cancelled)
        try:
            yield rows
        finally:
            rows.end()
