"""NVML readings of a GPU by function: one table, each reading with its calls in order of preference.

`field_values` has the readings that are field values, and asks for all of them in one call.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.machine.telemetry.failures import NvmlError
from trainfast_runner.records.tick import DeviceProcess

Handle = Any
"""An opaque `nvmlDevice_t` of the binding."""
Ask = Callable[[ModuleType, Handle], tuple[Any, ...]]
"""Asks NVML and returns one value for each field of its query; raises NvmlError when there is none."""


class Pace(Enum):
    """The interval between two calls for a reading."""

    ONCE = "once"
    TICK = "tick"
    SPARSE = "sparse"


@dataclass(frozen=True)
class Query:
    """Fields of `DeviceReading` that one NVML call fills."""

    fields: tuple[str, ...]
    pace: Pace
    asks: tuple[Ask, ...]


def _memory_v2(nv: ModuleType, handle: Handle) -> tuple[int, int, int]:
    memory = nv.nvmlDeviceGetMemoryInfo(handle, version=nv.nvmlMemory_v2)
    return memory.used, memory.total, memory.free


def _memory_v1(nv: ModuleType, handle: Handle) -> tuple[int, int, int]:
    memory = nv.nvmlDeviceGetMemoryInfo(handle)
    return memory.used, memory.total, memory.free


def _utilization(nv: ModuleType, handle: Handle) -> tuple[int, int]:
    rates = nv.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _slowdown_from_margin(nv: ModuleType, handle: Handle) -> tuple[int]:
    return (nv.nvmlDeviceGetTemperature(handle, 0) + nv.nvmlDeviceGetMarginTemperature(handle),)


def _compute_capability(nv: ModuleType, handle: Handle) -> tuple[str]:
    major, minor = nv.nvmlDeviceGetCudaComputeCapability(handle)
    return (f"{major}.{minor}",)


def unreported_reasons(nv: ModuleType, handle: Handle) -> list[str]:
    """The throttle reasons that this GPU cannot report; empty when it does not list its reasons."""
    for function in ("nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetSupportedClocksThrottleReasons"):
        try:
            bits = getattr(nv, function)(handle)
        except NvmlError:
            continue
        return [reason.name for reason in throttle.REASONS if not bits & reason.bit]
    return []


def _mig_mode(nv: ModuleType, handle: Handle) -> tuple[bool]:
    return (nv.nvmlDeviceGetMigMode(handle)[0] == 1,)


MAX_PROCESSES = 256
"""Most processes listed of a GPU; a driver with more lists none, with the reason."""
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
"""NVML_VALUE_NOT_AVAILABLE: the driver does not know how much a process uses."""


def _processes(function: str) -> Ask:
    """List processes by the C function: the binding's own allocates memory for any count that the driver claims."""

    def ask(nv: ModuleType, handle: Handle) -> tuple[list[DeviceProcess]]:
        entries = (nv.c_nvmlProcessInfo_v2_t * MAX_PROCESSES)()
        count = ctypes.c_uint(MAX_PROCESSES)
        code = nv._nvmlGetFunctionPointer(function)(handle, ctypes.byref(count), entries)
        if code != 0:
            raise NvmlError(code)
        return (
            [
                DeviceProcess(
                    pid=entry.pid,
                    memory_used_bytes=None if entry.usedGpuMemory == _NOT_AVAILABLE else entry.usedGpuMemory,
                )
                for entry in entries[: min(count.value, MAX_PROCESSES)]
            ],
        )

    return ask


def _single_value(function: str, *arguments: int) -> Ask:
    def ask(nv: ModuleType, handle: Handle) -> tuple[int]:
        return (getattr(nv, function)(handle, *arguments),)

    return ask


def _watts(function: str) -> Ask:
    def ask(nv: ModuleType, handle: Handle) -> tuple[float]:
        return (getattr(nv, function)(handle) / 1000,)

    return ask


