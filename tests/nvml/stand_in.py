"""A stand-in for libnvidia-ml behind the real `pynvml`, which keeps its own packing, fallbacks and error mapping.

`StandIn(machine)` answers the C functions; `installed` puts it where `pynvml` keeps the loaded library. A function
that the machine does not have is a missing symbol, as in an old driver.
"""

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pynvml

SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED = 0, 1, 2, 3
INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND, GPU_IS_LOST = 7, 13, 15
MIB = 1024**2
SW_THERMAL = 0x20


@dataclass
class Gpu:
    """One GPU; a heat ramp makes its temperature and its thermal slowdown functions of the machine's time."""

    name: str = "NVIDIA Stand-In 80GB"
    uuid: str = ""
    compute_capability: tuple[int, int] = (8, 0)
    memory_total: int = 81920 * MIB
    memory_used: int = 1024 * MIB
    memory_reserved: int = 512 * MIB
    utilization: tuple[int, int] = (97, 41)
    temperature: float = 50.0
    heats_per_s: float = 0.0
    thermal_above: float = 87.0
    slowdown: int = 92
    shutdown: int = 95
    memory_temperature: int = 60
    fan: int = 30
    power_mw: int = 250_000
    limit_mw: int = 400_000
    energy_mj: int = 5_000_000
    clocks: dict[int, int] = field(default_factory=lambda: {1: 1410, 2: 1593})
    max_clocks: dict[int, int] = field(default_factory=lambda: {1: 1980, 2: 1593})
    reasons: int = 0
    violation_ns: Callable[[int, float], int] = lambda _field, seconds: 0
    pcie: tuple[int, int] = (4, 16)
    pcie_max: tuple[int, int] = (4, 16)
    bus: int = 0
    """Its PCI bus number."""
    node: int = 0
    """Its NUMA node, of 32 CPUs each; between nodes the common ancestor is the system, within one the host bridge."""
    links: tuple[int | str | None, ...] = ()
    """Where each NVLink leads: a bus number, "switch", or None where it is down."""
    peer_access: int = 0
    """What it answers for every other GPU, as `nvmlGpuP2PStatus_t`."""
    processes: dict[int, int] = field(default_factory=dict)
    lost: tuple[float, float] | None = None
    """From and to which second of the machine's time the GPU does not answer."""
    unsupported: frozenset[str] = frozenset()
    """C functions, and field ids as "field 82", that answer NotSupported."""
    slow_s: float = 0.0
    """How long each look at the temperature takes."""


def gpus(count: int, **settings: Any) -> list[Gpu]:
    """`count` alike GPUs with the UUIDs GPU-0, GPU-1, ..."""
    return [Gpu(uuid=f"GPU-{index}", **settings) for index in range(count)]


@dataclass
class Machine:
    """The GPUs, the machine's clock in seconds, and what its driver lacks."""

    gpus: list[Gpu]
    clock: Callable[[], float] = lambda: 0.0
    absent: frozenset[str] = frozenset()
    """C functions that this driver does not export."""
    init_code: int = SUCCESS
    forgets: bool = False
    """Every call answers Uninitialized until nvmlInit is called again."""
    calls: dict[str, int] = field(default_factory=dict)


