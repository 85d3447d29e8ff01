"""The window of a run that a diagnosis is about: measured steps, and the readings of devices and host meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trainfast_runner.known_values import mean_of_known
from trainfast_runner.records.run_file import ForeignProcess, RunFile
from trainfast_runner.records.run_lines import Event, Step
from trainfast_runner.records.run_records import HostSample, RunRecords
from trainfast_runner.records.tick import HostReading
from trainfast_runner.results.device_conditions import DeviceConditions, Reading, Window

T = TypeVar("T")

AVERAGED_NS = 1_000_000_000
"""The time that a reading may reach back: the driver averages utilization over 1/6 to 1 s (nvmlUtilization_t in
nvml.h) and power over a second."""


@dataclass(frozen=True)
class MeasuredWindow:
    """Measured steps of a run by rank, and the readings meanwhile: samples by UUID, oldest first.

    `averages` are the samples that reach back to no time before the steps; None when all samples do not.
    """

    run: RunFile
    steps: Mapping[int, Sequence[Step]]
    devices: Sequence[DeviceConditions] = ()
    samples: Mapping[str, Sequence[Reading]] = field(default_factory=dict)
    averages: Mapping[str, Sequence[Reading]] | None = None
    hosts: Sequence[HostSample | HostReading] = ()
    foreign: Sequence[ForeignProcess] = ()

    @property
    def first_rank(self) -> Sequence[Step]:
        """The steps of the lowest rank; empty without any."""
        return self.steps[min(self.steps)] if self.steps else ()

    def mean_ms(self, phase: str) -> float | None:
        """Mean time of a phase, or of the whole "step", in ms on the lowest rank; None if no step recorded it."""
        return mean_of_known(getattr(step, f"{phase}_ms") for step in self.first_rank)

    @property
    def working_ms(self) -> float | None:
        """The part of the median step that slow clocks or a shared CPU make longer: a wait for data is its own cause.

        A few very slow steps make the mean longer than the step that is shown, and no cause may cost more than that.
        """
        steps_ms = [step.step_ms - (step.data_ms or 0.0) for step in self.first_rank]
        return statistics.median(steps_ms) if steps_ms else None

    def averaged(self, uuid: str) -> Sequence[Reading]:
        """A device's samples whose utilization and power are the steps' alone; empty in a short window."""
        return (self.samples if self.averages is None else self.averages).get(uuid, ())


def measured_window_of(records: RunRecords, devices: Sequence[DeviceConditions], window: Window) -> MeasuredWindow:
    """The measured steps of ended records, in the window that `devices` describe. `records.run` must be known."""
    assert records.run is not None

    def within(samples: Iterable[tuple[int, T]], later_ns: int = 0) -> list[T]:
        return [sample for t_ns, sample in samples if window.begin_ns + later_ns <= t_ns <= window.end_ns]

    return MeasuredWindow(
        run=records.run,
        steps={
            rank: measured
            for rank, steps in records.steps.items()
            if (measured := [step for step in steps if not step.warmup])
        },
        devices=devices,
        samples={uuid: within(samples) for uuid, samples in records.device_samples.items()},
        averages={uuid: within(samples, AVERAGED_NS) for uuid, samples in records.device_samples.items()},
        hosts=within(records.host_samples) or _newest_before(records.host_samples, window.begin_ns),
        foreign=foreign_processes(records.run, records.events, window),
    )


def _newest_before(samples: Iterable[tuple[int, HostSample]], begin_ns: int) -> list[HostSample]:
    """The newest sample before steps too short to have one; it tells the run's share of the CPU from that of others."""
    shared = [host for t_ns, host in samples if t_ns < begin_ns and host.run and host.run.cpu_percent is not None]
    return shared[-1:]


def foreign_processes(run: RunFile, events: Iterable[Event], window: Window) -> list[ForeignProcess]:
    """Foreign processes that used the run's devices at some time in the window, each once."""
    by_identity: dict[tuple[int, int], ForeignProcess] = {}
    for process in run.foreign_processes:
        if process.device is not None and process.pid is not None:
            by_identity[process.device, process.pid] = process
    for event in events:
        if event.kind != "foreign_process" or event.pid is None or event.device is None:
            continue
        if event.state == "appeared" and event.t_ns <= window.end_ns:
            process = ForeignProcess(device=event.device, pid=event.pid, memory_used_bytes=event.memory_used_bytes)
            by_identity.setdefault((event.device, event.pid), process)
        # A process that left within the window still disturbed its first steps.
        elif event.state == "left" and event.t_ns < window.begin_ns:
            by_identity.pop((event.device, event.pid), None)
    return list(by_identity.values())
