"""One GPU seen through NVML: its identity, whether it answers, and its reading a tick.

Readings come by function, each with its calls in order of preference, and as field values. One
nvmlDeviceGetFieldValues a tick reads all field values (`NVML_FI_*`): it takes the driver's lock once, where a function
for each reading would take it a dozen times.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import binding, throttle
from trainfast_runner.machine.telemetry.binding import NvmlError, as_text, gpu_count, text_or_reason, uuid_of
from trainfast_runner.machine.telemetry.plausible import drop_impossible
from trainfast_runner.machine.telemetry.throttle import degrees_by_limits
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, is_instance

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

ALL_LINKS = 0xFFFFFFFF
"""Scope of the NVLink counters that sums over the GPU's links."""
_ENTRY_LAYOUT = struct.Struct("=24xIIQ")
"""`nvmlFieldValue_t` of nvml.h: type, code and value, after field, scope, timestamp and latency. Taken apart in one
go, since each look at an attribute through the structures of the binding costs a microsecond."""
_BITS_BY_TYPE = {1: 32, 2: 64, 3: 64, 6: 16}
"""`nvmlValueType_t` of nvml.h, the unsigned ones, to the width of the value; no field here is a double or negative."""
UNSIGNED_LONG_LONG = 3
"""`nvmlValueType_t` of nvml.h."""


@dataclass(frozen=True)
class NvmlField:
    """One entry of the batch and the field of `DeviceReading` it fills."""

    name: str
    number: int
    pace: Pace = Pace.TICK
    scope: int = 0
    scale: float = 1
    """Factor from the driver's unit to ours; a whole number keeps the value whole."""
    wraps: bool = False
    """True if the driver's counter wraps around at the end of its type."""
    ullong: bool = False
    """True if only an unsigned long long is valid."""


FIELDS: tuple[NvmlField, ...] = (
    NvmlField("power_violation_ns", 74, ullong=True),
    NvmlField("thermal_violation_ns", 75, ullong=True),
    NvmlField("sync_boost_violation_ns", 76, ullong=True),
    NvmlField("memory_temperature_c", 82),
    NvmlField("energy_mj", 83),
    NvmlField("nvlink_tx_bytes", 138, scope=ALL_LINKS, scale=1024),
    NvmlField("nvlink_rx_bytes", 139, scope=ALL_LINKS, scale=1024),
    NvmlField("power_average_w", 185, scale=0.001),
    NvmlField("power_instant_w", 186, scale=0.001),
    NvmlField("pcie_tx_bytes", 197, wraps=True),
    NvmlField("pcie_rx_bytes", 198, wraps=True),
    NvmlField("ecc_corrected_errors", 3, Pace.SPARSE),
    NvmlField("ecc_uncorrected_errors", 4, Pace.SPARSE),
    NvmlField("remapped_rows_corrected", 142, Pace.SPARSE),
    NvmlField("remapped_rows_uncorrected", 143, Pace.SPARSE),
    NvmlField("remapped_rows_pending", 144, Pace.SPARSE),
    NvmlField("remapped_rows_failed", 145, Pace.SPARSE),
)

CAUSE_COUNTERS = ("sw_thermal_slowdown_ns", "hw_thermal_slowdown_ns", "hw_power_brake_ns")
"""The counters of single causes. Their numbers moved between drivers, and the old ones now mean something else."""
CAUSE_NUMBERS: tuple[tuple[str, int], ...] = (("269-271", 269), ("251-253", 251))
"""First field number of the cause counters by driver, the likeliest first: 269 since R580, 251 in R575. In R570 and
since R580 the numbers 251 to 253 are settings of power smoothing, which answer with success and 32 bits."""


Entry = tuple[int, int, int]
"""The driver's answer about one field: the type of the value, NVML's code, the value's bits."""


class FieldCall:
    """One call for some fields: the array that the driver fills is made once, which takes as long as the call."""

    def __init__(self, nv: ModuleType, fields: list[NvmlField]) -> None:
        self.fields = fields
        self._answers = (nv.c_nvmlFieldValue_t * len(fields))()
        for entry, field in zip(self._answers, fields, strict=True):
            entry.fieldId, entry.scopeId = field.number, field.scope
        self._blank = bytes(self._answers)

    def ask(self, nv: ModuleType, handle: Handle) -> list[Entry]:
        """The driver's answers, in order. Raises NvmlError when the call as a whole fails."""
        # A field that the driver leaves out must not keep its previous answer.
        ctypes.memmove(self._answers, self._blank, len(self._blank))
        call = nv._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
        code = call(handle, ctypes.c_int32(len(self.fields)), ctypes.byref(self._answers))
        if code != 0:
            raise NvmlError(code)
        return list(_ENTRY_LAYOUT.iter_unpack(self._answers))


