"""One GPU seen through NVML: the table of its readings, its identity, whether it answers, and its reading a tick.

Readings come as field values (`NVML_FI_*`) where the driver has them, else by function. One nvmlDeviceGetFieldValues a
tick reads all field values: it takes the driver's lock once, where a function for each would take it a dozen times.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from enum import Enum
from operator import attrgetter
from types import ModuleType
from typing import Any

from trainfast_runner.errors import lowest
from trainfast_runner.machine.telemetry import binding, throttle
from trainfast_runner.machine.telemetry.binding import NvmlError, call, drop_impossible, gpu_count, reading_failure
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, is_instance

Handle = Any
"""An opaque `nvmlDevice_t` of the binding."""
Ask = Callable[[ModuleType, Handle], tuple[Any, ...]]
"""Asks NVML and returns one value for each field of its query."""
Values = dict[str, Any]
"""Values by field of `DeviceReading`, None where the GPU gives none now."""
Reasons = dict[str, str]
"""The reasons of missing values by field."""


class Pace(Enum):
    """The interval between two calls for a reading."""

    ONCE = "once"
    TICK = "tick"
    SPARSE = "sparse"


class Query:
    """Fields of `DeviceReading` that one NVML function fills, and that function, the preferred one first."""

    def __init__(self, names: str, pace: Pace, *asks: Ask) -> None:
        self.names, self.pace, self.asks = names.split(), pace, asks


def _value(function: str, *arguments: int, divisor: int = 1) -> Ask:
    def ask(nv: ModuleType, handle: Handle) -> tuple[float]:
        value = getattr(nv, function)(handle, *arguments)
        return (value if divisor == 1 else value / divisor,)

    return ask


def _capability(nv: ModuleType, handle: Handle) -> tuple[str]:
    return ("{}.{}".format(*nv.nvmlDeviceGetCudaComputeCapability(handle)),)


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
        used = [(one.pid, one.usedGpuMemory) for one in entries[: min(count.value, MAX_PROCESSES)]]
        return ([DeviceProcess(pid=pid, memory_used_bytes=None if n == _NOT_AVAILABLE else n) for pid, n in used],)

    return ask


_CURRENT_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


def _unreported_reasons(nv: ModuleType, handle: Handle) -> list[str]:
    """The throttle reasons that this GPU cannot report; empty when it does not list its reasons."""
    asks = [_value(function.replace("Current", "Supported")) for function in _CURRENT_REASONS]
    answers = [answer for ask in asks if (answer := binding.answer_or_none(ask, nv, handle)) is not None]
    return [reason.name for reason in throttle.REASONS if answers and not int(answers[0][0]) & reason.bit]


_USED_TOTAL_FREE = attrgetter("used", "total", "free")
# Arguments below are enums of nvml.h: temperature sensor 0 is the GPU; threshold 0 is shutdown, 1 slowdown,
# 2 the memory's and 3 the GPU's highest in operation; clock 1 is SM, 2 memory. Power is in milliwatts.
_THRESHOLD = "nvmlDeviceGetTemperatureThreshold"
_MEMORY = Query(
    "memory_used_bytes memory_total_bytes memory_free_bytes",
    Pace.TICK,
    lambda nv, gpu: _USED_TOTAL_FREE(nv.nvmlDeviceGetMemoryInfo(gpu, version=nv.nvmlMemory_v2)),
    lambda nv, gpu: _USED_TOTAL_FREE(nv.nvmlDeviceGetMemoryInfo(gpu)),
)
_LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
_PROCESSES = Query("processes", Pace.SPARSE, *map(_processes, _LISTS))
INSTANCE_QUERIES = (
    _MEMORY,
    _PROCESSES,
    Query(
        "compute_capability",
        Pace.ONCE,
        lambda nv, instance: _capability(nv, nv.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)),
    ),
)
"""The rest NVML refuses for a MIG instance, or answers for the whole GPU."""
QUERIES = (
    _MEMORY,
    _PROCESSES,
    Query(
        "gpu_utilization_percent memory_utilization_percent",
        Pace.TICK,
        lambda nv, gpu: attrgetter("gpu", "memory")(nv.nvmlDeviceGetUtilizationRates(gpu)),
    ),
    Query("temperature_c", Pace.TICK, _value("nvmlDeviceGetTemperatureV", 0), _value("nvmlDeviceGetTemperature", 0)),
    Query("sm_clock_mhz", Pace.TICK, _value("nvmlDeviceGetClockInfo", 1)),
    Query("throttle_reasons", Pace.TICK, *map(_value, _CURRENT_REASONS)),
    Query("energy_mj", Pace.TICK, _value("nvmlDeviceGetTotalEnergyConsumption")),
    Query("power_w", Pace.TICK, _value("nvmlDeviceGetPowerUsage", divisor=1000)),
    Query("power_limit_w", Pace.SPARSE, _value("nvmlDeviceGetEnforcedPowerLimit", divisor=1000)),
    Query("degrees_to_slowdown_c", Pace.SPARSE, _value("nvmlDeviceGetMarginTemperature")),
    Query("memory_clock_mhz", Pace.SPARSE, _value("nvmlDeviceGetClockInfo", 2)),
    Query("mig_mode", Pace.SPARSE, lambda nv, gpu: (nv.nvmlDeviceGetMigMode(gpu)[0] == 1,)),
    Query("fan_percent", Pace.SPARSE, _value("nvmlDeviceGetFanSpeed")),
    Query("pcie_generation", Pace.SPARSE, _value("nvmlDeviceGetCurrPcieLinkGeneration")),
    Query("pcie_width", Pace.SPARSE, _value("nvmlDeviceGetCurrPcieLinkWidth")),
    Query("pcie_generation_max", Pace.ONCE, _value("nvmlDeviceGetMaxPcieLinkGeneration")),
    Query("pcie_width_max", Pace.ONCE, _value("nvmlDeviceGetMaxPcieLinkWidth")),
    Query(
        "slowdown_temperature_c",
        Pace.ONCE,
        _value(_THRESHOLD, 1),
        lambda nv, gpu: (nv.nvmlDeviceGetTemperature(gpu, 0) + nv.nvmlDeviceGetMarginTemperature(gpu),),
    ),
    Query("shutdown_temperature_c", Pace.ONCE, _value(_THRESHOLD, 0)),
    Query("gpu_max_temperature_c", Pace.ONCE, _value(_THRESHOLD, 3)),
    Query("memory_max_temperature_c", Pace.ONCE, _value(_THRESHOLD, 2)),
    Query("compute_capability", Pace.ONCE, _capability),
    Query("sm_clock_max_mhz", Pace.ONCE, _value("nvmlDeviceGetMaxClockInfo", 1)),
    Query("memory_clock_max_mhz", Pace.ONCE, _value("nvmlDeviceGetMaxClockInfo", 2)),
)
"""Left out on purpose: nvmlDeviceGetPcieThroughput (blocks 20 ms a direction) and the graphics processes."""

ALL_LINKS = 0xFFFFFFFF
"""Scope of the NVLink counters that sums over the GPU's links."""
_BITS_BY_TYPE = {1: 32, 2: 64, 3: 64, 6: 16}
"""`nvmlValueType_t` of nvml.h, the unsigned ones, to the width of the value; no field here is a double or negative."""
UNSIGNED_LONG_LONG = 3
"""`nvmlValueType_t` of nvml.h."""


