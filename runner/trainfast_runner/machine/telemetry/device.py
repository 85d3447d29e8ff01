"""One GPU seen through NVML: its identity, whether it answers, and its reading a tick.

Readings come by function, each with its calls in order of preference, and as field values. One
nvmlDeviceGetFieldValues a tick reads all field values (`NVML_FI_*`): it takes the driver's lock once, where a function
for each reading would take it a dozen times.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import binding, throttle
from trainfast_runner.machine.telemetry.binding import (
    NvmlError,
    call,
    field_failure,
    gpu_count,
    reading_failure,
    text_or_reason,
)
from trainfast_runner.machine.telemetry.plausible import drop_impossible
from trainfast_runner.machine.telemetry.throttle import degrees_by_limits
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, is_instance

Handle = Any
"""An opaque `nvmlDevice_t` of the binding."""
Ask = Callable[[ModuleType, Handle], tuple[Any, ...]]
"""Asks NVML and returns one value for each field of its query."""


class Pace(Enum):
    """The interval between two calls for a reading."""

    ONCE = "once"
    TICK = "tick"
    SPARSE = "sparse"


class Query:
    """Fields of `DeviceReading` that one NVML call fills, and that call, the preferred one first."""

    def __init__(self, fields: str, pace: Pace, *asks: Ask) -> None:
        self.fields = fields.split()
        self.pace = pace
        self.asks = asks


def _value(function: str, *arguments: int, divisor: int = 1) -> Ask:
    def ask(nv: ModuleType, handle: Handle) -> tuple[float]:
        value = getattr(nv, function)(handle, *arguments)
        return (value if divisor == 1 else value / divisor,)

    return ask


def _memory(nv: ModuleType, handle: Handle, **version: int) -> tuple[int, int, int]:
    memory = nv.nvmlDeviceGetMemoryInfo(handle, **version)
    return memory.used, memory.total, memory.free


def _memory_v2(nv: ModuleType, handle: Handle) -> tuple[int, int, int]:
    return _memory(nv, handle, version=nv.nvmlMemory_v2)


def _utilization(nv: ModuleType, handle: Handle) -> tuple[int, int]:
    rates = nv.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _slowdown_from_margin(nv: ModuleType, handle: Handle) -> tuple[int]:
    return (nv.nvmlDeviceGetTemperature(handle, 0) + nv.nvmlDeviceGetMarginTemperature(handle),)


def _compute_capability(nv: ModuleType, handle: Handle) -> tuple[str]:
    return ("{}.{}".format(*nv.nvmlDeviceGetCudaComputeCapability(handle)),)


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
        used = [(one.pid, one.usedGpuMemory) for one in entries[: min(count.value, MAX_PROCESSES)]]
        return ([DeviceProcess(pid=pid, memory_used_bytes=None if n == _NOT_AVAILABLE else n) for pid, n in used],)

    return ask


def unreported_reasons(nv: ModuleType, handle: Handle) -> list[str]:
    """The throttle reasons that this GPU cannot report; empty when it does not list its reasons."""
    for function in ("nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetSupportedClocksThrottleReasons"):
        if (bits := binding.answer_or_none(lambda name: getattr(nv, name)(handle), function)) is not None:
            return [reason.name for reason in throttle.REASONS if not bits & reason.bit]
    return []


# Arguments below are enums of nvml.h: temperature sensor 0 is the GPU; threshold 0 is shutdown, 1 slowdown,
# 2 the memory's and 3 the GPU's highest in operation; clock 1 is SM, 2 memory. Power is in milliwatts.
_THRESHOLD = "nvmlDeviceGetTemperatureThreshold"
MEMORY = Query("memory_used_bytes memory_total_bytes memory_free_bytes", Pace.TICK, _memory_v2, _memory)
PROCESSES = Query(
    "processes",
    Pace.SPARSE,
    _processes("nvmlDeviceGetComputeRunningProcesses_v3"),
    _processes("nvmlDeviceGetComputeRunningProcesses_v2"),
)
QUERIES = (
    MEMORY,
    Query("gpu_utilization_percent memory_utilization_percent", Pace.TICK, _utilization),
    Query("temperature_c", Pace.TICK, _value("nvmlDeviceGetTemperatureV", 0), _value("nvmlDeviceGetTemperature", 0)),
    Query("slowdown_temperature_c", Pace.ONCE, _value(_THRESHOLD, 1), _slowdown_from_margin),
    Query("shutdown_temperature_c", Pace.ONCE, _value(_THRESHOLD, 0)),
    Query("gpu_max_temperature_c", Pace.ONCE, _value(_THRESHOLD, 3)),
    Query("memory_max_temperature_c", Pace.ONCE, _value(_THRESHOLD, 2)),
    Query("degrees_to_slowdown_c", Pace.SPARSE, _value("nvmlDeviceGetMarginTemperature")),
    Query("compute_capability", Pace.ONCE, _compute_capability),
    Query("sm_clock_mhz", Pace.TICK, _value("nvmlDeviceGetClockInfo", 1)),
    Query("memory_clock_mhz", Pace.SPARSE, _value("nvmlDeviceGetClockInfo", 2)),
    Query("sm_clock_max_mhz", Pace.ONCE, _value("nvmlDeviceGetMaxClockInfo", 1)),
    Query("memory_clock_max_mhz", Pace.ONCE, _value("nvmlDeviceGetMaxClockInfo", 2)),
    Query(
        "throttle_reasons",
        Pace.TICK,
        _value("nvmlDeviceGetCurrentClocksEventReasons"),
        _value("nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
    Query("mig_mode", Pace.SPARSE, _mig_mode),
    Query("fan_percent", Pace.SPARSE, _value("nvmlDeviceGetFanSpeed")),
    Query("power_limit_w", Pace.SPARSE, _value("nvmlDeviceGetEnforcedPowerLimit", divisor=1000)),
    Query("pcie_generation", Pace.SPARSE, _value("nvmlDeviceGetCurrPcieLinkGeneration")),
    Query("pcie_width", Pace.SPARSE, _value("nvmlDeviceGetCurrPcieLinkWidth")),
    Query("pcie_generation_max", Pace.ONCE, _value("nvmlDeviceGetMaxPcieLinkGeneration")),
    Query("pcie_width_max", Pace.ONCE, _value("nvmlDeviceGetMaxPcieLinkWidth")),
    PROCESSES,
)
"""Left out on purpose: nvmlDeviceGetPcieThroughput (blocks 20 ms a direction) and the graphics processes."""
INSTANCE_QUERIES = (MEMORY, PROCESSES)
"""The rest NVML refuses for a MIG instance, or answers for the whole GPU."""
IN_PLACE_OF_FIELDS = (
    Query("energy_mj", Pace.TICK, _value("nvmlDeviceGetTotalEnergyConsumption")),
    Query("power_w", Pace.TICK, _value("nvmlDeviceGetPowerUsage", divisor=1000)),
)
"""Asked only of a driver that does not give these readings as field values."""

ALL_LINKS = 0xFFFFFFFF
"""Scope of the NVLink counters that sums over the GPU's links."""
_ENTRY_LAYOUT = struct.Struct("=24xIIQ")
"""`nvmlFieldValue_t` of nvml.h: type, code and value, after field, scope, timestamp and latency. Taken apart in one
go, since each look at an attribute through the structures of the binding costs a microsecond."""
_BITS_BY_TYPE = {1: 32, 2: 64, 3: 64, 6: 16}
"""`nvmlValueType_t` of nvml.h, the unsigned ones, to the width of the value; no field here is a double or negative."""
UNSIGNED_LONG_LONG = 3
"""`nvmlValueType_t` of nvml.h."""