class StandIn:
    """Python functions with the signatures of nvml.h, looked up by name as ctypes would."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        function = _FUNCTIONS.get(name)
        if function is None or name in self._machine.absent:
            raise AttributeError(name)
        # A partial takes the `restype` that pynvml sets on some functions.
        return functools.partial(_counted, self._machine, name, function)


@contextlib.contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    """Makes `pynvml` talk to `machine` instead of a driver."""
    before = pynvml.nvmlLib
    pynvml.nvmlLib = StandIn(machine)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield machine
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()


_Function = Callable[..., int]
_FUNCTIONS: dict[str, _Function] = {}


def _counted(machine: Machine, name: str, function: _Function, *arguments: Any) -> int:
    machine.calls[name] = machine.calls.get(name, 0) + 1
    if machine.forgets and not name.startswith("nvmlInit"):
        return UNINITIALIZED
    return function(machine, *arguments)


def _machine_call(name: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        _FUNCTIONS[name] = function
        return function

    return register


def _gpu_call(name: str) -> Callable[[_Function], _Function]:
    """Registers a function of one GPU: it gets the `Gpu` and the machine's time, and answers only when it may."""

    def register(function: _Function) -> _Function:
        def checked(machine: Machine, handle: Any, *arguments: Any) -> int:
            gpu = _gpu(machine, handle)
            seconds = machine.clock()
            if _is_lost(gpu, seconds):
                return GPU_IS_LOST
            if name in gpu.unsupported:
                return NOT_SUPPORTED
            return function(gpu, seconds, *arguments)

        _FUNCTIONS[name] = checked
        return function

    return register


_FIRST_HANDLE = 0x1000


def _gpu(machine: Machine, handle: Any) -> Gpu:
    return machine.gpus[(ctypes.cast(handle, ctypes.c_void_p).value or 0) - _FIRST_HANDLE]


def _is_lost(gpu: Gpu, seconds: float) -> bool:
    return gpu.lost is not None and gpu.lost[0] <= seconds < gpu.lost[1]


def _temperature(gpu: Gpu, seconds: float) -> float:
    return gpu.temperature + gpu.heats_per_s * seconds


def _put(reference: Any, value: Any) -> int:
    """Writes through a `byref` pointer."""
    reference._obj.value = value
    return SUCCESS


@_machine_call("nvmlInitWithFlags")
def _init(machine: Machine, _flags: Any) -> int:
    machine.forgets = False
    return machine.init_code


@_machine_call("nvmlShutdown")
def _shutdown(_machine: Machine) -> int:
    return SUCCESS


@_machine_call("nvmlErrorString")
def _error_string(_machine: Machine, code: int) -> Any:
    return f"stand-in code {code}".encode()


@_machine_call("nvmlSystemGetDriverVersion")
def _driver_version(_machine: Machine, buffer: Any, _size: Any) -> int:
    buffer.value = b"580.82.07"
    return SUCCESS


@_machine_call("nvmlDeviceGetCount_v2")
def _count(machine: Machine, count: Any) -> int:
    return _put(count, len(machine.gpus))


@_machine_call("nvmlDeviceGetHandleByIndex_v2")
def _handle(machine: Machine, index: Any, device: Any) -> int:
    if _is_lost(machine.gpus[index.value], machine.clock()):
        return GPU_IS_LOST
    ctypes.c_void_p.from_buffer(device._obj).value = _FIRST_HANDLE + index.value
    return SUCCESS


@_gpu_call("nvmlDeviceGetName")
def _name(gpu: Gpu, _seconds: float, buffer: Any, _size: Any) -> int:
    buffer.value = gpu.name.encode()
    return SUCCESS


@_gpu_call("nvmlDeviceGetUUID")
def _uuid(gpu: Gpu, _seconds: float, buffer: Any, _size: Any) -> int:
    buffer.value = gpu.uuid.encode()
    return SUCCESS


@_gpu_call("nvmlDeviceGetCudaComputeCapability")
def _compute_capability(gpu: Gpu, _seconds: float, major: Any, minor: Any) -> int:
    return _put(major, gpu.compute_capability[0]) or _put(minor, gpu.compute_capability[1])


@_gpu_call("nvmlDeviceGetMemoryInfo")
def _memory(gpu: Gpu, _seconds: float, memory: Any) -> int:
    # Version 1 has no place for what the driver reserves, and counts it as used.
    used = gpu.memory_used + gpu.memory_reserved
    memory._obj.total, memory._obj.used, memory._obj.free = gpu.memory_total, used, gpu.memory_total - used
    return SUCCESS


