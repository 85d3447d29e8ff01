"""Facts about the processor from /proc/cpuinfo."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from trainfast_runner.machine.telemetry.host import UNREADABLE, busy_and_idle_s
from trainfast_runner.records.json_lines import text_of
from trainfast_runner.records.run_file import LaunchThreads
from trainfast_runner.worker.catalog import STRATEGIES
from trainfast_runner.worker.shared.host import DEFAULT, PASSIVE, PASSIVE_SETTINGS, WAIT_SETTINGS, wait_policy

CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The processor's own name and how many of its cores this process may use."""
    match = re.search(r"^(?:model name|cpu model).*?: *(.*)$", _cpu_info(), re.IGNORECASE | re.MULTILINE)
    return f"{match[1].strip() if match else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def cpu_has_fp16() -> bool:
    """True if this CPU multiplies fp16 itself (by AVX512-FP16, which torch's oneDNN asks for)."""
    return "avx512_fp16" in _cpu_info()


@functools.cache
def _cpu_info() -> str:
    """The whole text; empty when it cannot be read."""
    return text_of(CPU_INFO)


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


def others_percent(seconds: float) -> float | None:
    """The share of this process's cores that others keep busy over the next `seconds`, in percent; None if unknown."""
    window = CpuWindow()
    time.sleep(seconds)
    cores = window.others_cores()
    return None if cores is None else min(100.0, 100 * cores / len(os.sched_getaffinity(0)))


def _busy_s() -> float | None:
    """Seconds that the cores of this process have been busy since boot."""
    try:
        cores = psutil.cpu_times(percpu=True)
    except UNREADABLE:
        return None
    allowed = os.sched_getaffinity(0)
    if max(allowed) < len(cores):
        cores = [cores[number] for number in allowed]
    return sum(busy_and_idle_s(core)[0] for core in cores)


def _own_s() -> float:
    """CPU seconds of this process and its descendants; a parent that waited has the seconds of its ended children."""
    own_process = psutil.Process()
    while True:
        total_s = 0.0
        with suppress(psutil.NoSuchProcess):
            # Parents first: a child that ends in between is not found, rather than counted twice.
            for process in (own_process, *own_process.children(recursive=True)):
                times = process.cpu_times()
                total_s += times.user + times.system + times.children_user + times.children_system
            return total_s


OBSERVED_S, STALE_S = 0.25, 3.0
"""Seconds of watching the cores before a launch, and the most: older windows say little of now."""
IDLE_CORES = 0.05
"""Chosen, not measured: share of one core below which others leave the machine idle."""
IDLE_CORES_OF_KEPT = {"default": 0.15, "passive": 0.02}
"""The same where a standby's threads have a policy already: a few hundredths of a second do not make it void."""
UNUSED = "unused"


class ThreadPolicy(LaunchThreads, frozen=True, kw_only=True):
    """The wait policy of a launch's OpenMP threads, with the variables that set it."""

    @property
    def env(self) -> dict[str, str]:
        """The variables that the launch sets for the policy."""
        return dict(PASSIVE_SETTINGS) if self.wait == PASSIVE else {}


def thread_variables(
    device: str, strategy: str, cores: int, ranks: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """OMP_NUM_THREADS of a rank where several compute on the host: each has its share of the cores.

    torchrun otherwise gives each rank one thread. Empty for one process, which has what the user's own script would
    have, and where the user has set it.
    """
    on_host = device == "cpu" or STRATEGIES[strategy].offloads
    if not on_host or (ranks == 1 and device == "cpu") or "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def thread_count(environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, of the outermost level; None when it is not set or no number, which libgomp ignores too."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else None


def fixed_policy(environment: Mapping[str, str], threads: int | None) -> ThreadPolicy | None:
    """The policy where there is nothing to choose: the user's own settings, or one thread a rank; else None."""
    if wait_settings := [name for name in WAIT_SETTINGS if name in environment]:
        return ThreadPolicy(wait=wait_policy(environment), reason=f"your own {', '.join(wait_settings)}")
    if threads == 1:
        return ThreadPolicy(wait=UNUSED, reason="one thread a rank, which waits for no other")
    return None


def script_policy(environment: Mapping[str, str], ranks: int) -> ThreadPolicy | None:
    """The policy of a script's threads, which the launch leaves alone; None where a launcher of ranks sets them."""
    if ranks > 1:
        return None
    own = ThreadPolicy(wait=DEFAULT, reason="nothing in the script's environment sets another")
    return fixed_policy(environment, thread_count(environment)) or own


def choose_policy(window: CpuWindow | None = None, kept: str | None = None) -> ThreadPolicy:
    """Choose by the load of others in `window`, or over `OBSERVED_S`; `kept` is the policy of the standby."""
    if window is None or window.age_s > STALE_S:
        window = CpuWindow()
    time.sleep(max(0.0, OBSERVED_S - window.age_s))
    return policy_beside(window.others_cores(), kept)


def policy_beside(others: float | None, kept: str | None = None) -> ThreadPolicy:
    """The policy when other processes keep `others` cores busy, None if that is unknown; `kept` as `choose_policy`."""
    if others is None:
        return ThreadPolicy(wait=PASSIVE, reason="the load of other processes is unknown")
    took = f"other processes used {100 * others:.0f} % of a core before the launch"
    if others < IDLE_CORES_OF_KEPT.get(kept or "", IDLE_CORES):
        return ThreadPolicy(wait=DEFAULT, reason=f"{took}: spinning threads are fastest", others_cores=others)
    return ThreadPolicy(wait=PASSIVE, reason=f"{took}: spinning threads would stall", others_cores=others)
