"""`monitor --hosts`: the readings of several machines in one table, or in one JSON object a tick.

Each host runs `monitor --json`, this machine without ssh; a thread a host reads its lines. The children end with this
command: it ends them when it leaves, and one that outlives a killed command ends at its next line, which nobody reads.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any, NamedTuple, NoReturn

import msgspec

from trainfast_runner.machine.hosts import Host, host_argv, module_argv, ssh_failure
from trainfast_runner.machine.telemetry.sampler import next_due_s
from trainfast_runner.machine.training_python import whole_text
from trainfast_runner.records.tick import SCHEMA, Tick
from trainfast_runner.units import plain
from trainfast_tui.cli.exit_codes import EXIT_FAILED
from trainfast_tui.cli.printing import print_json

SILENT_S, SILENT_INTERVALS = 10.0, 3
"""A host without a reading for this long, and for so many intervals, is silent: its child is started again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds until a host that is gone is tried again; the pause doubles each time."""
ONCE_WITHIN_S = 20.0
"""Seconds that `--once` waits for the hosts: a connection, and the first reading of a slow driver."""
ENDED_WITHIN_S = 1.0
"""Seconds that the children have to end."""
POLL_S = 0.02


class Reading(NamedTuple):
    """The newest reading of a host, or the reason for none."""

    tick: Tick | None = None
    line: bytes = b""
    """The reading as the host printed it, in ASCII."""
    failure: str | None = None
    at_s: float = 0.0
    """The time at which it came (CLOCK_MONOTONIC)."""


class HostMonitor:
    """`monitor --json` of one host, started again with a growing pause when it ends or falls silent."""

    def __init__(self, host: Host, interval_s: float) -> None:
        self.name = host.name
        self.reading = Reading()
        self._host = host
        self._argv = host_argv(host, module_argv("trainfast_tui.cli", "monitor", "--json", f"--interval={interval_s}"))
        self._silent_s = max(SILENT_S, SILENT_INTERVALS * interval_s)
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._heard_s = time.monotonic()
        self._silence: str | None = None
        """The sentence for a child that was ended because it was silent."""
        self._thread = threading.Thread(target=self._run, name=f"monitor-{host.name}", daemon=True)

    def start(self) -> None:
        """Start the thread, which starts the child."""
        self._thread.start()

    def stop(self) -> None:
        """End the child; `join` waits for it."""
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()

    def join(self, deadline_s: float) -> None:
        """Wait for the child's end until this moment (CLOCK_MONOTONIC), then kill it."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._child is not None and self._thread.is_alive():
            self._child.kill()
            self._thread.join(ENDED_WITHIN_S)

    def end_if_silent(self) -> None:
        """End a child that has printed nothing for too long, so that the thread starts another."""
        child, silent_s = self._child, time.monotonic() - self._heard_s
        if child is not None and silent_s > self._silent_s:
            self._silence = f"{self.name} is silent: no reading for {silent_s:.0f} s"
            child.kill()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            self._heard_s, self._silence = time.monotonic(), None
            failure = self._follow()
            if self.reading.tick is not None:
                pause_s = FIRST_PAUSE_S  # it has answered since it was started
            failure = f"{self._silence or failure}; the next try comes after {pause_s:g} s"
            self.reading = Reading(failure=failure, at_s=time.monotonic())
            self._stopping.wait(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _follow(self) -> str:
        """Run the child to its end, and return the sentence for it."""
        with TemporaryFile() as errors:
            try:
                child = subprocess.Popen(
                    self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
                )
            except OSError as error:
                return f"{self.name}: {plain(self._argv[0])} does not start: {error.strerror}"
            self._child = child
            if self._stopping.is_set():
                child.terminate()  # `stop` came before there was one
            assert child.stdout is not None
            with child.stdout:
                for line in child.stdout:
                    self._heard_s = time.monotonic()
                    try:
                        tick = msgspec.json.decode(line, type=Tick)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        continue  # a login script's greeting
                    if not line.isascii():  # as the name of a GPU, which the encoding of stdout may not have
                        line = json.dumps(json.loads(line)).encode()
                    self.reading = Reading(tick, line.strip(), at_s=self._heard_s)
            return ssh_failure(self._host, child.wait(), whole_text(errors))


def monitor_hosts(
    hosts: Sequence[Host], interval_s: float, *, once: bool, show: Callable[[dict[str, Tick | str]], None] | None
) -> int:
    """Print the readings of the hosts until Ctrl-C; with `once`, one reading of each. A host named twice counts once.

    `show` prints the reading of each host or the reason for none; without it they are printed as JSON.
    Returns 4 if `once` got no reading at all.
    """
    monitors = [HostMonitor(host, interval_s) for host in {host.name: host for host in hosts}.values()]
    with _ended_on_leaving(monitors):
        # Wait first until each host has given a reading or failed.
        deadline_s = time.monotonic() + (ONCE_WITHIN_S if once else min(ONCE_WITHIN_S, max(1.0, interval_s)))
        while time.monotonic() < deadline_s and not all(one.reading.at_s for one in monitors):
            time.sleep(POLL_S)
        due_s = time.monotonic()
        while True:
            readings = {one.name: one.reading for one in monitors}
            if show is None:
                print_json(_as_json(readings))
                sys.stdout.flush()
            else:
                show({name: one.tick or _why_none(name, one) for name, one in readings.items()})
            if once:
                return 0 if any(reading.tick for reading in readings.values()) else EXIT_FAILED
            due_s = next_due_s(due_s, interval_s)
            time.sleep(max(0.0, due_s - time.monotonic()))
            for one in monitors:
                one.end_if_silent()


@contextmanager
def _ended_on_leaving(monitors: Sequence[HostMonitor]) -> Iterator[None]:
    """Start the monitors, and end them also at SIGHUP and SIGTERM, which would otherwise leave an ssh behind."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, leave)
    try:
        for one in monitors:
            one.start()
        yield
    finally:
        for one in monitors:
            one.stop()
        deadline_s = time.monotonic() + ENDED_WITHIN_S
        for one in monitors:
            one.join(deadline_s)


def _as_json(readings: dict[str, Reading]) -> dict[str, Any]:
    """Return the hosts' readings as they printed them; null with its reason in `missing`."""
    return {
        "schema": SCHEMA,
        "t_ns": time.monotonic_ns(),
        "hosts": {name: msgspec.Raw(one.line) if one.tick is not None else None for name, one in readings.items()},
        "missing": {name: _why_none(name, one) for name, one in readings.items() if one.tick is None},
    }


def _why_none(name: str, reading: Reading) -> str:
    return reading.failure or f"{name} has not answered yet"