class FieldBatch:
    """The fields that one GPU answers, found by asking once, and their values each tick."""

    def __init__(self) -> None:
        self.answered: list[NvmlField] = []
        self.absent: dict[str, str] = {}
        """Fields that the GPU does not answer, with the reasons."""
        self.cause_numbers: str | None = None
        """The field numbers of the counters of single causes; None without any."""
        self._wrapping: dict[str, Unwrapped] = {}
        self._calls: dict[bool, FieldCall | None] = {}
        """The call of a tick without (False) and with (True) the sparse fields, made once; None if none is due."""

    @property
    def sparse_names(self) -> list[str]:
        """The answered fields that not every tick reads."""
        return [field.name for field in self.answered if field.pace is Pace.SPARSE]

    def probe(self, nv: ModuleType, handle: Handle) -> dict[str, Any]:
        """Ask for all fields once; return the values of the sparse ones. Raises NvmlError when the GPU is gone."""
        by_label = {
            label: [NvmlField(name, first_number + index, ullong=True) for index, name in enumerate(CAUSE_COUNTERS)]
            for label, first_number in CAUSE_NUMBERS
        }
        fields_to_ask = [*FIELDS, *(field for fields in by_label.values() for field in fields)]
        try:
            entries = dict(zip(fields_to_ask, FieldCall(nv, fields_to_ask).ask(nv, handle), strict=True))
        except NvmlError as error:
            if binding.is_fatal(error.value):
                raise
            names = [*CAUSE_COUNTERS, "throttle_counters", *(field.name for field in FIELDS)]
            self.absent = dict.fromkeys(names, binding.field_failure(error.value, str(error)))
            return {}
        usable = {field for field in fields_to_ask if _is_usable(field, entries[field])}
        self.cause_numbers = next((label for label, fields in by_label.items() if usable.issuperset(fields)), None)
        causes = by_label[self.cause_numbers] if self.cause_numbers else []
        self.answered = [*(field for field in FIELDS if field in usable), *causes]
        absent = [field for field in FIELDS if field not in usable]
        if not causes:
            likeliest, _ = CAUSE_NUMBERS[0]
            absent += by_label[likeliest]
        self.absent = {field.name: _failure_text(field, entries[field]) for field in absent}
        if not causes:
            # Without counters their field numbers are missing for the same reason.
            self.absent["throttle_counters"] = self.absent[CAUSE_COUNTERS[0]]
        sparse = [field for field in self.answered if field.pace is Pace.SPARSE]
        values, _ = self._decoded(sparse, [entries[field] for field in sparse])
        return values

    def start_again(self) -> None:
        """Expect no wrap-around at the next lower value: the driver may have reset its counters."""
        for counter in self._wrapping.values():
            counter.start_again()

    def read(self, nv: ModuleType, handle: Handle, *, sparse: bool) -> tuple[dict[str, Any], dict[str, str]]:
        """The values of the due fields, None where the GPU gives none now, and the reasons of those.

        Takes one call. Raises NvmlError when the GPU or the library is gone.
        """
        if sparse not in self._calls:
            due = [field for field in self.answered if sparse or field.pace is Pace.TICK]
            self._calls[sparse] = FieldCall(nv, due) if due else None
        call = self._calls[sparse]
        if call is None:
            return {}, {}
        try:
            entries = call.ask(nv, handle)
        except NvmlError as error:
            if binding.is_fatal(error.value):
                raise
            reason = binding.field_failure(error.value, str(error))
            names = [field.name for field in call.fields]
            return dict.fromkeys(names), dict.fromkeys(names, reason)
        return self._decoded(call.fields, entries)

    def _decoded(self, fields: list[NvmlField], entries: list[Entry]) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        failure_by_field: dict[str, str] = {}
        for field, (kind, code, raw) in zip(fields, entries, strict=True):
            bits = _BITS_BY_TYPE.get(kind)
            if code != 0:
                if binding.is_fatal(code):
                    raise NvmlError(code)
                values[field.name], failure_by_field[field.name] = None, binding.field_failure(code)
            elif bits is not None:
                raw &= (1 << bits) - 1
                if field.wraps:
                    raw = self._wrapping.setdefault(field.name, Unwrapped()).follow(raw, bits)
                # The driver's thousandths, without the dust of their product.
                values[field.name] = raw if field.scale == 1 else round(raw * field.scale, 3)
            else:
                values[field.name], failure_by_field[field.name] = None, _failure_text(field, (kind, code, raw))
        return values, failure_by_field


