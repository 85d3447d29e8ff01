"""How much of the cores other processes take, seen from the process that is about to start a run."""

from __future__ import annotations

import os
import time

import psutil

from trainfast_runner.telemetry import kernel_figures

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuWindow:
    """From its making on, the CPU time of all processes but this one and its children, live and ended.

    Only the cores this process may run on count. Time that a hypervisor gave to others counts as theirs.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    @property
    def age_s(self) -> float:
        """Seconds since the window began."""
        return time.monotonic() - self._began_s

    def others_cores(self) -> float | None:
        """Cores that others kept busy on average, such as 0.05; None where the kernel does not tell."""
        busy_s = _busy_s()
        if busy_s is None or self._busy_s is None:
            return None
        others_s = busy_s - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, others_s / max(self.age_s, 1 / TICKS_PER_S))


def _busy_s() -> float | None:
    """Seconds that the cores of this process have been busy since boot."""
    try:
        cores = kernel_figures.core_times()
    except kernel_figures.UNREADABLE:
        return None
    ours = {f"cpu{core}".encode() for core in os.sched_getaffinity(0)}
    return sum(times.busy for name, times in cores.items() if name in ours) / TICKS_PER_S


def _own_s() -> float:
    """CPU seconds of this process and all of its children; those of a child that ended are its parent's."""
    this = psutil.Process()
    spent = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        spent += times.user + times.system + times.children_user + times.children_system
    return spent