class NvmlField:
    """An entry of the batch, and the readings of `DeviceReading` it fills.

    `numbers` are NVML_FI_* of nvml.h, the newest driver's first. `scale` is the factor from the driver's unit to ours;
    a whole number keeps the value whole. `wraps`: the driver's counter wraps around at the end of its type.
    """

    def __init__(
        self, names: str, *numbers: int, sparse: bool = False, scope: int = 0, scale: float = 1, wraps: bool = False
    ) -> None:
        self.names, self.numbers = names.split(), numbers
        self.sparse, self.scope, self.scale, self.wraps = sparse, scope, scale, wraps

    def bits(self, kind: int) -> int | None:
        """The width of a value of this type; None for an invalid type, as any but the widest of a counter of time."""
        is_valid = kind == UNSIGNED_LONG_LONG or not self.names[0].endswith("_ns")
        return _BITS_BY_TYPE.get(kind) if is_valid else None


_FIRST_CAUSE = NvmlField("sw_thermal_slowdown_ns", 269, 251)
"""The first of the three counters of single causes, whose numbers follow one another: from 269 since R580, from 251 in
R575. In R570 and since R580 the numbers 251 to 253 are settings of power smoothing, which answer with success and 32
bits."""
FIELDS = (
    NvmlField("power_violation_ns", 74),
    NvmlField("thermal_violation_ns", 75),
    NvmlField("sync_boost_violation_ns", 76),
    _FIRST_CAUSE,
    NvmlField("hw_thermal_slowdown_ns", 270, 252),
    NvmlField("hw_power_brake_ns", 271, 253),
    NvmlField("memory_temperature_c", 82),
    NvmlField("energy_mj", 83),
    NvmlField("nvlink_tx_bytes", 138, scope=ALL_LINKS, scale=1024),
    NvmlField("nvlink_rx_bytes", 139, scope=ALL_LINKS, scale=1024),
    # nvmlDeviceGetPowerUsage gives the same average where this field is answered (nvml.h).
    NvmlField("power_w power_average_w", 185, scale=0.001),
    NvmlField("power_instant_w", 186, scale=0.001),
    NvmlField("pcie_tx_bytes", 197, wraps=True),
    NvmlField("pcie_rx_bytes", 198, wraps=True),
    NvmlField("ecc_corrected_errors", 3, sparse=True),
    NvmlField("ecc_uncorrected_errors", 4, sparse=True),
    NvmlField("remapped_rows_corrected", 142, sparse=True),
    NvmlField("remapped_rows_uncorrected", 143, sparse=True),
    NvmlField("remapped_rows_pending", 144, sparse=True),
    NvmlField("remapped_rows_failed", 145, sparse=True),
)
_READINGS = {name for source in (*QUERIES, *FIELDS) for name in source.names}

