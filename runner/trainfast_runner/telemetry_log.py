"""What the sampler sees, written to the run directory: every tick, and an event when a device's state changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainfast_runner.json_lines import Appender
from trainfast_runner.records import Event
from trainfast_runner.run_records import TELEMETRY_FILE
from trainfast_runner.telemetry.readings import DeviceReading, Tick
from trainfast_runner.telemetry.sampler import Sampler
from trainfast_runner.telemetry.throttle import severity

PERIOD_S = 1.0


class TelemetryLog:
    """Runs the sampler for one run. Nothing that happens here, a full disk included, reaches the training.

    `complain` is called, from the sampler's thread, with the first thing that went wrong.
    """

    def __init__(
        self, directory: Path, watch_uuids: list[str], tell: Callable[[Event], None], complain: Callable[[str], None]
    ) -> None:
        self._watched = frozenset(watch_uuids)
        self._tell, self._complain = tell, complain
        self._throttled: dict[str, frozenset[str]] = {}
        self._lost: set[str] = set()
        self._path = directory / TELEMETRY_FILE
        self._file: Appender | None = None
        self._failed = False
        self._sampler = Sampler(self._take, period_s=PERIOD_S)

    def start(self) -> None:
        """Begin sampling, a tick a second."""
        self._sampler.start()

    def follow(self, pid: int) -> None:
        """Add what the process tree below `pid` uses to the coming ticks."""
        self._sampler.set_root_pid(pid)

    def stop(self) -> None:
        """End the sampling; a driver call that hangs is left behind."""
        if self._sampler.stop() and self._file is not None:
            self._file.close()
        if self._sampler.failure is not None and not self._failed:
            self._complain(f"sampling ended: {self._sampler.failure!r}")

    def _take(self, tick: Tick) -> None:
        for event in self._changes(tick):
            self._tell(event)
        try:
            if self._file is None:
                self._file = Appender(self._path)
            self._file.write(tick)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._complain(f"{TELEMETRY_FILE}: {error.strerror}")

    def _changes(self, tick: Tick) -> list[Event]:
        """Events for the devices of this run: throttling began or ended, a device was lost or came back."""
        return [
            event
            for device in tick.devices
            if device.uuid in self._watched and device.uuid is not None
            for event in (*self._lost_or_back(device, device.uuid, tick.t_ns), *self._throttle(device, tick.t_ns))
        ]

    def _lost_or_back(self, device: DeviceReading, uuid: str, t_ns: int) -> list[Event]:
        if (device.error is not None) == (uuid in self._lost):
            return []
        if device.error is None:
            self._lost.discard(uuid)
            return [Event(t_ns=t_ns, kind="gpu_back", device=device.index)]
        self._lost.add(uuid)
        return [Event(t_ns=t_ns, kind="gpu_lost", device=device.index, detail=device.error)]

    def _throttle(self, device: DeviceReading, t_ns: int) -> list[Event]:
        if device.throttle_reasons is None or device.uuid is None:
            return []
        now = frozenset(name for name in device.throttle_reasons if severity(name) != "none")
        before = self._throttled.get(device.uuid, frozenset())
        self._throttled[device.uuid] = now
        return [
            Event(t_ns=t_ns, kind=kind, device=device.index, detail=name)
            for kind, names in (("throttle_on", now - before), ("throttle_off", before - now))
            for name in sorted(names)
        ]
