"""Calibrate the device once while the machine is idle; never while anything trains, traces or searches."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from trainfast_tui.control.messages import DeviceCalibrated, Post, TrainingPython
from trainfast_tui.control.threads import CancellableWork

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.records.home import Home
    from trainfast_tui.live.snapshot import Snapshot

IDLE_S = 20.0
"""Chosen, not measured: seconds that the machine must have been idle."""
IDLE_CPU_PERCENT, IDLE_GPU_PERCENT = 15.0, 5.0
"""Chosen, not measured: a machine with a higher load is not idle."""
MAX_TRIES = 3
"""Chosen, not measured: tries in all, if each fails or other processes disturb it; a cancelled one does not count."""


class IdleCalibrator:
    """Posts DeviceCalibrated. Every call returns at once."""

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        self._home, self._post, self._python = home, post, python
        self._idle_since_ns: int | None = None
        self._tries = 0
        self._work = CancellableWork("calibrate")
        self._is_done = False

    def update(self, snapshot: Snapshot, machine: Machine | None, *, is_device_used: bool) -> None:
        """Calibrate once the machine has been idle for `IDLE_S`; stop when it is used or another run has started.

        `is_device_used` is true during a trace too.
        """
        if is_device_used or (not self._work.is_running and not _is_idle(snapshot)):
            self._idle_since_ns = None
            self.cancel()
            return
        if machine is None or self._is_done or self._work.is_running or self._tries >= MAX_TRIES:
            return
        if self._idle_since_ns is None:
            self._idle_since_ns = snapshot.taken_ns
        if snapshot.taken_ns - self._idle_since_ns >= IDLE_S * 1e9:
            self._idle_since_ns = None
            self._work.start(partial(self._calibrate, machine), self._post, to_message=lambda error: None)

    def cancel(self, wait_s: float = 0.0) -> None:
        """End a measurement under way, and wait at most `wait_s` seconds until its process is gone."""
        self._work.cancel(wait_s)

    def _calibrate(self, machine: Machine, cancelled: threading.Event) -> DeviceCalibrated | None:
        """Measure the device, unless it is known. A device that cannot be measured stays as it is."""
        from trainfast_runner.machine.calibration import calibrate, is_calibrated
        from trainfast_runner.machine.cpu.cpu_info import cpu_name
        from trainfast_runner.machine.worker_programs import ProgramCancelled
        from trainfast_runner.running.present_state import live_runs

        gpus = [gpu.name for gpu in machine.gpus if gpu.name]
        names = gpus if machine.device == "cuda" else [cpu_name()]
        self._is_done = any(is_calibrated(self._home, name) for name in names)
        if self._is_done or live_runs(self._home):
            return None
        try:
            self._is_done = not calibrate(self._home, self._python, cancelled, in_background=True).disturbed
            return DeviceCalibrated() if self._is_done else None
        except ProgramCancelled:
            return None
        finally:
            if not cancelled.is_set():
                self._tries += 1


def _is_idle(snapshot: Snapshot) -> bool:
    """True if the newest sample shows neither the CPU nor a GPU at work."""
    tick, cpu = snapshot.tick, snapshot.cpu_percent
    if tick is None or cpu is None or cpu > IDLE_CPU_PERCENT:
        return False
    return all((device.gpu_utilization_percent or 0) <= IDLE_GPU_PERCENT for device in tick.devices)