# Arguments below are enums of nvml.h: temperature sensor 0 is the GPU; threshold 0 is shutdown, 1 slowdown,
# 2 the memory's and 3 the GPU's highest in operation; clock 1 is SM, 2 memory.
QUERIES: tuple[Query, ...] = (
    Query(("memory_used_bytes", "memory_total_bytes", "memory_free_bytes"), Pace.TICK, (_memory_v2, _memory_v1)),
    Query(("gpu_utilization_percent", "memory_utilization_percent"), Pace.TICK, (_utilization,)),
    Query(
        ("temperature_c",),
        Pace.TICK,
        (_single_value("nvmlDeviceGetTemperatureV", 0), _single_value("nvmlDeviceGetTemperature", 0)),
    ),
    Query(
        ("slowdown_temperature_c",),
        Pace.ONCE,
        (_single_value("nvmlDeviceGetTemperatureThreshold", 1), _slowdown_from_margin),
    ),
    Query(("compute_capability",), Pace.ONCE, (_compute_capability,)),
    Query(("shutdown_temperature_c",), Pace.ONCE, (_single_value("nvmlDeviceGetTemperatureThreshold", 0),)),
    Query(("degrees_to_slowdown_c",), Pace.TICK, (_single_value("nvmlDeviceGetMarginTemperature"),)),
    Query(("gpu_max_temperature_c",), Pace.ONCE, (_single_value("nvmlDeviceGetTemperatureThreshold", 3),)),
    Query(("memory_max_temperature_c",), Pace.ONCE, (_single_value("nvmlDeviceGetTemperatureThreshold", 2),)),
    Query(("power_w",), Pace.TICK, (_watts("nvmlDeviceGetPowerUsage"),)),
    Query(("sm_clock_mhz",), Pace.TICK, (_single_value("nvmlDeviceGetClockInfo", 1),)),
    Query(("memory_clock_mhz",), Pace.TICK, (_single_value("nvmlDeviceGetClockInfo", 2),)),
    Query(("sm_clock_max_mhz",), Pace.ONCE, (_single_value("nvmlDeviceGetMaxClockInfo", 1),)),
    Query(("memory_clock_max_mhz",), Pace.ONCE, (_single_value("nvmlDeviceGetMaxClockInfo", 2),)),
    Query(
        ("throttle_reasons",),
        Pace.TICK,
        (
            _single_value("nvmlDeviceGetCurrentClocksEventReasons"),
            _single_value("nvmlDeviceGetCurrentClocksThrottleReasons"),
        ),
    ),
    Query(("mig_mode",), Pace.SPARSE, (_mig_mode,)),
    Query(("fan_percent",), Pace.SPARSE, (_single_value("nvmlDeviceGetFanSpeed"),)),
    Query(("power_limit_w",), Pace.SPARSE, (_watts("nvmlDeviceGetEnforcedPowerLimit"),)),
    Query(("pcie_generation",), Pace.SPARSE, (_single_value("nvmlDeviceGetCurrPcieLinkGeneration"),)),
    Query(("pcie_width",), Pace.SPARSE, (_single_value("nvmlDeviceGetCurrPcieLinkWidth"),)),
    Query(("pcie_generation_max",), Pace.ONCE, (_single_value("nvmlDeviceGetMaxPcieLinkGeneration"),)),
    Query(("pcie_width_max",), Pace.ONCE, (_single_value("nvmlDeviceGetMaxPcieLinkWidth"),)),
    Query(
        ("processes",),
        Pace.SPARSE,
        (
            _processes("nvmlDeviceGetComputeRunningProcesses_v3"),
            _processes("nvmlDeviceGetComputeRunningProcesses_v2"),
        ),
    ),
)
"""Left out on purpose: nvmlDeviceGetPcieThroughput (blocks 20 ms a direction) and the graphics processes."""

ENERGY_BY_FUNCTION = Query(("energy_mj",), Pace.TICK, (_single_value("nvmlDeviceGetTotalEnergyConsumption"),))
"""Asked only of a driver that does not give the energy counter as a field value."""
