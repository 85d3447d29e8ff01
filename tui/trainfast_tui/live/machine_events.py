"""The events of a machine without a run: throttling, lost GPUs, processes that come and go, Xid errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from trainfast_tui.text.event_words import EVENTS_KEPT, DescribedEvent, EventDescriber

if TYPE_CHECKING:
    from trainfast_runner.machine.gpus.events import DeviceChanges
    from trainfast_runner.records.run_lines import Event
    from trainfast_runner.records.tick import DeviceProcess, DeviceReading, Tick


class MachineEvents:
    """Finds and describes the changes between ticks; each tick is looked at once."""

    def __init__(self) -> None:
        self._seen_until_ns = 0
        """Time of the newest tick that was looked at."""
        self._processes: dict[int, dict[int, DeviceProcess]] = {}
        self._describer = EventDescriber()
        self._events: deque[DescribedEvent] = deque(maxlen=EVENTS_KEPT)

    def update(self, ticks: Sequence[Tick], xids: Sequence[Event] = ()) -> list[DescribedEvent]:
        """Return all events up to the last of these ticks, and the Xid errors, in order of time."""
        new_ticks: list[Tick] = []
        for tick in reversed(ticks):
            if tick.t_ns <= self._seen_until_ns:
                break
            new_ticks.append(tick)
        for tick in reversed(new_ticks):
            self._events += self._describer.describe(self._changes(tick))
        if ticks:
            self._seen_until_ns = max(self._seen_until_ns, ticks[-1].t_ns)
        events = [*self._events, *EventDescriber().describe(xids)]
        return sorted(events, key=lambda event: event.t_ns)

    @cached_property
    def _device_changes(self) -> DeviceChanges:
        from trainfast_runner.machine.gpus.events import DeviceChanges

        return DeviceChanges()

    def _changes(self, tick: Tick) -> Iterator[Event]:
        for device in tick.devices:
            yield from self._device_changes.lost_or_back(device, tick.t_ns)
            yield from self._process_changes(device, tick.t_ns)
            yield from self._device_changes.throttling(device, tick.t_ns)

    def _process_changes(self, device: DeviceReading, t_ns: int) -> Iterator[Event]:
        from trainfast_runner.machine.gpus.events import process_event

        if device.processes is None:
            return
        after = {process.pid: process for process in device.processes}
        before = self._processes.get(device.index)
        self._processes[device.index] = after
        if before is None:
            return  # processes of the first look did not just appear
        for state, processes, other_processes in (("left", before, after), ("appeared", after, before)):
            for pid in sorted(processes.keys() - other_processes.keys()):
                yield process_event(device.index, t_ns, state, processes[pid], kind="process")
