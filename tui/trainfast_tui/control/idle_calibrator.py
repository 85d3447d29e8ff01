"""Calibrate the device once while the machine is idle; never while anything trains, traces or searches."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from trainfast_tui.control.background import in_background
from trainfast_tui.control.messages import DeviceCalibrated, Post

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.records.home import Home
    from trainfast_tui.live.snapshot import Snapshot

IDLE_S = 20.0
"""The machine must have been idle for so long."""
IDLE_CPU_PERCENT, IDLE_GPU_PERCENT = 15.0, 5.0
"""A machine that is busier than this is not idle."""
MOST_TRIES = 3
"""A measurement that others disturb is repeated so often."""


class IdleCalibrator:
    """Posts DeviceCalibrated. Every call returns at once."""

    def __init__(self, home: Home, post: Post, python: str | None) -> None:
        self._home, self._post, self._python = home, post, python
        self._idle_since_ns: int | None = None
        self._tries = 0
        self._under_way: threading.Event | None = None
        """Exists while the device is measured; setting it ends that."""
        self._is_done = False

    def update(self, snapshot: Snapshot, machine: Machine | None, *, is_busy: bool) -> None:
        """Begin to calibrate when the machine has been idle for long enough; end it when `is_busy`, or another run."""
        if is_busy or snapshot.started_elsewhere is not None or (self._under_way is None and not _is_idle(snapshot)):
            self._idle_since_ns = None
            self.cancel()
            return
        if machine is None or self._is_done or self._under_way is not None or self._tries >= MOST_TRIES:
            return
        if self._idle_since_ns is None:
            self._idle_since_ns = snapshot.taken_ns
        if snapshot.taken_ns - self._idle_since_ns >= IDLE_S * 1e9:
            self._start_calibration(machine)

    def cancel(self, wait_s: float = 0.0) -> None:
        """End a measurement under way, and wait at most this long until its process is gone."""
        under_way = self._under_way
        if under_way is None:
            return
        under_way.set()
        deadline = time.monotonic() + wait_s
        while self._under_way is not None and time.monotonic() < deadline:
            time.sleep(0.01)

    def _start_calibration(self, machine: Machine) -> None:
        self._tries += 1
        self._idle_since_ns = None
        cancelled = self._under_way = threading.Event()
        in_background("calibrate", lambda: self._calibrate(machine, cancelled), self._post, lambda error: None)

    def _calibrate(self, machine: Machine, cancelled: threading.Event) -> DeviceCalibrated | None:
        """Measure the device, unless it is known. A device that cannot be measured stays as it is."""
        from trainfast_runner.machine.calibration import calibrate, cpu_name, is_calibrated
        from trainfast_runner.machine.worker_scripts import ScriptCancelled
        from trainfast_runner.running.run_state import live_runs

        try:
            gpus = [gpu.name for gpu in machine.gpus if gpu.name]
            names = gpus if machine.device == "cuda" else [cpu_name()]
            self._is_done = any(is_calibrated(self._home, name) for name in names)
            if self._is_done or any(True for _ in live_runs(self._home)):
                return None
            self._is_done = not calibrate(self._home, self._python, cancelled).disturbed
            return DeviceCalibrated() if self._is_done else None
        except ScriptCancelled:
            return None
        finally:
            self._under_way = None


def _is_idle(snapshot: Snapshot) -> bool:
    """True if the newest sample shows neither the CPU nor a GPU at work."""
    tick, cpu = snapshot.tick, snapshot.cpu_percent
    if tick is None or cpu is None or cpu > IDLE_CPU_PERCENT:
        return False
    return all((device.gpu_utilization_percent or 0) <= IDLE_GPU_PERCENT for device in tick.devices)