Asked = list[tuple[NvmlField, int]]
"""Fields, each with the number to ask for."""


def _ask_fields(nv: ModuleType, handle: Handle, asked: Asked) -> list[tuple[int, int, int]]:
    """The driver's answers, in order: the type of the value, NVML's code, the value's bits."""
    answers = nv.nvmlDeviceGetFieldValues(handle, [(number, field.scope) for field, number in asked])
    return [(answer.valueType, answer.nvmlReturn, answer.value.ullVal) for answer in answers]


class Unwrapped:
    """A counter that continues when the driver's wraps around to 0.

    It counts at most one wrap-around between two readings: 32 bits of bytes wrap in 0.13 s at 32 GB/s, so a rate from
    such a counter once a second is a lower bound.
    """

    def __init__(self) -> None:
        self._last = self._total = 0

    def follow(self, raw: int, bits: int) -> int:
        """The running total after this reading of a counter of `bits` bits; the first reading is its start."""
        if raw >= self._last:
            self._total += raw - self._last
        elif self._last < 1 << 32:
            self._total += raw - self._last + (1 << min(bits, 32))
        self._last = raw
        return self._total


def _field_failure(error: NvmlError, number: int = 0) -> str:
    """The reason that a field holds no value. Raises the error when the GPU or the library is gone."""
    if error.value == 0:
        return f"this driver means something else by field {number}"
    is_unknown = error.value in (binding.INVALID_ARGUMENT, binding.FUNCTION_NOT_FOUND)
    return binding.UNSUPPORTED if is_unknown else reading_failure(error)


