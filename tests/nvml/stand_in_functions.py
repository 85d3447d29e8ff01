"""The functions of the stand-in for libnvidia-ml: Python functions with the signatures of nvml.h."""

import ctypes
import queue
import time

import stand_in_machine
from stand_in_machine import FIRST_HANDLE, NOT_SUPPORTED, SUCCESS, gpu_call, machine_call, put, temperature_of

XID = 0x8


@machine_call("nvmlInitWithFlags")
def _init(machine, _flags):
    if machine.init_hangs is not None:
        machine.init_hangs.wait()
    machine.forgets = False
    return machine.init_code


for _name in ("nvmlShutdown", "nvmlEventSetCreate", "nvmlEventSetFree"):
    machine_call(_name)(lambda *_arguments: SUCCESS)


@machine_call("nvmlErrorString")
def _error_string(_machine, code):
    return f"stand-in code {code}".encode()


@machine_call("nvmlSystemGetDriverVersion")
def _driver_version(_machine, buffer, _size):
    buffer.value = b"580.82.07"
    return SUCCESS


@machine_call("nvmlDeviceGetCount_v2")
def _count(machine, count):
    return put(count, len(machine.gpus))


@machine_call("nvmlDeviceGetHandleByIndex_v2")
def _handle(machine, index, device):
    if stand_in_machine.is_lost(machine.gpus[index.value], machine.clock()):
        return stand_in_machine.GPU_IS_LOST
    ctypes.c_void_p.from_buffer(device._obj).value = FIRST_HANDLE + index.value
    return SUCCESS


def _put_instance(device, index, place):
    first = stand_in_machine.FIRST_INSTANCE + index * stand_in_machine.MAX_INSTANCES
    ctypes.c_void_p.from_buffer(device._obj).value = first + place
    return SUCCESS


@machine_call("nvmlDeviceGetMigDeviceHandleByIndex")
def _instance_handle(machine, parent, place, device):
    index = (ctypes.cast(parent, ctypes.c_void_p).value or 0) - FIRST_HANDLE
    if place.value >= len(machine.gpus[index].instances):
        return stand_in_machine.NOT_FOUND
    return _put_instance(device, index, place.value)


