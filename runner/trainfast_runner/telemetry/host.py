"""The machine around the GPUs through psutil: processor, memory, disks, network, and one run's processes."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from trainfast_runner.telemetry.process_tree import ProcessTree
from trainfast_runner.telemetry.readings import HostReading

_T = TypeVar("_T")

_PACKAGE_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
"""Kernel drivers that measure the processor itself, best first."""


class HostReader:
    """Reads the host once a tick. Rates need two readings, so the first one has no `cpu_percent`.

    Use it from one thread: psutil keeps the earlier processor times for each thread.
    """

    def __init__(self, *, sparse_every: int = 5) -> None:
        """`sparse_every`: ticks between two looks at the sensors, which cost milliseconds."""
        self.tree: ProcessTree | None = None
        """The run's processes, or None when no run is watched."""
        self._sparse_every = sparse_every
        self._ticks = 0
        self._temperature_c: float | None = None

    def read(self) -> tuple[HostReading, dict[str, str]]:
        """The reading, and why what is missing is missing (keys start with `host.`, or are `run`)."""
        missing: dict[str, str] = {}
        per_core = self._per_core(missing)
        memory = _ask("host.memory_used_bytes", psutil.virtual_memory, missing)
        swap = _ask("host.swap_used_bytes", psutil.swap_memory, missing)
        load = _ask("host.load_1m", os.getloadavg, missing)
        disks = _ask("host.disk_read_bytes", lambda: psutil.disk_io_counters(nowrap=False), missing)
        received, sent = _network(missing)
        if self._ticks % self._sparse_every == 0:
            self._temperature_c = _ask("host.temperature_c", _package_temperature, missing)
        if self._temperature_c is None:
            missing.setdefault("host.temperature_c", "no processor temperature sensor is visible")
        self._ticks += 1
        run = self.tree.read() if self.tree else None
        if self.tree and run is None:
            missing["run"] = f"process {self.tree.root_pid} and its children have ended"
        return HostReading(
            cpu_percent=round(sum(per_core) / len(per_core), 2) if per_core else None,
            cpu_count=psutil.cpu_count(),
            cpu_percent_per_core=per_core,
            load_1m=load[0] if load else None,
            memory_used_bytes=memory.used if memory else None,
            memory_total_bytes=memory.total if memory else None,
            memory_available_bytes=memory.available if memory else None,
            swap_used_bytes=swap.used if swap else None,
            disk_read_bytes=disks.read_bytes if disks else None,
            disk_write_bytes=disks.write_bytes if disks else None,
            network_received_bytes=received,
            network_sent_bytes=sent,
            temperature_c=self._temperature_c,
            run=run,
        ), missing

    def _per_core(self, missing: dict[str, str]) -> list[float] | None:
        percents = _ask("host.cpu_percent", lambda: psutil.cpu_percent(percpu=True), missing)
        if self._ticks == 0:
            # psutil answers 0.0 for every core until there is an earlier reading to compare with.
            missing["host.cpu_percent"] = "a rate needs two readings: it comes with the next one"
            return None
        return percents


def _network(missing: dict[str, str]) -> tuple[int | None, int | None]:
    """Bytes received and sent since boot by all interfaces but loopback, which carries gloo and local sockets."""
    counters = _ask("host.network_received_bytes", lambda: psutil.net_io_counters(pernic=True, nowrap=False), missing)
    outside = [counter for name, counter in (counters or {}).items() if name != "lo"]
    if not outside:
        missing.setdefault("host.network_received_bytes", "no network interface but loopback")
        return None, None
    return sum(counter.bytes_recv for counter in outside), sum(counter.bytes_sent for counter in outside)


def _package_temperature() -> float | None:
    """The hottest reading of the best processor sensor, in degrees Celsius."""
    sensors: dict[str, list[Any]] = psutil.sensors_temperatures()
    for name in _PACKAGE_SENSORS:
        if sensors.get(name):
            return max(float(sensor.current) for sensor in sensors[name])
    return None


def _ask(key: str, call: Callable[[], _T], missing: dict[str, str]) -> _T | None:
    """The call's answer; None and a sentence in `missing` when the system refuses or has none."""
    try:
        answer = call()
    except (OSError, psutil.Error, NotImplementedError) as error:
        missing[key] = f"the system does not give this reading: {error}"
        return None
    if answer is None:
        missing[key] = "this system has no such reading"
    return answer