class NvmlField:
    """An entry of the batch, and the readings of `DeviceReading` it fills."""

    def __init__(
        self,
        names: str,
        *numbers: int,
        pace: Pace = Pace.TICK,
        scope: int = 0,
        scale: float = 1,
        wraps: bool = False,
        ullong: bool = False,
    ) -> None:
        """`numbers` are NVML_FI_* of nvml.h, the newest driver's first. `scale` is the factor from the driver's unit to
        ours; a whole number keeps the value whole. `wraps`: the driver's counter wraps around at the end of its type.
        `ullong`: only an unsigned long long is valid."""
        self.names, self.numbers = names.split(), numbers
        self.pace, self.scope, self.scale, self.wraps, self.ullong = pace, scope, scale, wraps, ullong


FIELDS = (
    NvmlField("power_violation_ns", 74, ullong=True),
    NvmlField("thermal_violation_ns", 75, ullong=True),
    NvmlField("sync_boost_violation_ns", 76, ullong=True),
    # From 269 since R580, from 251 in R575. In R570 and since R580 the numbers 251 to 253 are settings of power
    # smoothing, which answer with success and 32 bits.
    NvmlField("sw_thermal_slowdown_ns", 269, 251, ullong=True),
    NvmlField("hw_thermal_slowdown_ns", 270, 252, ullong=True),
    NvmlField("hw_power_brake_ns", 271, 253, ullong=True),
    NvmlField("memory_temperature_c", 82),
    NvmlField("energy_mj", 83),
    NvmlField("nvlink_tx_bytes", 138, scope=ALL_LINKS, scale=1024),
    NvmlField("nvlink_rx_bytes", 139, scope=ALL_LINKS, scale=1024),
    # nvmlDeviceGetPowerUsage gives the same average where this field is answered (nvml.h).
    NvmlField("power_w power_average_w", 185, scale=0.001),
    NvmlField("power_instant_w", 186, scale=0.001),
    NvmlField("pcie_tx_bytes", 197, wraps=True),
    NvmlField("pcie_rx_bytes", 198, wraps=True),
    NvmlField("ecc_corrected_errors", 3, pace=Pace.SPARSE),
    NvmlField("ecc_uncorrected_errors", 4, pace=Pace.SPARSE),
    NvmlField("remapped_rows_corrected", 142, pace=Pace.SPARSE),
    NvmlField("remapped_rows_uncorrected", 143, pace=Pace.SPARSE),
    NvmlField("remapped_rows_pending", 144, pace=Pace.SPARSE),
    NvmlField("remapped_rows_failed", 145, pace=Pace.SPARSE),
)
FIELD_READINGS = [name for field in FIELDS for name in field.names]
_FIRST_CAUSE = "sw_thermal_slowdown_ns"
"""The first of the three counters of single causes, whose numbers follow one another."""