class Device:
    """A GPU, or a MIG instance. Not safe to share between threads; fatal NVML errors pass through."""

    def __init__(self, index: int, uuid: str | None) -> None:
        self.index, self.uuid = index, uuid
        self.name: str | None = None
        self.uuid_failure: str | None = None
        """The reason that a GPU which answers has no UUID; None if it has."""
        self.error: str | None = None
        """The reason that the GPU does not answer, or None."""
        self.lost = False
        """True while initializing NVML again may bring the GPU back."""
        self.handle: Handle = None
        """NVML's, valid until the next initialization."""
        self.is_probed = False
        self._fields: dict[bool, Asked] = {}
        """The answered fields of a tick without (False) and with (True) the sparse ones."""
        self._wrapping: dict[NvmlField, Unwrapped] = {}
        self._queries: list[tuple[Query, Ask]] = []
        """The queries with an answer that holds for a while only, each with the call that gives it."""
        self._values: Values = {}
        """The last value of each reading."""
        self.reasons: Reasons = {}
        """The reasons of the readings without a value, for ever or for now."""
        self._last_reason_bits = 0

    def attach(self, nv: ModuleType, handle: Handle) -> None:
        """Take a fresh handle, and probe the GPU's readings."""
        self.handle, self.is_probed = handle, False
        self._fields, self._wrapping, self._queries, self._values, self.reasons = {}, {}, [], {}, {}
        if is_instance(self.uuid):
            self.reasons = dict.fromkeys(_READINGS, binding.OF_THE_WHOLE_GPU)
            self._probe(nv, INSTANCE_QUERIES)
        else:
            self._probe_fields(nv)
            self._take(*self._read_fields(nv, sparse=True))
            self._probe(nv, [query for query in QUERIES if query.names[0] not in self._values])
            if "throttle_reasons" not in self.reasons:
                names = [f"throttle_reasons.{name}" for name in _unreported_reasons(nv, handle)]
                self.reasons |= dict.fromkeys(names, binding.UNREPORTED)
            for name in _MEMORY.names:
                if self.reasons.get(name) == binding.UNSUPPORTED:
                    self.reasons[name] = binding.UNIFIED_MEMORY
        try:
            self.name = call(binding.name_of, nv, handle)
        except NvmlError as error:
            self.reasons["name"] = reading_failure(error)
        if self.uuid_failure is not None:
            self.reasons["uuid"] = self.uuid_failure
        self.is_probed, self.error, self.lost = True, None, False

    def fail(self, sentence: str, *, lost: bool) -> None:
        """Mark the GPU as not answering; `lost` when it may come back."""
        self.error, self.lost = sentence, lost

    def fail_by(self, error: NvmlError) -> None:
        """Mark the GPU as not answering for NVML's error. Raises the error if the library as a whole failed."""
        if error.value in binding.LIBRARY_FAILURES:
            raise error
        self.fail(binding.device_failure(error.value, str(error)), lost=error.value in binding.DEVICE_FAILURES)

    def read(self, nv: ModuleType, t_ns: int, *, sparse: bool) -> tuple[DeviceReading, Reasons]:
        """The reading at `t_ns`, with `sparse` its slow parts too, and the reasons of the missing parts by field."""
        values, failures = self._read_fields(nv, sparse=sparse)
        for query, ask in self._queries:
            if sparse or query.pace is Pace.TICK:
                try:
                    values.update(zip(query.names, call(ask, nv, self.handle), strict=True))
                except NvmlError as error:
                    failures |= dict.fromkeys(query.names, reading_failure(error))
        self._take(values, failures)
        values, reasons = dict(self._values), dict(self.reasons)
        if (bits := values.get("throttle_reasons")) is not None:
            values["throttle_reasons"] = throttle.decode(throttle.believed(bits, self._last_reason_bits))
            self._last_reason_bits = bits
        temperature_c = values.get("temperature_c")
        limit_c = lowest((values.get("gpu_max_temperature_c"), values.get("slowdown_temperature_c")))
        if temperature_c is None and "temperature_c" in reasons:
            # The margin is of no use either.
            values["degrees_to_slowdown_c"] = None
            reasons.setdefault("degrees_to_slowdown_c", reasons["temperature_c"])
        elif values.get("degrees_to_slowdown_c") is None and temperature_c is not None and limit_c is not None:
            values["degrees_to_slowdown_c"] = limit_c - temperature_c
            reasons.pop("degrees_to_slowdown_c", None)
        return DeviceReading(index=self.index, uuid=self.uuid, name=self.name, t_ns=t_ns, **values), reasons

    def _take(self, values: Values, failures: Reasons) -> None:
        """Keep fresh values, without the impossible ones, and the reasons of the missing ones."""
        failures = failures | drop_impossible(values)
        self._values |= values
        self._values.update(dict.fromkeys(failures.keys() & _READINGS))
        for name in self.reasons.keys() & {*values, *(["processes.pid"] if "processes" in values else [])}:
            del self.reasons[name]
        self.reasons |= failures

    def _probe_fields(self, nv: ModuleType) -> None:
        """Ask for all fields, to know those that the GPU answers."""
        numbers: dict[NvmlField, int] = {}
        everything = [(field, number) for field in FIELDS for number in field.numbers]
        try:
            entries = call(_ask_fields, nv, self.handle, everything)
        except NvmlError as error:
            self.reasons |= {name: _field_failure(error) for field in FIELDS for name in field.names}
            everything, entries = [], []
        for (field, number), (kind, code, _) in zip(everything, entries, strict=True):
            # The call succeeds even for unknown fields; a passing failure is a field's too.
            if field.bits(kind) is not None if code == 0 else code not in binding.LASTING:
                numbers.setdefault(field, number)
            else:
                reason = _field_failure(NvmlError(code), number)
                self.reasons |= {name: self.reasons.get(name, reason) for name in field.names}
        for name in (name for field in numbers for name in field.names):
            self.reasons.pop(name, None)
        first = numbers.get(_FIRST_CAUSE)
        if first is None:
            self.reasons["throttle_counters"] = self.reasons[_FIRST_CAUSE.names[0]]
        else:
            self._values["throttle_counters"] = f"{first}-{first + 2}"
        for sparse in (False, True):
            self._fields[sparse] = [(field, number) for field, number in numbers.items() if sparse >= field.sparse]

    def _read_fields(self, nv: ModuleType, *, sparse: bool) -> tuple[Values, Reasons]:
        """The values of the due fields, by one call. Raises NvmlError when the GPU or the library is gone."""
        values: Values = {}
        failures: Reasons = {}
        if not (due := self._fields.get(sparse)):
            return values, failures
        try:
            entries = call(_ask_fields, nv, self.handle, due)
        except NvmlError as error:
            return values, {name: _field_failure(error) for field, _ in due for name in field.names}
        for (field, number), (kind, code, raw) in zip(due, entries, strict=True):
            if code != 0 or (bits := field.bits(kind)) is None:
                failures |= dict.fromkeys(field.names, _field_failure(NvmlError(code), number))
                continue
            value: float = raw & ((1 << bits) - 1)
            if field.wraps:
                value = self._wrapping.setdefault(field, Unwrapped()).follow(int(value), bits)
            elif field.scale != 1:
                # The driver's thousandths, without the dust of their product.
                value = round(value * field.scale, 3)
            values |= dict.fromkeys(field.names, value)
        return values, failures

    def _probe(self, nv: ModuleType, queries: Collection[Query]) -> None:
        """Make each call once, to know those that the GPU answers."""
        values: Values = {}
        failures: Reasons = {}
        for query in queries:
            reasons: list[str] = []
            for ask in query.asks:
                try:
                    values.update(zip(query.names, call(ask, nv, self.handle), strict=True))
                    is_absent, reasons = False, []
                except NvmlError as error:
                    reasons.append(reading_failure(error))
                    is_absent = error.value in binding.LASTING
                if not is_absent:
                    break
            if not is_absent and query.pace is not Pace.ONCE:
                self._queries.append((query, ask))
            if reasons:
                # A reason about the reading is worth more than one about an unknown call.
                telling = [reason for reason in reasons if reason not in binding.TOO_OLD_REASONS]
                failures |= dict.fromkeys(query.names, [*telling, *reasons][0])
        self._take(values, failures)