@_gpu_call("nvmlDeviceGetMemoryInfo_v2")
def _memory_v2(gpu: Gpu, _seconds: float, memory: Any) -> int:
    memory._obj.total, memory._obj.used, memory._obj.reserved = gpu.memory_total, gpu.memory_used, gpu.memory_reserved
    memory._obj.free = gpu.memory_total - gpu.memory_used - gpu.memory_reserved
    return SUCCESS


@_gpu_call("nvmlDeviceGetUtilizationRates")
def _utilization(gpu: Gpu, _seconds: float, rates: Any) -> int:
    rates._obj.gpu, rates._obj.memory = gpu.utilization
    return SUCCESS


@_gpu_call("nvmlDeviceGetTemperature")
def _temperature_v0(gpu: Gpu, seconds: float, _sensor: Any, temperature: Any) -> int:
    time.sleep(gpu.slow_s)
    return _put(temperature, int(_temperature(gpu, seconds)))


@_gpu_call("nvmlDeviceGetTemperatureV")
def _temperature_v(gpu: Gpu, seconds: float, reading: Any) -> int:
    time.sleep(gpu.slow_s)
    reading._obj.temperature = int(_temperature(gpu, seconds))
    return SUCCESS


@_gpu_call("nvmlDeviceGetTemperatureThreshold")
def _threshold(gpu: Gpu, _seconds: float, which: Any, temperature: Any) -> int:
    return _put(temperature, {0: gpu.shutdown, 1: gpu.slowdown}[which.value])


@_gpu_call("nvmlDeviceGetMarginTemperature")
def _margin(gpu: Gpu, seconds: float, reading: Any) -> int:
    reading._obj.marginTemperature = gpu.slowdown - int(_temperature(gpu, seconds))
    return SUCCESS


@_gpu_call("nvmlDeviceGetFanSpeed")
def _fan(gpu: Gpu, _seconds: float, speed: Any) -> int:
    return _put(speed, gpu.fan)


@_gpu_call("nvmlDeviceGetPowerUsage")
def _power(gpu: Gpu, _seconds: float, milliwatts: Any) -> int:
    return _put(milliwatts, gpu.power_mw)


@_gpu_call("nvmlDeviceGetEnforcedPowerLimit")
def _limit(gpu: Gpu, _seconds: float, milliwatts: Any) -> int:
    return _put(milliwatts, gpu.limit_mw)


@_gpu_call("nvmlDeviceGetTotalEnergyConsumption")
def _energy(gpu: Gpu, seconds: float, millijoules: Any) -> int:
    return _put(millijoules, gpu.energy_mj + int(gpu.power_mw * seconds))


@_gpu_call("nvmlDeviceGetClockInfo")
def _clock(gpu: Gpu, _seconds: float, which: Any, clock: Any) -> int:
    return _put(clock, gpu.clocks[which.value])


@_gpu_call("nvmlDeviceGetMaxClockInfo")
def _max_clock(gpu: Gpu, _seconds: float, which: Any, clock: Any) -> int:
    return _put(clock, gpu.max_clocks[which.value])


@_gpu_call("nvmlDeviceGetCurrentClocksEventReasons")
@_gpu_call("nvmlDeviceGetCurrentClocksThrottleReasons")
def _reasons(gpu: Gpu, seconds: float, bits: Any) -> int:
    hot = SW_THERMAL if _temperature(gpu, seconds) >= gpu.thermal_above else 0
    return _put(bits, gpu.reasons | hot)


@_gpu_call("nvmlDeviceGetFieldValues")
def _fields(gpu: Gpu, seconds: float, count: Any, values: Any) -> int:
    for entry in values._obj[: count.value]:
        entry.nvmlReturn = SUCCESS
        if f"field {entry.fieldId}" in gpu.unsupported:
            entry.nvmlReturn = NOT_SUPPORTED
        elif entry.fieldId == 82:
            entry.valueType, entry.value.uiVal = 1, gpu.memory_temperature
        elif entry.fieldId in (74, 75):
            entry.valueType, entry.value.ullVal = 3, gpu.violation_ns(entry.fieldId, seconds)
        else:
            entry.nvmlReturn = NOT_SUPPORTED
    return SUCCESS