Values = dict[str, Any]
"""Values by field of `DeviceReading`, None where the GPU gives none now."""
Reasons = dict[str, str]
"""The reasons of missing values by field."""
Entry = tuple[int, int, int]
"""The driver's answer about one field: the type of the value, NVML's code, the value's bits."""


class FieldCall:
    """One call for some fields: the array that the driver fills is made once, which takes as long as the call."""

    def __init__(self, nv: ModuleType, asked: Sequence[tuple[NvmlField, int]]) -> None:
        """`asked` are fields, each with the number to ask for."""
        self.asked = asked
        self._answers = (nv.c_nvmlFieldValue_t * len(asked))()
        for entry, (field, number) in zip(self._answers, asked, strict=True):
            entry.fieldId, entry.scopeId = number, field.scope
        self._blank = bytes(self._answers)

    def ask(self, nv: ModuleType, handle: Handle) -> list[Entry]:
        """The driver's answers, in order. Raises an error when the call as a whole fails."""
        # A field that the driver leaves out must not keep its previous answer.
        ctypes.memmove(self._answers, self._blank, len(self._blank))
        function = nv._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
        code = function(handle, ctypes.c_int32(len(self.asked)), ctypes.byref(self._answers))
        if code != 0:
            raise NvmlError(code)
        return list(_ENTRY_LAYOUT.iter_unpack(self._answers))


