"""Cores that other processes keep busy, as seen from the process that is about to start a run."""

from __future__ import annotations

import os
import time

import psutil

from trainfast_runner.machine.telemetry.host import UNREADABLE, read_cores

MIN_S = 0.01
"""Shortest length of a window: the kernel counts processor time in hundredths of a second."""


class CpuWindow:
    """CPU time, from the window's start on, of all processes but this one and its descendants.

    Only the cores this process may run on count. Time that a hypervisor gave to others counts as theirs.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._own_s = _own_s()
        self._busy_s = _busy_s()

    @property
    def age_s(self) -> float:
        """Seconds since the window began."""
        return time.monotonic() - self._began_s

    def others_cores(self) -> float | None:
        """Cores that others kept busy on average, such as 0.05.

        None when the kernel gives no figure, or when a process of ours lost its parent in the window, so that its time
        is no longer counted as ours.
        """
        busy_s, own_s = _busy_s(), _own_s() - self._own_s
        if busy_s is None or self._busy_s is None or own_s < 0:
            return None
        return max(0.0, (busy_s - self._busy_s - own_s) / max(self.age_s, MIN_S))


def others_cores(seconds: float, windows: int = 3) -> float | None:
    """Cores that others keep busy over the next `seconds`; None when no window gives a figure."""
    for _ in range(windows):
        window = CpuWindow()
        time.sleep(seconds)
        if (cores := window.others_cores()) is not None:
            return cores
    return None


def _busy_s() -> float | None:
    """Seconds that the cores of this process have been busy since boot."""
    try:
        cores = read_cores()
    except UNREADABLE:
        return None
    allowed = os.sched_getaffinity(0)
    if max(allowed) < len(cores):
        cores = [cores[number] for number in allowed]
    return sum(core.busy for core in cores)


def _own_s() -> float:
    """CPU seconds of this process and its descendants; a parent that waited has the seconds of its ended children."""
    own_process = psutil.Process()
    while True:
        total_s = 0.0
        try:
            # Parents first: a child that ends in between is not found, rather than counted twice.
            for process in (own_process, *own_process.children(recursive=True)):
                times = process.cpu_times()
                total_s += times.user + times.system + times.children_user + times.children_system
            return total_s
        except psutil.NoSuchProcess:
            continue