@_gpu_call("nvmlDeviceGetCurrPcieLinkGeneration")
def _generation(gpu: Gpu, _seconds: float, generation: Any) -> int:
    return _put(generation, gpu.pcie[0])


@_gpu_call("nvmlDeviceGetMaxPcieLinkGeneration")
def _generation_max(gpu: Gpu, _seconds: float, generation: Any) -> int:
    return _put(generation, gpu.pcie_max[0])


@_gpu_call("nvmlDeviceGetCurrPcieLinkWidth")
def _width(gpu: Gpu, _seconds: float, width: Any) -> int:
    return _put(width, gpu.pcie[1])


@_gpu_call("nvmlDeviceGetMaxPcieLinkWidth")
def _width_max(gpu: Gpu, _seconds: float, width: Any) -> int:
    return _put(width, gpu.pcie_max[1])


@_gpu_call("nvmlDeviceGetPciInfo_v3")
def _pci_info(gpu: Gpu, _seconds: float, info: Any) -> int:
    info._obj.busId = b"00000000:%02X:00.0" % gpu.bus
    return SUCCESS


@_gpu_call("nvmlDeviceGetCpuAffinity")
def _cpu_affinity(gpu: Gpu, _seconds: float, _words: Any, mask: Any) -> int:
    mask._obj[0] = 0xFFFFFFFF << 32 * gpu.node
    return SUCCESS


@_gpu_call("nvmlDeviceGetMemoryAffinity")
def _memory_affinity(gpu: Gpu, _seconds: float, _words: Any, mask: Any, _scope: Any) -> int:
    mask._obj[0] = 1 << gpu.node
    return SUCCESS


@_machine_call("nvmlDeviceGetTopologyCommonAncestor")
def _common_ancestor(machine: Machine, one: Any, other: Any, level: Any) -> int:
    a, b = (_gpu(machine, handle) for handle in (one, other))
    return _put(level, 30 if a.node == b.node else 50)


@_machine_call("nvmlDeviceGetP2PStatus")
def _peer_status(machine: Machine, one: Any, other: Any, _capability: Any, status: Any) -> int:
    return _put(status, max(_gpu(machine, handle).peer_access for handle in (one, other)))


@_gpu_call("nvmlDeviceGetNvLinkState")
def _link_state(gpu: Gpu, _seconds: float, link: Any, is_active: Any) -> int:
    if link >= len(gpu.links):
        return INVALID_ARGUMENT if gpu.links else NOT_SUPPORTED
    return _put(is_active, int(gpu.links[link] is not None))


@_gpu_call("nvmlDeviceGetNvLinkRemoteDeviceType")
def _link_end_kind(gpu: Gpu, _seconds: float, link: Any, kind: Any) -> int:
    return _put(kind, 2 if gpu.links[link] == "switch" else 0)


@_gpu_call("nvmlDeviceGetNvLinkRemotePciInfo_v2")
def _link_end(gpu: Gpu, _seconds: float, link: Any, info: Any) -> int:
    end = gpu.links[link]
    info._obj.busId = b"00000000:%02X:00.0" % (end if isinstance(end, int) else 0xF0)
    return SUCCESS


@_gpu_call("nvmlDeviceGetComputeRunningProcesses_v2")
@_gpu_call("nvmlDeviceGetComputeRunningProcesses_v3")
def _processes(gpu: Gpu, _seconds: float, count: Any, array: Any) -> int:
    room = count._obj.value if array is not None else 0
    count._obj.value = len(gpu.processes)
    if room < len(gpu.processes):
        return INSUFFICIENT_SIZE
    for entry, (pid, used) in zip(array or (), gpu.processes.items(), strict=False):
        entry.pid, entry.usedGpuMemory = pid, used
    return SUCCESS