class FieldBatch:
    """The fields that one GPU answers, found by asking for all of them once, and their values each tick."""

    def __init__(self, nv: ModuleType, handle: Handle) -> None:
        """Raises NvmlError when the GPU is gone."""
        self.absent: Reasons = {}
        """Readings that the GPU does not give as field values, with the reasons."""
        self.cause_numbers: str | None = None
        """The field numbers of the counters of single causes; None without any."""
        self._calls: dict[bool, FieldCall] = {}
        """The call of a tick without (False) and with (True) the sparse fields; empty if no field is answered."""
        self._wrapping: dict[int, Unwrapped] = {}
        """The counters that wrap around, by field number."""
        asked = [(field, number) for field in FIELDS for number in field.numbers]
        try:
            entries = call(FieldCall(nv, asked).ask, nv, handle)
        except NvmlError as error:
            self.absent = dict.fromkeys(("throttle_counters", *FIELD_READINGS), field_failure(error))
            return
        numbers: dict[NvmlField, int] = {}
        for (field, number), entry in zip(asked, entries, strict=True):
            if field not in numbers and _is_usable(field, entry):
                numbers[field] = number
        for (field, number), entry in zip(asked, entries, strict=True):
            if field not in numbers:
                self.absent |= {name: self.absent.get(name, _failure_text(number, entry)) for name in field.names}
            elif field.names == [_FIRST_CAUSE]:
                self.cause_numbers = f"{numbers[field]}-{numbers[field] + 2}"
        if self.cause_numbers is None:
            # Without counters their field numbers are missing for the same reason.
            self.absent["throttle_counters"] = self.absent[_FIRST_CAUSE]
        for sparse in (False, True):
            due = [(field, number) for field, number in numbers.items() if sparse or field.pace is Pace.TICK]
            if due:
                self._calls[sparse] = FieldCall(nv, due)

    def read(self, nv: ModuleType, handle: Handle, *, sparse: bool) -> tuple[Values, Reasons]:
        """The values of the due fields, by one call. Raises NvmlError when the GPU or the library is gone."""
        values: Values = {}
        reasons: Reasons = {}
        if (due := self._calls.get(sparse)) is None:
            return values, reasons
        try:
            entries = call(due.ask, nv, handle)
        except NvmlError as error:
            names = [name for field, _ in due.asked for name in field.names]
            return dict.fromkeys(names), dict.fromkeys(names, field_failure(error))
        for (field, number), entry in zip(due.asked, entries, strict=True):
            kind, code, raw = entry
            if code != 0 or kind not in _BITS_BY_TYPE:
                reasons |= dict.fromkeys(field.names, _failure_text(number, entry))
                values |= dict.fromkeys(field.names)
                continue
            value: float = raw & ((1 << _BITS_BY_TYPE[kind]) - 1)
            if field.wraps:
                value = self._wrapping.setdefault(number, Unwrapped()).follow(raw, _BITS_BY_TYPE[kind])
            elif field.scale != 1:
                # The driver's thousandths, without the dust of their product.
                value = round(value * field.scale, 3)
            for name in field.names:
                values[name] = value
        return values, reasons


class Unwrapped:
    """A counter that continues when the driver's wraps around to 0.

    It counts at most one wrap-around between two readings: 32 bits of bytes wrap in 0.13 s at 32 GB/s, so a rate from
    such a counter once a second is a lower bound.
    """

    def __init__(self) -> None:
        self._last = self._total = 0

    def follow(self, raw: int, bits: int) -> int:
        """The running total after this reading of a counter of `bits` bits; the first reading is its start."""
        raw &= (1 << bits) - 1
        if raw >= self._last:
            self._total += raw - self._last
        elif self._last < 1 << 32:
            self._total += raw - self._last + (1 << min(bits, 32))
        self._last = raw
        return self._total


def _is_usable(field: NvmlField, entry: Entry) -> bool:
    """True if the entry holds a value or a passing failure; the call succeeds even for unknown fields."""
    kind, code, _ = entry
    if code != 0:
        return code not in binding.LASTING
    return kind == UNSIGNED_LONG_LONG if field.ullong else kind in _BITS_BY_TYPE


def _failure_text(number: int, entry: Entry) -> str:
    """The reason that an entry holds no value. Raises NvmlError when the GPU or the library is gone."""
    _, code, _ = entry
    return field_failure(NvmlError(code)) if code != 0 else f"this driver means something else by field {number}"