class Unwrapped:
    """A counter that continues when the driver's wraps around to 0.

    It counts at most one wrap-around between two readings: 32 bits of bytes wrap in 0.13 s at 32 GB/s, so a rate from
    such a counter once a second is a lower bound.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._total: int | None = None

    def start_again(self) -> None:
        """The next reading adds nothing, whatever it is."""
        self._last = None

    def follow(self, raw: int, bits: int) -> int:
        """The running total after this reading of a counter of `bits` bits; the first reading is its start."""
        if self._total is None:
            self._total = raw
        elif self._last is None:
            pass
        elif raw >= self._last:
            self._total += raw - self._last
        elif self._last < 1 << 32:
            self._total += raw - self._last + (1 << min(bits, 32))
        self._last = raw
        return self._total


def _is_usable(field: NvmlField, entry: Entry) -> bool:
    """True if the entry holds a value or a passing failure; the call succeeds even for unknown fields."""
    kind, code, _ = entry
    if code != 0:
        return code in binding.TRANSIENT
    return kind == UNSIGNED_LONG_LONG if field.ullong else kind in _BITS_BY_TYPE


def _failure_text(field: NvmlField, entry: Entry) -> str:
    _, code, _ = entry
    if code == 0:
        return f"this driver means something else by field {field.number}"
    return binding.field_failure(code)


_INSTANCE_QUERIES = tuple(query for query in QUERIES if {"memory_used_bytes", "processes"} & set(query.fields))
"""The rest NVML refuses for a MIG instance, or answers for the whole GPU."""
_PACES = {name: query.pace for query in (*QUERIES, ENERGY_BY_FUNCTION) for name in query.fields}
"""The paces of the readings by function."""


class Capabilities:
    """The calls that one GPU answers, and the reasons of the readings that it never gives: all are asked for once."""

    def __init__(self, nv: ModuleType, handle: Handle, uuid: str | None) -> None:
        """Probe a GPU, or a MIG instance. Raises NvmlError when the GPU or the library is gone."""
        self.batch = FieldBatch()
        """The field values with an answer, asked for in one call."""
        self.probed: dict[str, Any] = {}
        """The answers to the probe of the readings that not every tick asks for."""
        self.probe_failures: dict[str, str] = {}
        """The reasons of the sparse readings that the probe did not get; later ticks ask again."""
        self._unsupported: dict[str, str] = {}
        """The fields of `DeviceReading` that no query answers, with the reasons."""
        self.queries: list[tuple[Query, Ask]] = []
        """The queries with an answer, each with the call that gives it."""
        if is_instance(uuid):
            self._probe_instance(nv, handle)
        else:
            self._probe_gpu(nv, handle)
        every_tick = [query for query in self.queries if query[0].pace is Pace.TICK]
        sparse = [query for query in self.queries if query[0].pace is Pace.SPARSE]
        self.due = {False: every_tick, True: every_tick + sparse}
        """The queries of a tick without (False) and with (True) the sparse ones."""
        self.sparse_names = [name for query, _ in sparse for name in query.fields] + self.batch.sparse_names
        """The fields that the sparse queries and field values give."""
        self.absent = self.batch.absent | self._unsupported
        """Every field that the GPU never gives, with the reason."""

    def _probe_gpu(self, nv: ModuleType, handle: Handle) -> None:
        self.probed |= self.batch.probe(nv, handle)
        for query in QUERIES:
            self._probe_query(nv, handle, query)
        if self.batch.absent.pop("energy_mj", None) is not None:
            self._probe_query(nv, handle, ENERGY_BY_FUNCTION)
        if "throttle_reasons" not in self._unsupported:
            for name in unreported_reasons(nv, handle):
                self._unsupported[f"throttle_reasons.{name}"] = binding.UNREPORTED
        self._drop_impossible()
        self._explain()

    def _probe_instance(self, nv: ModuleType, handle: Handle) -> None:
        """Probe a MIG instance's own readings; the rest is absent."""
        whole_gpu_queries = [query for query in (*QUERIES, ENERGY_BY_FUNCTION) if query not in _INSTANCE_QUERIES]
        names = (name for query in whole_gpu_queries for name in query.fields)
        all_names = [*names, *CAUSE_COUNTERS, *(field.name for field in FIELDS)]
        self._unsupported |= dict.fromkeys(all_names, binding.OF_THE_WHOLE_GPU)
        for query in _INSTANCE_QUERIES:
            self._probe_query(nv, handle, query)
        self._drop_impossible()

    def _probe_query(self, nv: ModuleType, handle: Handle, query: Query) -> None:
        reasons: list[str] = []
        transient: Ask | None = None
        for ask in query.asks:
            try:
                answer = nv.call(ask, nv, handle)
            except NvmlError as error:
                if binding.is_fatal(error.value):
                    raise
                if error.value in binding.TRANSIENT and query.pace is not Pace.ONCE:
                    transient = transient or ask
                reasons.append(binding.reading_failure(error.value, str(error)))
            else:
                self.queries.append((query, ask))
                self.probed.update(zip(query.fields, answer, strict=True))
                return
        # A reason about the reading is worth more than one about an unknown call.
        telling_reasons = [reason for reason in reasons if reason not in binding.TOO_OLD_REASONS]
        failed = dict.fromkeys(query.fields, [*telling_reasons, *reasons][0])
        if transient is None:
            self._unsupported.update(failed)
        else:
            self.queries.append((query, transient))
            if query.pace is Pace.SPARSE:
                self.probe_failures.update(failed)

    def _drop_impossible(self) -> None:
        """Drop the probed values that cannot be, and those that every tick asks for again."""
        for name, reason in drop_impossible(self.probed).items():
            pace = _PACES.get(name, Pace.SPARSE)  # field values that the probe keeps are sparse, and so are processes
            if pace is Pace.ONCE:
                self._unsupported[name] = reason
            elif pace is Pace.SPARSE:
                self.probe_failures[name] = reason
        self.probed = {name: value for name, value in self.probed.items() if _PACES.get(name) is not Pace.TICK}

    def _explain(self) -> None:
        """Replace "not supported" by the cause where it is known."""
        unsupported, absent_fields = self._unsupported, self.batch.absent
        not_supported = binding.reading_failure(binding.NOT_SUPPORTED, "")
        if unsupported.get("memory_total_bytes") == not_supported:
            memory_fields = ("memory_used_bytes", "memory_total_bytes", "memory_free_bytes")
            unsupported.update(dict.fromkeys(memory_fields, binding.UNIFIED_MEMORY))
        if self.probed.get("mig_mode"):
            for name, reason in unsupported.items():
                if reason == not_supported and "utilization" in name:
                    unsupported[name] = binding.UNDER_MIG
        for name in ("ecc_corrected_errors", "ecc_uncorrected_errors"):
            if absent_fields.get(name) == not_supported:
                absent_fields[name] = binding.NO_ECC
        margin_failure, limit_failure = (
            unsupported.get(name) for name in ("degrees_to_slowdown_c", "slowdown_temperature_c")
        )
        if margin_failure in binding.TOO_OLD_REASONS and limit_failure is not None:
            # An older driver computes the margin from the thresholds, so the missing threshold is the reason.
            unsupported["degrees_to_slowdown_c"] = limit_failure
        if degrees_by_limits(self.probed | {"temperature_c": 0}) is not None:
            unsupported.pop("degrees_to_slowdown_c", None)


