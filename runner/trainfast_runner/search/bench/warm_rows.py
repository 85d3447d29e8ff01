"""Rows of a bench that one warm process trains in turn: they differ only in knobs that need no new process."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.records.home import Home, conductor_lock
from trainfast_runner.records.result import Result, RunError
from trainfast_runner.records.run_lines import Step, StepTotals
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.worker_lines import TrialLine
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict, first_difference
from trainfast_runner.running import launch
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.bench.rows import Bench
from trainfast_runner.search.conductor import Cancelled, WarmProcess, end_run, wait_for_result
from trainfast_runner.search.searches import new_search, takes_warm_trials
from trainfast_runner.settings.knob_values import whole_number
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.worker.shared.host import OnWait
from trainfast_runner.worker.shared.words import TRIAL

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


def trial_result(directory: Path, knobs: Mapping[str, Any], answers: Mapping[int, TrialLine]) -> Result:
    """Summarise the process's last trial, which had these knobs and got these answers by rank.

    Of a step's phases a trial records the wait for data; the others are None, as is every figure without a reading in
    its time.
    """
    records = read_records(directory)
    began_ns = min(line.t_ns - round(1e9 * (line.seconds or 0.0)) for line in answers.values())
    ended_ns = max(line.t_ns for line in answers.values())
    steps = {rank: list(_steps(line)) for rank, line in answers.items()}
    run = records.run and msgspec.structs.replace(records.run, knobs=dict(knobs))
    trial_records = dataclasses.replace(
        records,
        run=run,
        steps=steps,
        totals_by_rank={rank: _totals(rank_steps) for rank, rank_steps in steps.items()},
        tried=[],
        thinning=None,
    )
    result = summarise(directory, trial_records, _verdict(trial_records, answers), None)
    # The process's peak may be another trial's.
    peak_bytes = _used_bytes(records, began_ns, ended_ns)
    memory = msgspec.structs.replace(result.memory, device_peak_used_bytes=peak_bytes)
    return msgspec.structs.replace(result, memory=memory, seconds=(ended_ns - began_ns) / 1e9)


def _verdict(trial_records: RunRecords, answers: Mapping[int, TrialLine]) -> Verdict:
    """Finished, or failed with a loss that is not finite or with settings that did not run."""
    bad = next((line for line in answers.values() if line.outcome != "measured"), None)
    if bad is not None:
        return Verdict("failed", bad.message or "")
    # `run.json` has the settings of the process's first trial; these records have the last trial's.
    expected_run = trial_records.run and msgspec.structs.replace(trial_records.run, role=None)
    if difference := first_difference(expected_run, trial_records.worker_lines):
        return Verdict("failed", difference, RunError(type="NotWhatWasAsked", message=difference))
    return Verdict("finished", "")


def _steps(line: TrialLine) -> Iterator[Step]:
    """Yield a rank's steps, the untimed ones as warm-up; the last one ended with the answer."""
    times = [*line.untimed_ms, *line.step_ms]
    untimed = [None] * len(line.untimed_ms)
    losses = [*untimed, *line.losses]
    waits = [*untimed, *(line.data_ms or [None] * len(line.step_ms))]
    left_ms = sum(times)
    steps = zip(times, accumulate(times), losses, waits, strict=True)
    for number, (step_ms, done_ms, loss, data_ms) in enumerate(steps, start=1):
        is_warmup = number <= len(line.untimed_ms)
        yield Step(
            t_ns=line.t_ns - round(1e6 * (left_ms - done_ms)),
            step=number,
            warmup=is_warmup,
            samples=line.samples or 0,
            tokens=line.tokens,
            loss=loss,
            loss_not_finite=loss is None and not is_warmup,
            step_ms=step_ms,
            data_ms=data_ms,
            # The peak over all steps, whichever of them reached it.
            peak_allocated_bytes=line.peak_allocated_bytes,
            peak_reserved_bytes=line.peak_reserved_bytes,
        )


def _totals(steps: list[Step]) -> StepTotals:
    totals = StepTotals()
    for step in steps:
        totals.add(step)
    return totals


def _used_bytes(records: RunRecords, began_ns: int, ended_ns: int) -> int | None:
    """The highest used memory of the run's GPUs in that time; None when none was read."""
    uuids = records.run.device_uuids if records.run else []
    return highest(
        sample.memory_used_bytes
        for uuid in uuids
        for t_ns, sample in records.device_samples.get(uuid, ())
        if began_ns <= t_ns <= ended_ns
    )