class Device:
    """A GPU, or a MIG instance. Not safe to share between threads; fatal NVML errors pass through."""

    def __init__(self, index: int, uuid: str | None) -> None:
        self.index = index
        self.uuid = uuid
        self.name: str | None = None
        self.uuid_failure: str | None = None
        """The reason that a GPU which answers has no UUID; None if it has."""
        self.error: str | None = None
        """The reason that the GPU does not answer, or None."""
        self.lost = False
        """True while initializing NVML again may bring the GPU back."""
        self.handle: Handle = None
        """NVML's, valid until the next initialization."""
        self.batch: FieldBatch | None = None
        """None until the GPU was probed, and for a MIG instance."""
        self.is_probed = False
        self._queries: list[tuple[Query, Ask]] = []
        """The queries with an answer that holds for a while only, each with the call that gives it."""
        self.absent: Reasons = {}
        """The fields that the GPU never gives, with the reasons."""
        self._values: Values = {}
        """The last value of each reading."""
        self._failures: Reasons = {}
        """The reasons of the values that the last reading did not get."""
        self._last_reason_bits = 0

    def attach(self, nv: ModuleType, handle: Handle) -> None:
        """Take a fresh handle, and probe the GPU's readings."""
        self.handle, self.is_probed = handle, False
        self._queries, self.absent, self._values, self._failures = [], {}, {}, {}
        if is_instance(self.uuid):
            whole_gpu = [query for query in QUERIES if query not in INSTANCE_QUERIES]
            names = [*FIELD_READINGS, *(name for query in whole_gpu for name in query.fields)]
            self.absent = dict.fromkeys(names, binding.OF_THE_WHOLE_GPU)
            self._probe(nv, INSTANCE_QUERIES)
        else:
            self.batch = FieldBatch(nv, handle)
            self.absent = self.batch.absent
            by_function = [query for query in IN_PLACE_OF_FIELDS if self.absent.pop(query.fields[0], None) is not None]
            self._take(*self.batch.read(nv, handle, sparse=True))
            self._probe(nv, [*QUERIES, *by_function])
            if "throttle_reasons" not in self.absent:
                for name in unreported_reasons(nv, handle):
                    self.absent[f"throttle_reasons.{name}"] = binding.UNREPORTED
            self._explain()
        self.name, name_failure = text_or_reason(binding.name_of, nv, handle)
        unknown = {"uuid": self.uuid_failure, "name": name_failure}
        self.absent |= {name: reason for name, reason in unknown.items() if reason is not None}
        self.is_probed, self.error, self.lost = True, None, False

    def fail(self, sentence: str, *, lost: bool) -> None:
        """Mark the GPU as not answering; `lost` when it may come back."""
        self.error, self.lost = sentence, lost

    def failed_reading(self, sentence: str) -> DeviceReading:
        """The reading of a GPU that does not answer: its identity and the error."""
        return DeviceReading(index=self.index, uuid=self.uuid, name=self.name, error=sentence)

    def read(self, nv: ModuleType, t_ns: int, *, sparse: bool) -> tuple[DeviceReading, Reasons]:
        """The reading at `t_ns`, with `sparse` its slow parts too, and the reasons of the missing parts by field."""
        values, failures = ({}, {}) if self.batch is None else self.batch.read(nv, self.handle, sparse=sparse)
        for query, ask in self._queries:
            if sparse or query.pace is Pace.TICK:
                try:
                    values.update(zip(query.fields, call(ask, nv, self.handle), strict=True))
                except NvmlError as error:
                    values.update(dict.fromkeys(query.fields))
                    failures |= dict.fromkeys(query.fields, reading_failure(error))
        self._take(values, failures)
        values = dict(self._values)
        reasons = self.absent | self._failures
        if (bits := values.get("throttle_reasons")) is not None:
            values["throttle_reasons"] = throttle.decode(throttle.believed(bits, self._last_reason_bits))
            self._last_reason_bits = bits
        if values.get("degrees_to_slowdown_c") is None:
            values["degrees_to_slowdown_c"] = degrees_by_limits(values)
            if values["degrees_to_slowdown_c"] is not None:
                reasons.pop("degrees_to_slowdown_c", None)
            elif "temperature_c" in reasons:
                # The limits are known, and only the temperature is missing from the margin.
                reasons.setdefault("degrees_to_slowdown_c", reasons["temperature_c"])
        reading = DeviceReading(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            t_ns=t_ns,
            throttle_counters=None if self.batch is None else self.batch.cause_numbers,
            **values,
        )
        return reading, reasons

    def _take(self, values: Values, failures: Reasons) -> None:
        """Keep fresh values, without the impossible ones, and the reasons of the missing ones."""
        failures = failures | drop_impossible(values)
        self._values |= values
        if self._failures or failures:
            kept = {name: why for name, why in self._failures.items() if name.partition(".")[0] not in values}
            self._failures = kept | failures

    def _probe(self, nv: ModuleType, queries: Collection[Query]) -> None:
        """Make each call once, to know those that the GPU answers."""
        values: Values = {}
        failures: Reasons = {}
        for query in queries:
            reasons: list[str] = []
            for ask in query.asks:
                try:
                    values.update(zip(query.fields, call(ask, nv, self.handle), strict=True))
                except NvmlError as error:
                    reasons.append(reading_failure(error))
                    is_absent = error.value in binding.LASTING
                else:
                    is_absent, reasons = False, []
                if not is_absent:
                    break
            if not is_absent and query.pace is not Pace.ONCE:
                self._queries.append((query, ask))
            if reasons:
                # A reason about the reading is worth more than one about an unknown call.
                telling = [reason for reason in reasons if reason not in binding.TOO_OLD_REASONS]
                failed = self.absent if is_absent else failures
                failed |= dict.fromkeys(query.fields, [*telling, *reasons][0])
        self._take(values, failures)

    def _explain(self) -> None:
        """Replace "not supported" by the cause where it is known."""
        for name, reason in self.absent.items():
            if reason == binding.UNSUPPORTED:
                if name in MEMORY.fields:
                    self.absent[name] = binding.UNIFIED_MEMORY
                elif name.startswith("ecc_"):
                    self.absent[name] = binding.NO_ECC
                elif "utilization" in name and self._values.get("mig_mode"):
                    self.absent[name] = binding.UNDER_MIG
        if degrees_by_limits(self._values | {"temperature_c": 0}) is not None:
            self.absent.pop("degrees_to_slowdown_c", None)


