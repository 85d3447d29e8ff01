"""The records of a run directory, as far as they are readable: half-written, cut or damaged files included.

Memory is bounded: of more than `MAX_STEPS` steps or `MAX_SAMPLES` samples an even share is kept (`Thinned`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.records.capped_file import StepTail
from trainfast_runner.records.json_lines import Tail, Thinned, remaining_records
from trainfast_runner.records.result import Thinning
from trainfast_runner.records.run_directory import EVENTS_FILE, TELEMETRY_FILE, rank_files, read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Count, Event, Step, StepTotals
from trainfast_runner.records.tick import DeviceSample, HostSample, TelemetryTail
from trainfast_runner.records.worker_lines import WorkerLine, WorkerTail, read_knobs_tried
from trainfast_runner.worker.shared.words import CONTROL_FILE

T = TypeVar("T")

MAX_STEPS = 200_000
"""The most steps kept of all ranks together, about 160 MB: with one rank, every step under the cap of its file."""
MAX_SAMPLES = 80_000
"""The most samples kept of all devices and the host, about 160 MB in use: 11 hours with one GPU, two with 8."""


class _DeviceTick(msgspec.Struct, frozen=True, kw_only=True):
    t_ns: Count
    devices: list[DeviceSample] = []
    host: HostSample | None = None


@dataclass
class RunRecords:
    """One run's records. In a long run steps and samples are the share that `thinning` describes."""

    run: RunFile | None = None
    steps: dict[int, list[Step]] = field(default_factory=dict)
    """Steps by rank."""
    worker_lines: dict[int, list[WorkerLine]] = field(default_factory=dict)
    """Lines by rank."""
    device_samples: dict[str, list[tuple[int, DeviceSample]]] = field(default_factory=dict)
    """Samples by UUID, each after its time (CLOCK_MONOTONIC ns)."""
    host_samples: list[tuple[int, HostSample]] = field(default_factory=list)
    """Samples, each after its time (CLOCK_MONOTONIC ns)."""
    events: list[Event] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    """Knobs of each setting that a search's warm process tried; it ended at the last."""
    unreadable_lines: int = 0
    thinning: Thinning | None = None
    """None when all records are here."""
    totals_by_rank: dict[int, StepTotals] = field(default_factory=dict)
    highest_used_bytes: dict[str, int] = field(default_factory=dict)
    """The highest used memory of each device, in all samples."""

    @property
    def first_rank_steps(self) -> list[Step]:
        """The steps of the lowest rank; empty before the first one."""
        return self.steps[min(self.steps)] if self.steps else []

    def totals(self, rank: int) -> StepTotals:
        """Totals over all steps of a rank, including those left out."""
        return self.totals_by_rank.get(rank, StepTotals())

    def peak_used_bytes(self, uuids: Iterable[str]) -> int | None:
        """The highest used memory of any of these devices."""
        return highest(self.highest_used_bytes.get(uuid) for uuid in uuids)

    def last_t_ns(self) -> int | None:
        """The time of the last record, telemetry left out."""
        times = [steps[-1].t_ns for steps in self.steps.values() if steps]
        times += [lines[-1].t_ns for lines in self.worker_lines.values() if lines]
        times += [event.t_ns for event in self.events[-1:]]
        return max(times, default=None)


def read_records(directory: Path) -> RunRecords:
    """Every readable record of a run, of a long one a share; unreadable lines are counted, never raised."""
    records = RunRecords(run=read_run_file(directory))
    records.worker_lines = read_worker_lines(directory, records)
    records.events = read_events(directory, records)
    records.tried = read_knobs_tried(directory / CONTROL_FILE, records.run)
    steps = _read_steps(directory, records)
    ticks = _read_ticks(directory, records)
    first = records.totals(min(records.steps, default=0))
    if first.dropped or ticks.level or any(thinned.level for thinned in steps.values()):
        records.thinning = Thinning(
            steps_looked_at=len(records.first_rank_steps),
            steps_dropped=first.dropped,
            ticks=ticks.total,
            ticks_looked_at=len(records.host_samples),
        )
    return records


def read_events(directory: Path, records: RunRecords) -> list[Event]:
    """The supervisor's events; unreadable lines are counted in `records`."""
    return list(_readable_records(Tail(directory / EVENTS_FILE, Event), records))


def read_worker_lines(directory: Path, records: RunRecords | None = None) -> dict[int, list[WorkerLine]]:
    """The worker lines of each rank; unreadable lines are counted in `records`, if given."""
    counted = records or RunRecords()
    return {
        rank: list(_readable_records(WorkerTail(path), counted))
        for rank, path in rank_files(directory, "worker").items()
    }


def _read_steps(directory: Path, records: RunRecords) -> dict[int, Thinned[Step]]:
    files = rank_files(directory, "steps")
    steps_by_rank = {}
    for rank, path in files.items():
        tail = StepTail(path)
        totals = StepTotals()
        thinned = Thinned[Step](MAX_STEPS // len(files))
        for step in _readable_records(tail, records):
            totals.add(step)
            thinned.add(step.step, step)
        totals.dropped = totals.missing if tail.dropped_bytes else 0
        records.totals_by_rank[rank], steps_by_rank[rank] = totals, thinned
    # Rates are of steps that all ranks have.
    level = max((thinned.level for thinned in steps_by_rank.values()), default=0)
    for rank, thinned in steps_by_rank.items():
        thinned.thin_to(level)
        records.steps[rank] = thinned.records()
    return steps_by_rank


def _read_ticks(directory: Path, records: RunRecords) -> Thinned[_DeviceTick]:
    """Ticks are many: only the devices of this run are kept, and a run without devices keeps the host's alone."""
    uuids = {*records.run.watch_uuids, *records.run.device_uuids} if records.run else set()
    ticks = Thinned[_DeviceTick](MAX_SAMPLES // (len(uuids) + 1))
    used_peaks = records.highest_used_bytes
    for tick in _readable_records(TelemetryTail(directory / TELEMETRY_FILE, _DeviceTick), records):
        wanted_samples = [sample for sample in tick.devices if sample.uuid in uuids]
        for sample in wanted_samples:
            if sample.uuid is not None and sample.memory_used_bytes is not None:
                used_peaks[sample.uuid] = max(used_peaks.get(sample.uuid, 0), sample.memory_used_bytes)
        ticks.add(ticks.total, _DeviceTick(t_ns=tick.t_ns, devices=wanted_samples, host=tick.host))
    for tick in ticks.records():
        if tick.host is not None:
            records.host_samples.append((tick.t_ns, tick.host))
        for sample in tick.devices:
            if sample.uuid is not None:
                taken_ns = tick.t_ns if sample.t_ns is None else sample.t_ns
                records.device_samples.setdefault(sample.uuid, []).append((taken_ns, sample))
    return ticks


def _readable_records(tail: Tail[T], records: RunRecords) -> Iterator[T]:
    try:
        yield from remaining_records(tail)
    except OSError:
        records.unreadable_lines += 1
        return
    records.unreadable_lines += tail.unreadable
