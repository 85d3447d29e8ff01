"""What the sampler sees, written to the run directory: every tick, and an event when a device's state changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainfast_runner.machine.gpus.events import DeviceEvents
from trainfast_runner.machine.telemetry.sampler import Sampler
from trainfast_runner.machine.telemetry.xid import words
from trainfast_runner.records.json_lines import Appender
from trainfast_runner.records.run_file import Event
from trainfast_runner.records.run_records import TELEMETRY_FILE
from trainfast_runner.records.telemetry_lines import TickEncoder
from trainfast_runner.records.tick import Tick, is_instance

PERIOD_S = 1.0


class TelemetryLog:
    """Runs the sampler for one run. Nothing that happens here, a full disk included, reaches the training.

    `tell` gets events from the sampler's thread and the one that waits for Xid errors. `complain` is called, from the
    sampler's thread, with the first thing that went wrong.
    """

    def __init__(
        self,
        directory: Path,
        watch_uuids: list[str],
        tell: Callable[[Event], None],
        complain: Callable[[str], None],
        *,
        period_s: float = PERIOD_S,
        on_cpu: bool = False,
    ) -> None:
        """`on_cpu`: the training uses none of the GPUs, so that whoever does is somebody else."""
        self._events = DeviceEvents(watch_uuids, none_ours=on_cpu)
        self._tell, self._complain = tell, complain
        self._path = directory / TELEMETRY_FILE
        self._file: Appender | None = None
        self._lines = TickEncoder()
        self._failed = False
        instances = [uuid for uuid in watch_uuids if is_instance(uuid)]
        self._sampler = Sampler(self._take, period_s=period_s, on_xid=self._xid, instances=instances)

    def start(self) -> None:
        """Begin sampling, a tick a period."""
        self._sampler.start()

    def follow(self, pid: int) -> None:
        """Add what the process tree below `pid` uses to the coming ticks."""
        self._sampler.set_root_pid(pid)

    def stop(self) -> None:
        """End the sampling with a tick after all steps; a driver call that hangs is left behind."""
        if self._sampler.stop(last_tick=True) and self._file is not None:
            self._file.close()
        if self._sampler.failure is not None and not self._failed:
            self._complain(f"sampling ended: {self._sampler.failure!r}")

    def _take(self, tick: Tick) -> None:
        for event in self._events.between(tick):
            self._tell(event)
        try:
            if self._file is None:
                self._file = Appender(self._path)
            self._file.write(self._lines.line(tick))
        except OSError as error:
            self._lines.start_again()
            if not self._failed:
                self._failed = True
                self._complain(f"{TELEMETRY_FILE}: {error.strerror}")

    def _xid(self, t_ns: int, index: int, code: int) -> None:
        if self._events.concerns(index):
            self._tell(Event(t_ns=t_ns, kind="xid", device=index, detail=words(code)))