class DeviceList:
    """Every GPU that was ever listed: a known one never vanishes silently."""

    def __init__(self, instances: Collection[str]) -> None:
        """`instances` are UUIDs of MIG instances that follow the GPUs."""
        self.devices: list[Device] = []
        self._instances = tuple(instances)

    def find(self, nv: ModuleType) -> dict[Device, Handle]:
        """Ask for the driver's list, add new GPUs and mark missing ones; return the handles of those that answer.

        Raises NvmlError when the library fails.
        """
        handles: dict[Device, Handle] = {}
        seen_indexes: set[int] = set()
        asks = [partial(call, lambda n: nv.nvmlDeviceGetHandleByIndex(n), n) for n in range(gpu_count(nv))]
        asks += [partial(_handle_of, nv, uuid) for uuid in self._instances]
        for position, ask in enumerate(asks):
            device = None
            try:
                handle = ask()
                uuid, reason = text_or_reason(binding.uuid_of, nv, handle)
                if uuid is not None and uuid in (known.uuid for known in handles):
                    uuid, reason = None, f"the driver gives {uuid} to two GPUs"
                device = self._identify(position, uuid)
                device.uuid_failure = None if device.uuid else reason
                handles[device] = handle
            except NvmlError as error:
                if error.value in binding.LIBRARY_FAILURES:
                    raise
                device = device or self._identify(position, None)
                lost = error.value in binding.DEVICE_FAILURES
                device.fail(binding.device_failure(error.value, str(error)), lost=lost)
            seen_indexes.add(device.index)
        for device in self.devices:
            if device.index not in seen_indexes:
                device.fail(binding.VANISHED, lost=True)
        return handles

    def find_lost(self, nv: ModuleType) -> dict[Device, Handle]:
        """The handles of the lost GPUs, without another initialization; empty if not all of them have one."""
        try:
            return {device: _handle_of(nv, device.uuid or "") for device in self.devices if device.lost}
        except NvmlError:
            return {}

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


def _handle_of(nv: ModuleType, uuid: str) -> Handle:
    """The handle of a GPU or MIG instance. Raises NvmlError."""
    return call(lambda: nv.nvmlDeviceGetHandleByUUID(uuid.encode()))
