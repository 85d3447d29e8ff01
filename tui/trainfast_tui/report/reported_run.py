"""A run with all its records, read once for a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trainfast_runner.records.json_lines import remaining_records
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import TELEMETRY_FILE
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import RunRecords, read_records
from trainfast_runner.records.telemetry_lines import TelemetryTail
from trainfast_runner.records.thinned import Thinned
from trainfast_runner.records.tick import Tick
from trainfast_runner.running.follower import Follower, RunSnapshot
from trainfast_runner.running.rates import Rates, SummedRates
from trainfast_runner.settings.device_counts import ranks_with_samples

MAX_TICKS = 20_000
"""The most samples in a chart, five hours of one a second: a picture is 300 columns wide."""


@dataclass(frozen=True)
class ReportedRun:
    """A run that has ended, as a report shows it; `label` names it in tables."""

    label: str
    directory: Path
    result: Result
    records: RunRecords
    snapshot: RunSnapshot

    @property
    def run_file(self) -> RunFile | None:
        """`run.json`; None if it cannot be read."""
        return self.snapshot.run_file

    @property
    def origin_ns(self) -> int:
        """CLOCK_MONOTONIC at which the run was started, or of its first record if that is unknown."""
        if self.run_file is not None:
            return self.run_file.clock.monotonic_ns
        return min((series[0].t_ns for series in (self.snapshot.ticks, self.snapshot.steps) if series), default=0)


def read_run(label: str, directory: Path, result: Result) -> ReportedRun:
    """Read the whole run: unlike a screen, a report shows more than the newest steps and samples."""
    records = read_records(directory)
    snapshot = Follower(directory).poll()
    whole_snapshot = replace(snapshot, run_file=records.run, ticks=_ticks(directory), rates=_rates(records))
    return ReportedRun(label, directory, result, records, whole_snapshot)


def _ticks(directory: Path) -> tuple[Tick, ...]:
    """Return the machine's samples, thinned evenly for a long run; empty if the file cannot be read."""
    thinned = Thinned[Tick](MAX_TICKS)
    try:
        for tick in remaining_records(TelemetryTail(directory / TELEMETRY_FILE, Tick)):
            thinned.add(thinned.total, tick)
    except OSError:
        return ()
    return tuple(thinned.records())


def _rates(records: RunRecords) -> Rates:
    """Return the throughput of each step that all data-parallel ranks wrote, summed over them."""
    ranks = 1 if records.run is None else ranks_with_samples(records.run)
    summed = SummedRates(keep=None)
    for rank, steps in records.steps.items():
        summed.add(rank, steps, ranks)
    return summed.rates()