@machine_call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
def _parent_handle(machine, instance, device):
    number = (ctypes.cast(instance, ctypes.c_void_p).value or 0) - stand_in_machine.FIRST_INSTANCE
    return _handle(machine, ctypes.c_uint(number // stand_in_machine.MAX_INSTANCES), device)


def _give_text(name, field):
    @gpu_call(name)
    def _text(gpu, _seconds, buffer, _size):
        buffer.value = getattr(gpu, field).encode()
        return SUCCESS


_give_text("nvmlDeviceGetName", "name")
_give_text("nvmlDeviceGetUUID", "uuid")


@gpu_call("nvmlDeviceGetCudaComputeCapability")
def _compute_capability(gpu, _seconds, major, minor):
    return put(major, gpu.compute_capability[0]) or put(minor, gpu.compute_capability[1])


def _energy_mj(gpu, seconds):
    return gpu.energy_mj + int(gpu.energy_share * gpu.power_mw * seconds)


def _throttle_reasons(gpu, seconds):
    return gpu.reasons | (stand_in_machine.SW_THERMAL if temperature_of(gpu, seconds) >= gpu.thermal_above else 0)


FIGURES = {
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu, _: stand_in_machine.MAX_INSTANCES if gpu.mig else 0,
    "nvmlDeviceGetFanSpeed": lambda gpu, _: gpu.fan,
    "nvmlDeviceGetPowerUsage": lambda gpu, _: gpu.power_mw,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu, _: gpu.limit_mw,
    "nvmlDeviceGetTotalEnergyConsumption": _energy_mj,
    "nvmlDeviceGetCurrentClocksEventReasons": _throttle_reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _throttle_reasons,
    "nvmlDeviceGetSupportedClocksEventReasons": lambda gpu, _: gpu.supported_reasons,
    "nvmlDeviceGetSupportedClocksThrottleReasons": lambda gpu, _: gpu.supported_reasons,
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu, _: gpu.pcie[0],
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu, _: gpu.pcie_max[0],
    "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu, _: gpu.pcie[1],
    "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu, _: gpu.pcie_max[1],
}
"""Functions that write one figure of a GPU, which may change with the machine's time, through their only pointer."""


def _give(name, figure):
    gpu_call(name)(lambda gpu, seconds, pointer: put(pointer, figure(gpu, seconds)))


for _name, _figure in FIGURES.items():
    _give(_name, _figure)


@gpu_call("nvmlDeviceGetMemoryInfo")
def _memory(gpu, _seconds, memory):
    # Version 1 has no place for what the driver reserves, and counts it as used.
    used = gpu.memory_used + gpu.memory_reserved
    memory._obj.total, memory._obj.used, memory._obj.free = gpu.memory_total, used, gpu.memory_total - used
    return SUCCESS


@gpu_call("nvmlDeviceGetMemoryInfo_v2")
def _memory_v2(gpu, _seconds, memory):
    memory._obj.total, memory._obj.used, memory._obj.reserved = gpu.memory_total, gpu.memory_used, gpu.memory_reserved
    memory._obj.free = gpu.memory_total - gpu.memory_used - gpu.memory_reserved
    return SUCCESS


@gpu_call("nvmlDeviceGetUtilizationRates")
def _utilization(gpu, _seconds, rates):
    rates._obj.gpu, rates._obj.memory = gpu.utilization
    return SUCCESS


def _take_time(gpu):
    if gpu.hangs is not None:
        gpu.hangs.wait()
    time.sleep(gpu.slow_s)


@gpu_call("nvmlDeviceGetTemperature")
def _temperature(gpu, seconds, _sensor, temperature):
    _take_time(gpu)
    return put(temperature, int(temperature_of(gpu, seconds)))


@gpu_call("nvmlDeviceGetTemperatureV")
def _temperature_v(gpu, seconds, reading):
    _take_time(gpu)
    reading._obj.temperature = int(temperature_of(gpu, seconds))
    return SUCCESS


@gpu_call("nvmlDeviceGetTemperatureThreshold")
def _threshold(gpu, _seconds, which, temperature):
    return put(temperature, (gpu.shutdown, gpu.slowdown, gpu.memory_max, gpu.gpu_max)[which.value])


@gpu_call("nvmlDeviceGetMarginTemperature")
def _margin(gpu, seconds, reading):
    reading._obj.marginTemperature = min(gpu.gpu_max, gpu.slowdown) - int(temperature_of(gpu, seconds))
    return SUCCESS


@gpu_call("nvmlDeviceGetClockInfo")
def _clock(gpu, _seconds, which, clock):
    return put(clock, gpu.clocks[which.value])


@gpu_call("nvmlDeviceGetMaxClockInfo")
def _max_clock(gpu, _seconds, which, clock):
    return put(clock, gpu.max_clocks[which.value])


@gpu_call("nvmlDeviceGetMigMode")
def _mig_mode(gpu, _seconds, current, pending):
    return put(current, int(gpu.mig)) or put(pending, int(gpu.mig))


UINT, ULLONG = 1, 3


@gpu_call("nvmlDeviceGetFieldValues")
def _fields(gpu, seconds, count, values):
    for entry in values._obj[: count.value]:
        found = None if f"field {entry.fieldId}" in gpu.unsupported else _field(gpu, seconds, entry.fieldId)
        entry.nvmlReturn = NOT_SUPPORTED if found is None else SUCCESS
        if found is not None:
            entry.valueType, value = found
            setattr(entry.value, "uiVal" if entry.valueType == UINT else "ullVal", value)
    return SUCCESS


def _field(gpu, seconds, number):
    """The type and the value; None where this driver has none."""
    if gpu.cause_numbers is not None and gpu.cause_numbers <= number < gpu.cause_numbers + 3:
        return ULLONG, gpu.violation_ns(number - gpu.cause_numbers + 269, seconds)
    if 251 <= number <= 253:
        return UINT, 1  # settings of power smoothing
    if 74 <= number <= 76:
        return ULLONG, gpu.violation_ns(number, seconds)
    if number in (197, 198):
        return UINT, gpu.pcie_bytes(seconds) & 0xFFFFFFFF
    if number in (138, 139):
        return ULLONG, gpu.nvlink_kib(seconds)
    return {
        3: (ULLONG, gpu.ecc[0]),
        4: (ULLONG, gpu.ecc[1]),
        82: (UINT, gpu.memory_temperature),
        83: (ULLONG, _energy_mj(gpu, seconds)),
        **{142 + place: (UINT, count) for place, count in enumerate(gpu.remapped)},
        185: (UINT, gpu.power_mw),
        186: (UINT, gpu.power_mw + 5_000),
    }.get(number)


@gpu_call("nvmlDeviceGetComputeRunningProcesses_v2")
@gpu_call("nvmlDeviceGetComputeRunningProcesses_v3")
def _processes(gpu, _seconds, count, array):
    room = count._obj.value if array is not None else 0
    count._obj.value = max(len(gpu.processes), gpu.claimed_processes)
    if room < count._obj.value:
        return stand_in_machine.INSUFFICIENT_SIZE
    for entry, (pid, used) in zip(array or (), gpu.processes.items(), strict=False):
        entry.pid, entry.usedGpuMemory = pid, used
    return SUCCESS


@gpu_call("nvmlDeviceRegisterEvents")
def _register_events(_gpu, _seconds, types, _set):
    return SUCCESS if types.value == XID else NOT_SUPPORTED


@machine_call("nvmlEventSetWait_v2")
def _wait(machine, _set, event, timeout_ms):
    try:
        position, number = machine.xids.get(timeout=timeout_ms.value / 1000)
    except queue.Empty:
        return stand_in_machine.TIMEOUT
    ctypes.c_void_p.from_buffer(event._obj.device).value = FIRST_HANDLE + position
    event._obj.eventType, event._obj.eventData = XID, number
    return SUCCESS


@gpu_call("nvmlDeviceGetPciInfo_v3")
def _pci_info(gpu, _seconds, info):
    info._obj.busId = b"00000000:%02X:00.0" % gpu.bus
    return SUCCESS


@machine_call("nvmlDeviceGetTopologyCommonAncestor")
def _common_ancestor(machine, one, other, level):
    a, b = (stand_in_machine.gpu_of(machine, handle) for handle in (one, other))
    return put(level, 30 if a.node == b.node else 50)


@machine_call("nvmlDeviceGetP2PStatus")
def _peer_status(machine, one, other, _capability, status):
    return put(status, max(stand_in_machine.gpu_of(machine, handle).peer_access for handle in (one, other)))


@gpu_call("nvmlDeviceGetNvLinkState")
def _link_state(gpu, _seconds, link, is_active):
    if link >= len(gpu.links):
        return stand_in_machine.INVALID_ARGUMENT if gpu.links else NOT_SUPPORTED
    return put(is_active, int(gpu.links[link] is not None))


@gpu_call("nvmlDeviceGetNvLinkRemoteDeviceType")
def _link_end_kind(gpu, _seconds, link, kind):
    return put(kind, 2 if gpu.links[link] == "switch" else 0)


@gpu_call("nvmlDeviceGetNvLinkRemotePciInfo_v2")
def _link_end(gpu, _seconds, link, info):
    end = gpu.links[link]
    info._obj.busId = b"00000000:%02X:00.0" % (end if isinstance(end, int) else 0xF0)
    return SUCCESS