class Device:
    """A GPU, or a MIG instance. Not safe to share between threads; fatal NVML errors pass through."""

    def __init__(self, index: int, uuid: str | None) -> None:
        self.index = index
        self.uuid = uuid
        self.name: str | None = None
        self.uuid_failure: str | None = None
        self._name_failure: str | None = None
        """The reasons that a GPU which answers has no UUID or name, or None."""
        self.error: str | None = None
        """The reason that the GPU does not answer, or None."""
        self.lost = False
        """True while initializing NVML again may bring the GPU back."""
        self.handle: Handle = None
        """NVML's, valid until the next initialization."""
        self.capabilities: Capabilities | None = None
        """None until the GPU was probed."""
        self._last_reason_bits = 0
        self._kept: dict[str, Any] = {}
        """Values that hold until they are read again: of the probe, and of the last sparse reading."""
        self._kept_failures: dict[str, str] = {}
        """The reasons of the values that the last sparse reading did not get."""

    def attach(self, nv: ModuleType, handle: Handle) -> None:
        """Take a fresh handle, and probe the GPU's readings unless they are known."""
        self.handle = handle
        if self.capabilities is not None:
            self.capabilities.batch.start_again()
            if self.error is None:
                return
        self.name, self._name_failure = text_or_reason(nv, lambda: as_text(nv.nvmlDeviceGetName(handle)))
        self.capabilities = Capabilities(nv, handle, self.uuid)
        self._kept, self._kept_failures = self.capabilities.probed, self.capabilities.probe_failures
        self.error, self.lost = None, False

    def fail(self, sentence: str, *, lost: bool) -> None:
        """Mark the GPU as not answering; `lost` when it may come back."""
        self.error, self.lost = sentence, lost

    def failed_reading(self, sentence: str) -> DeviceReading:
        """The reading of a GPU that does not answer: its identity and the error."""
        return DeviceReading(index=self.index, uuid=self.uuid, name=self.name, error=sentence)

    def read(self, nv: ModuleType, t_ns: int, *, sparse: bool) -> tuple[DeviceReading, dict[str, str]]:
        """The reading at `t_ns`, with `sparse` its slow parts too, and the reasons of the missing parts by field."""
        capabilities = self.capabilities
        assert capabilities is not None
        values, failure_by_field = self._ask(nv, capabilities, sparse=sparse)
        if sparse:
            names = capabilities.sparse_names
            self._kept = self._kept | {name: values[name] for name in names if name in values}
            kept_failures = [item for item in failure_by_field.items() if item[0].partition(".")[0] in names]
            self._kept_failures = dict(kept_failures)
        if (bits := values.get("throttle_reasons")) is not None:
            values["throttle_reasons"] = throttle.decode(throttle.believed(bits, self._last_reason_bits))
            self._last_reason_bits = bits
        values = self._kept | values
        if values.get("degrees_to_slowdown_c") is None:
            values["degrees_to_slowdown_c"] = degrees_by_limits(values)
            if values["degrees_to_slowdown_c"] is not None:
                failure_by_field.pop("degrees_to_slowdown_c", None)
        reading = DeviceReading(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            t_ns=t_ns,
            throttle_counters=capabilities.batch.cause_numbers,
            **values,
        )
        identity = (("uuid", self.uuid_failure), ("name", self._name_failure))
        identity_failures = {name: reason for name, reason in identity if reason is not None}
        reasons = identity_failures | capabilities.absent | self._kept_failures | failure_by_field
        if reading.degrees_to_slowdown_c is None and "temperature_c" in reasons:
            # The limits are known, and only the temperature is missing from the margin.
            reasons.setdefault("degrees_to_slowdown_c", reasons["temperature_c"])
        return reading, reasons

    def _ask(
        self, nv: ModuleType, capabilities: Capabilities, *, sparse: bool
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The values of the due readings, None where the GPU gives none now, and the reasons of those."""
        values: dict[str, Any] = {}
        failure_by_field: dict[str, str] = {}
        for query, ask in capabilities.due[sparse]:
            try:
                values.update(zip(query.fields, nv.call(ask, nv, self.handle), strict=True))
            except NvmlError as error:
                if binding.is_fatal(error.value):
                    raise
                failure_by_field.update(dict.fromkeys(query.fields, binding.reading_failure(error.value, str(error))))
                values.update(dict.fromkeys(query.fields))
        field_values, field_failures = capabilities.batch.read(nv, self.handle, sparse=sparse)
        values |= field_values
        return values, failure_by_field | field_failures | drop_impossible(values)


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
        asks = [partial(nv.nvmlDeviceGetHandleByIndex, position) for position in range(gpu_count(nv))]
        asks += [partial(nv.nvmlDeviceGetHandleByUUID, uuid.encode()) for uuid in self._instances]
        for position, ask in enumerate(asks):
            device = None
            try:
                handle = ask()
                uuid, reason = text_or_reason(nv, partial(uuid_of, nv, handle))
                if uuid is not None and uuid in (known.uuid for known in handles):
                    uuid, reason = None, f"the driver gives {uuid} to two GPUs"
                device = self._identify(position, uuid)
                device.uuid_failure = None if device.uuid else reason
                handles[device] = handle
            except NvmlError as error:
                if error.value in binding.LIBRARY_FAILURES:
                    raise
                device = device or self._identify(position, None)
                device.fail(binding.device_failure(error.value, str(error)), lost=binding.may_pass(error.value))
            seen_indexes.add(device.index)
        for device in self.devices:
            if device.index not in seen_indexes:
                device.fail(binding.VANISHED, lost=True)
        return handles

    def find_lost(self, nv: ModuleType) -> dict[Device, Handle]:
        """The handles of the lost GPUs, without another initialization; empty if not all of them have one."""
        lost = [device for device in self.devices if device.lost]
        try:
            return {device: nv.nvmlDeviceGetHandleByUUID((device.uuid or "").encode()) for device in lost}
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