class DeviceList:
    """Every GPU that was ever listed, the MIG instances after the GPUs: a known one never vanishes silently."""

    def __init__(self) -> None:
        self.devices: list[Device] = []

    def find(self, nv: ModuleType) -> dict[Device, Handle]:
        """Ask for the driver's list, add new GPUs and mark missing ones; return the handles of those that answer.

        Raises NvmlError when the library fails.
        """
        handles: dict[Device, Handle] = {}
        seen_indexes: set[int] = set()

        def add(position: int, ask: Callable[[int], Handle]) -> None:
            uuid = reason = None
            try:
                handle = call(ask, position)
                try:
                    uuid = call(binding.uuid_of, nv, handle)
                except NvmlError as error:
                    reason = reading_failure(error)
                device = self._identify(position, uuid)
                device.uuid_failure = None if device.uuid else reason
                handles[device] = handle
            except NvmlError as error:
                device = self._identify(position, None)
                device.fail_by(error)
            seen_indexes.add(device.index)

        count = gpu_count(nv)
        for position in range(count):
            add(position, lambda index: nv.nvmlDeviceGetHandleByIndex(index))
        instances = [instance for gpu in tuple(handles.values()) for instance in _instances(nv, gpu)]
        for position in range(count, count + len(instances)):
            add(position, lambda index: instances[index - count])
        for device in self.devices:
            if device.index not in seen_indexes:
                device.fail(binding.VANISHED, lost=True)
        return handles

    def _identify(self, position: int, uuid: str | None) -> Device:
        """The GPU known by this UUID, else the one last seen at this position without one, else a new one."""
        at_position = next((device for device in self.devices if device.index == position), None)
        gpu = next((device for device in self.devices if uuid and device.uuid == uuid), None)
        if gpu is None and at_position is not None and (uuid is None or at_position.uuid is None):
            gpu = at_position
            gpu.uuid = uuid or gpu.uuid
        if gpu is None:
            index = position if at_position is None else max(device.index for device in self.devices) + 1
            gpu = Device(index, uuid)
            self.devices.append(gpu)
        return gpu


def _instances(nv: ModuleType, gpu: Handle) -> list[Handle]:
    """The MIG instances of a GPU; empty when it is not in MIG mode."""
    # A slot without an instance answers NotFound.
    slots = range(binding.answer_or_none(gpu_count, nv, gpu) or 0)
    handles = [binding.answer_or_none(lambda slot: nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot), n) for n in slots]
    return [handle for handle in handles if handle is not None]
