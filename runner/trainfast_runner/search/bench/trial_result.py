"""The result of one trial of a warm process: its records are read as if it were a run of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.known_values import highest
from trainfast_runner.records.result import Result, RunError
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.step_totals import StepTotals
from trainfast_runner.records.warm_process import TrialLine
from trainfast_runner.results.asked_and_ran import first_difference
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict


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
