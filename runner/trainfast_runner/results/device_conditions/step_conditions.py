"""The devices' conditions in each step: throttled time by cause, clocks, energy, temperature.

Steps and device samples share CLOCK_MONOTONIC. Nothing is stored: the live view, `runs show --steps` and the summary
feed the same `StepJoin` from the same two files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

import msgspec

from trainfast_runner.known_values import highest
from trainfast_runner.machine.telemetry.throttle import CAUSES, SOURCES
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.run_records import DeviceSample
from trainfast_runner.results.device_conditions.device_track import DeviceConditions, DeviceTrack
from trainfast_runner.results.device_conditions.distrusted_counters import distrusted_counters
from trainfast_runner.results.device_conditions.readings import Reading


class StepConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The watched devices' conditions in one step.

    Throttling and clock loss are the worst device's, energy the sum, temperature the hottest at the step's start.
    """

    step: int
    t_ns: int
    throttled_ms: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    clock_loss_fraction: float | None = None
    energy_joules: float | None = None
    joules_per_sample: float | None = None
    temperature_c: float | None = None
    devices: tuple[DeviceConditions, ...] = ()


class StepJoin:
    """Joins steps to the samples of some devices as both come in. Feed samples in the order of their time.

    `samples_factor` turns the samples of one rank's step into the whole run's: it is the data-parallel degree. `keep`
    bounds how many samples of a device stay in memory, `keep_steps` how many steps wait; None keeps all. `distrusted`
    are the distrusted counters by UUID.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        samples_factor: float = 1.0,
        keep: int | None = None,
        keep_steps: int | None = None,
        distrusted: dict[str, frozenset[str]] | None = None,
    ) -> None:
        self.tracks = {uuid: DeviceTrack(uuid, keep, (distrusted or {}).get(uuid, frozenset())) for uuid in uuids}
        """The track of each device, by UUID."""
        self._samples_factor = samples_factor
        self._waiting: deque[Step] = deque(maxlen=keep_steps)
        self._seen_ns: int | None = None

    def add_tick(self, t_ns: int, devices: Iterable[Reading]) -> None:
        """Add the devices of one tick."""
        self._seen_ns = t_ns
        for sample in devices:
            track = self.tracks.get(sample.uuid or "")
            if track is not None:
                track.add(t_ns if sample.t_ns is None else sample.t_ns, sample)

    def add(self, step: Step) -> None:
        """Take a step of rank 0; it is joined when a tick after its end has come."""
        if self.tracks:
            self._waiting.append(step)

    def joined(self, *, final: bool = False) -> list[StepConditions]:
        """The steps joined since the last call; `final`: no more samples will come."""
        conditions = []
        while self._waiting and (final or (self._seen_ns is not None and self._waiting[0].t_ns <= self._seen_ns)):
            conditions.append(self._join_step(self._waiting.popleft()))
        return conditions

    def conditions_between(self, begin_ns: int, end_ns: int) -> list[DeviceConditions]:
        """The conditions of each device with samples between two moments, in the order of the UUIDs."""
        return [track.conditions_between(begin_ns, end_ns) for track in self.tracks.values() if track.times]

    def _join_step(self, step: Step) -> StepConditions:
        tracks = [track for track in self.tracks.values() if track.times]
        # Live and after the end a step must get the same figures, and live an outage may not have ended yet.
        devices = [track.conditions_between(step.begin_ns, step.t_ns, whole_outages=True) for track in tracks]
        energies = [device.energy_joules for device in devices]
        # A sum without one device would pass for the energy of all.
        joules = sum(energy for energy in energies if energy is not None) if energies and None not in energies else None
        samples = (step.samples or 0) * self._samples_factor
        return StepConditions(
            step=step.step,
            t_ns=step.t_ns,
            throttled_ms={
                cause.name: highest(device.throttled_ms.get(cause.name) for device in devices) for cause in CAUSES
            },
            sources=_least_exact(devices),
            clock_loss_fraction=highest(device.clock_loss_fraction for device in devices),
            energy_joules=joules,
            joules_per_sample=joules / samples if joules is not None and samples else None,
            temperature_c=highest(device.temperature_c for device in devices),
            devices=tuple(devices),
        )


def join_of(
    devices: Mapping[str, Sequence[tuple[int, DeviceSample]]], uuids: Sequence[str], *, samples_factor: float = 1.0
) -> StepJoin:
    """A `StepJoin` with all samples of ended records, without the counters that the records refute."""
    distrusted = {uuid: distrusted_counters(samples) for uuid, samples in devices.items()}
    join = StepJoin(uuids, samples_factor=samples_factor, distrusted=distrusted)
    timed_samples = ((t_ns, sample) for uuid in uuids for t_ns, sample in devices.get(uuid, ()))
    for t_ns, sample in sorted(timed_samples, key=itemgetter(0)):
        join.add_tick(t_ns, (sample,))
    return join


def _least_exact(devices: Sequence[DeviceConditions]) -> dict[str, str]:
    return {
        cause.name: max((device.sources[cause.name] for device in with_source), key=SOURCES.index)
        for cause in CAUSES
        if (with_source := [device for device in devices if cause.name in device.sources])
    }
