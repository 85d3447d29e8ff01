"""The sampler's ticks written to the run directory, with an event for each change of a device's state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from trainfast_runner.machine.device_events import DeviceEvents
from trainfast_runner.machine.telemetry.nvml import xid_text
from trainfast_runner.machine.telemetry.sampler import Sampler
from trainfast_runner.records.capped_file import OUTPUT_FILE, CappedFile, capped_records
from trainfast_runner.records.json_lines import Appender
from trainfast_runner.records.run_directory import EVENTS_FILE, TELEMETRY_FILE, node_file, rank_file
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.tick import Tick

PERIOD_S = 1.0
"""Seconds between two ticks."""


class TelemetryLog:
    """Runs the sampler for one run. No failure here, a full disk included, reaches the training.

    `on_event` gets events from the sampler's thread and the thread that waits for Xid errors. `on_failure` gets the
    first failure, from the sampler's thread.
    """

    def __init__(
        self,
        directory: Path,
        watch_uuids: list[str],
        on_event: Callable[[Event], None],
        on_failure: Callable[[str], None],
        *,
        period_s: float = PERIOD_S,
        on_cpu: bool = False,
        node: int = 0,
    ) -> None:
        """`on_cpu`: the training uses none of the GPUs, so all their processes are foreign."""
        self._events = DeviceEvents(watch_uuids, all_foreign=on_cpu)
        self._on_event, self._on_failure = on_event, on_failure
        self._file = Appender(node_file(directory, TELEMETRY_FILE, node))
        self._failed = self._is_over = False
        self._sampler = Sampler(self._write_tick, period_s=period_s, on_xid=self._xid)

    def start(self) -> None:
        """Begin sampling, a tick a period."""
        self._sampler.start()

    def follow(self, pid: int) -> None:
        """Add the readings of the process tree below `pid` to the coming ticks."""
        self._sampler.set_root_pid(pid)

    def stop(self) -> None:
        """End the sampling with a tick after all steps; a driver call that hangs is left behind."""
        self._is_over = not self._sampler.stop(last_tick=True)
        if not self._is_over:
            self._file.close()
        if self._sampler.failure is not None and not self._failed:
            self._on_failure(f"sampling ended: {self._sampler.failure!r}")

    def _write_tick(self, tick: Tick) -> None:
        if self._is_over:  # the run is settled while a call into the driver still hangs
            return
        for event in self._events.since_last(tick):
            self._on_event(event)
        try:
            self._file.write(tick)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._on_failure(f"{TELEMETRY_FILE}: {error.strerror}")

    def _xid(self, t_ns: int, index: int, code: int) -> None:
        if self._events.concerns(index):
            self._on_event(Event(t_ns=t_ns, kind="xid", device=index, detail=xid_text(code)))


class EventLog:
    """Appends events. A disk that takes none is no reason to stop supervising."""

    def __init__(self, directory: Path, node: int = 0) -> None:
        self._file = Appender(node_file(directory, EVENTS_FILE, node))
        self._troubles: set[str] = set()

    def record(self, kind: str, **fields: object) -> None:
        """Append an event of this moment."""
        self.append(msgspec.convert({"t_ns": time.monotonic_ns(), "kind": kind, **fields}, Event))

    def record_trouble(self, detail: str) -> None:
        """Append a failure to write or read a file, once."""
        if detail not in self._troubles:
            self._troubles.add(detail)
            self.record("trouble", detail=detail)
            _print_to_log(detail)

    def append(self, event: Event) -> None:
        """Append an event; where that fails, the reason goes to supervisor.log."""
        try:
            self._file.write(event)
        except OSError as error:
            _print_to_log(f"{EVENTS_FILE}: {error.strerror}")


def _print_to_log(line: str) -> None:
    """Write a line to supervisor.log, which is standard error; on a full disk it is lost."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


class CappedRecords:
    """Caps `output.log`, each rank's steps and the telemetry at so many bytes; failures become events."""

    def __init__(
        self, directory: Path, world_size: int, output_bytes: int, records_bytes: int, events: EventLog, node: int = 0
    ) -> None:
        self.output = CappedFile(node_file(directory, OUTPUT_FILE, node), output_bytes)
        # Any node can have any rank: node 0 trims the steps of all.
        steps = [rank_file(directory, "steps", rank) for rank in range(0 if node else world_size)]
        self._files = {
            self.output: "output_trimmed",
            **{capped_records(path, records_bytes): "steps_trimmed" for path in steps},
            capped_records(node_file(directory, TELEMETRY_FILE, node), records_bytes): "telemetry_trimmed",
        }
        """The event of each file when its middle is dropped."""
        self._events = events

    def trim(self) -> None:
        """Drop the middle of each file that is over its cap."""
        for file, kind in self._files.items():
            if file is not self.output and not file.path.exists():  # nothing was recorded yet
                continue
            truncated_before = file.truncated
            try:
                dropped = file.trim()
            except OSError as error:
                self._events.record_trouble(f"{file.path.name} cannot be trimmed: {error.strerror}")
                continue
            if dropped and file.truncated and not truncated_before:
                self._events.record(kind, detail="truncated: this file system cannot punch holes")
            elif dropped and file.dropped_bytes == dropped:
                self._events.record(kind, detail=f"over {file.cap_bytes} bytes: the middle is dropped")

    def compact(self) -> None:
        """Put one line in place of the dropped bytes; only once no process writes any more."""
        for file in self._files:
            try:
                file.compact()
            except OSError as error:
                self._events.record_trouble(f"{file.path.name} cannot be compacted: {error.strerror}")
