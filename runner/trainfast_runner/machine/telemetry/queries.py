"""NVML readings of a GPU: by function, each with its calls in order of preference, and the field values.

One nvmlDeviceGetFieldValues a tick reads all field values (`NVML_FI_*`): it takes the driver's lock once, where a
function for each reading would take it a dozen times.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import binding, throttle
from trainfast_runner.machine.telemetry.binding import NvmlError
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
        # What a driver leaves out must not look like the answer of the time before.
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
