"""One GPU: its capability table, found by asking each question once, and its reading a tick."""

from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import failures, throttle
from trainfast_runner.machine.telemetry.capabilities import (
    ENERGY_BY_FUNCTION,
    QUERIES,
    Ask,
    Handle,
    Pace,
    Query,
    unreported_reasons,
)
from trainfast_runner.machine.telemetry.counters import DurationCounter
from trainfast_runner.machine.telemetry.energy import EnergyCounter
from trainfast_runner.machine.telemetry.fields import CAUSE_COUNTERS, FIELDS, FieldBatch
from trainfast_runner.machine.telemetry.throttle import CAUSES, REASONS_OF_COUNTER, SampledReasons
from trainfast_runner.records.tick import DeviceReading, is_instance
from trainfast_runner.units import lowest

_THROTTLE_REASONS = next(query for query in QUERIES if "throttle_reasons" in query.fields)
_OF_AN_INSTANCE = tuple(query for query in QUERIES if {"memory_used_bytes", "processes"} & set(query.fields))
"""The rest NVML refuses for a MIG instance, or answers for the whole GPU."""
_SPARSE_FIELDS = frozenset(field.name for field in FIELDS if field.pace is Pace.SPARSE)


def is_fatal(code: int) -> bool:
    """True if an NVML code means that the GPU or the library is gone, not only one reading."""
    return code in failures.DEVICE_FAILURES or code in failures.LIBRARY_FAILURES


class Device:
    """A GPU seen through NVML. Not safe to share between threads; fatal NVML errors pass through."""

    def __init__(self, index: int, uuid: str | None) -> None:
        self.index = index
        self.uuid = uuid
        self.name: str | None = None
        self.error: str | None = None
        self.lost = False
        """True while initializing NVML again may bring the GPU back."""
        self.capabilities: dict[Query, Ask] = {}
        """The queries that this GPU answers, each with its call."""
        self.batch = FieldBatch()
        """The field values it answers, asked for in one call."""
        self._unsupported: dict[str, str] = {}
        self.handle: Handle = None
        """NVML's, valid until the next initialization."""
        self._kept: dict[str, Any] = {}
        self._sparse_failures: dict[str, str] = {}
        self._bits = 0
        self._counters: dict[str, DurationCounter] = {}
        self._energy = EnergyCounter()
        self._sampled = SampledReasons()
        self._due: dict[bool, list[tuple[Query, Ask]]] = {}
        self._unsupported_by_key: dict[str, str] | None = None
        self._uncounted: bool | None = None
        """True if a cause of throttling has no counter here; like the two above, computed when first needed."""

    @property
    def absent(self) -> dict[str, str]:
        """Fields that the GPU does not answer, with the reasons."""
        return self.batch.absent | self._unsupported

    @property
    def only_reasons(self) -> bool:
        """True if a cause of throttling has no trusted counter here, but shows in the reasons."""
        if _THROTTLE_REASONS not in self.capabilities:
            return False
        if self._uncounted is None:
            counted = {field.name for field in self.batch.answered}
            self._uncounted = any(
                cause.policy_counter not in counted and not counted.issuperset(cause.reason_counters)
                for cause in CAUSES
                if cause.policy_counter is not None
            )
        return self._uncounted or any(counter.suspect for counter in self._counters.values())

    def look(self, nv: ModuleType, t_ns: int) -> None:
        """Read the throttle reasons alone, between two readings. Raises NVMLError."""
        (bits,) = self.capabilities[_THROTTLE_REASONS](nv, self.handle)
        self._sampled.see(throttle.decode(bits), t_ns)

    def attach(self, nv: ModuleType, handle: Handle) -> None:
        """Take a fresh handle, and probe the GPU's readings unless they are known."""
        self.handle = handle
        # A driver that was loaded anew counts from the start again.
        self._counters = {}
        self._energy = EnergyCounter()
        self.batch.start_again()
        if self.capabilities and self.error is None:
            return
        self.name = as_text(nv.nvmlDeviceGetName(handle))
        self._probe(nv)
        self.error, self.lost = None, False

    def fail(self, sentence: str, *, lost: bool) -> None:
        """Mark the GPU as not answering; `lost` when it may come back."""
        self.error, self.lost = sentence, lost

    def failed_reading(self, sentence: str) -> DeviceReading:
        """The reading of a GPU that does not answer: its identity and the error."""
        return DeviceReading(index=self.index, uuid=self.uuid, name=self.name, error=sentence)

    def read(self, nv: ModuleType, t_ns: int, *, sparse: bool) -> tuple[DeviceReading, dict[str, str]]:
        """Read the GPU at `t_ns`, with `sparse` the slow readings too; returns the reading, and why parts are
        missing."""
        absent: dict[str, str] = {}
        values: dict[str, Any] = {}
        for query, ask in self._due_queries(sparse):
            try:
                values.update(zip(query.fields, ask(nv, self.handle), strict=True))
            except nv.NVMLError as error:
                if is_fatal(error.value):
                    raise
                reason = failures.reading(error.value, str(error))
                absent.update(dict.fromkeys(query.fields, reason))
                values.update(dict.fromkeys(query.fields))
            if query.pace is Pace.SPARSE:
                self._keep(query, values, absent)
        absent = self._sparse_failures | absent
        self._read_fields(nv, values, absent, sparse=sparse)
        self._decode_throttling(values, t_ns)
        missing = self._never_answered() if not absent else self._never_answered() | self._by_key(absent)
        return self._reading(t_ns, self._kept | values), missing

    def _keep(self, query: Query, values: dict[str, Any], absent: dict[str, str]) -> None:
        """Keep a sparse reading, or the reason of its failure, until the next one."""
        for field in query.fields:
            self._kept[field] = values[field]
            self._sparse_failures.pop(field, None)
            if field in absent:
                self._sparse_failures[field] = absent[field]

    def _due_queries(self, sparse: bool) -> list[tuple[Query, Ask]]:
        """The calls that are due, worked out once: a tick is to cost as little as it can."""
        if sparse not in self._due:
            self._due[sparse] = [
                (query, ask)
                for query, ask in self.capabilities.items()
                if query.pace is Pace.TICK or (sparse and query.pace is Pace.SPARSE)
            ]
        return self._due[sparse]

    def _never_answered(self) -> dict[str, str]:
        """Fields that this GPU never answers, by the keys of `Tick.missing`."""
        if self._unsupported_by_key is None:
            self._unsupported_by_key = self._by_key(self.absent)
        return self._unsupported_by_key

    def _by_key(self, reasons: dict[str, str]) -> dict[str, str]:
        return {f"gpu{self.index}.{field}": reason for field, reason in reasons.items()}

    def _reading(self, t_ns: int, values: dict[str, Any]) -> DeviceReading:
        if values.get("degrees_to_slowdown_c") is None:
            values["degrees_to_slowdown_c"] = _degrees_left(values)
        return DeviceReading(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            t_ns=t_ns,
            throttle_counters=self.batch.cause_numbers,
            **values,
        )

    def _read_fields(self, nv: ModuleType, values: dict[str, Any], absent: dict[str, str], *, sparse: bool) -> None:
        """Read the batch in one call, whose failure affects only its own readings."""
        try:
            values_read, codes = self.batch.read(nv, self.handle, sparse=sparse)
        except nv.NVMLError as error:
            if is_fatal(error.value):
                raise
            values_read, codes = {}, dict.fromkeys((field.name for field in self.batch.answered), error.value)
        for name, code in codes.items():
            if is_fatal(code):
                raise nv.NVMLError(code)
            absent[name] = failures.field(code)
        values.update(dict.fromkeys(codes) | values_read)
        if sparse:
            self._kept.update({name: values[name] for name in _SPARSE_FIELDS & values.keys()})

    def _decode_throttling(self, values: dict[str, Any], t_ns: int) -> None:
        """Turn raw throttle bits into names, and drop counters that misbehave."""
        bits = values.get("throttle_reasons")
        shown: set[str] | None = None
        if bits is not None:
            values["throttle_reasons"] = throttle.decode(throttle.believed(bits, self._bits))
            self._bits = bits
            shown = set(values["throttle_reasons"])
        for name, reasons in REASONS_OF_COUNTER.items():
            if values.get(name) is None:
                continue
            counter = self._counters.get(name)
            if counter is None:
                counter = self._counters[name] = DurationCounter(moved=name in CAUSE_COUNTERS)
            values[name] = counter.accept(values[name], t_ns, None if shown is None else bool(shown & reasons))
            if counter.distrust:
                self._distrust(name, counter.distrust, values)
        if values.get("energy_mj") is not None:
            values["energy_mj"] = self._energy.accept(values["energy_mj"], values.get("power_w"), t_ns)
            if self._energy.distrust:
                self._distrust_energy(self._energy.distrust)
        if shown is not None and self.only_reasons:
            self._sampled.see(shown, t_ns)
            values["throttled_sampled_ns"] = self._sampled.held_ns()

    def _distrust(self, name: str, why: str, values: dict[str, Any]) -> None:
        """Drop a nonsensical counter; of the three that moved together, drop all."""
        self._unsupported_by_key = self._uncounted = None
        if name not in CAUSE_COUNTERS:
            self.batch.give_up(name, why)
            return
        self.batch.use_spare(dict.fromkeys(CAUSE_COUNTERS, why))
        for cause in CAUSE_COUNTERS:
            values[cause] = None
            self._counters.pop(cause, None)

    def _distrust_energy(self, why: str) -> None:
        """Drop the energy counter, whichever call gives it."""
        self.batch.give_up("energy_mj", why)
        self.capabilities.pop(ENERGY_BY_FUNCTION, None)
        self._due, self._unsupported_by_key = {}, None

    def _probe(self, nv: ModuleType) -> None:
        """Ask for every reading once, and keep the calls that answered."""
        self.capabilities, self._unsupported, self._kept, self._counters = {}, {}, {}, {}
        self._due, self._unsupported_by_key, self._uncounted, self._sparse_failures = {}, None, None, {}
        self.batch = FieldBatch()
        if is_instance(self.uuid):
            self._probe_instance(nv)
            return
        try:
            values_read = self.batch.probe(nv, self.handle)
        except (nv.NVMLError, AttributeError, TypeError) as error:
            code = getattr(error, "value", None)
            if code is not None and is_fatal(code):
                raise
            reason = failures.BINDING_TOO_OLD if code is None else failures.field(code)
            names = [*CAUSE_COUNTERS, "throttle_counters", *(field.name for field in FIELDS)]
            self.batch = FieldBatch(absent=dict.fromkeys(names, reason))
            values_read = {}
        self._kept.update({name: values_read[name] for name in _SPARSE_FIELDS & values_read.keys()})
        for query in QUERIES:
            self._probe_query(nv, query)
        if "energy_mj" in self.batch.absent:
            del self.batch.absent["energy_mj"]
            self._probe_query(nv, ENERGY_BY_FUNCTION)
        for name in unreported_reasons(nv, self.handle) if "throttle_reasons" not in self._unsupported else ():
            self._unsupported[f"throttle_reasons.{name}"] = failures.UNREPORTED
        self._explain()

    def _probe_instance(self, nv: ModuleType) -> None:
        """Probe a MIG instance's own readings; the rest is absent."""
        names = [name for query in (*QUERIES, ENERGY_BY_FUNCTION) for name in query.fields]
        names += [*CAUSE_COUNTERS, *(field.name for field in FIELDS)]
        self._unsupported = dict.fromkeys(names, failures.OF_THE_WHOLE_GPU)
        for query in _OF_AN_INSTANCE:
            for name in query.fields:
                del self._unsupported[name]
            self._probe_query(nv, query)

    def _probe_query(self, nv: ModuleType, query: Query) -> None:
        reasons: list[str] = []
        for ask in query.asks:
            try:
                answer = ask(nv, self.handle)
            except nv.NVMLError as error:
                if is_fatal(error.value):
                    raise
                if error.value in failures.TRANSIENT:
                    self.capabilities[query] = ask
                    return
                reasons.append(failures.reading(error.value, str(error)))
            except (AttributeError, TypeError):
                # An old or foreign binding lacks the function, or its `version` argument.
                reasons.append(failures.BINDING_TOO_OLD)
            else:
                self.capabilities[query] = ask
                if query.pace is not Pace.TICK:
                    self._kept.update(zip(query.fields, answer, strict=True))
                return
        # A reason about the reading is worth more than one about an unknown call.
        telling = [reason for reason in reasons if reason not in failures.TOO_OLD]
        self._unsupported.update(dict.fromkeys(query.fields, [*telling, *reasons][0]))

    def _explain(self) -> None:
        """Replace "not supported" by the cause where it is known."""
        unsupported = failures.reading(failures.NOT_SUPPORTED, "")
        if self._unsupported.get("memory_total_bytes") == unsupported:
            memory = ("memory_used_bytes", "memory_total_bytes", "memory_free_bytes")
            self._unsupported.update(dict.fromkeys(memory, failures.UNIFIED_MEMORY))
        if self._kept.get("mig_mode"):
            under_mig = {
                name for name, reason in self._unsupported.items() if reason == unsupported and "utilization" in name
            }
            self._unsupported.update(dict.fromkeys(under_mig, failures.UNDER_MIG))
        for name in ("ecc_corrected_errors", "ecc_uncorrected_errors"):
            if self.batch.absent.get(name) == unsupported:
                self.batch.absent[name] = failures.NO_ECC
        if (
            self._unsupported.get("degrees_to_slowdown_c") in failures.TOO_OLD
            and "slowdown_temperature_c" in self._unsupported
        ):
            # An older driver has it from the thresholds, and of those it is this GPU that has none.
            self._unsupported["degrees_to_slowdown_c"] = self._unsupported["slowdown_temperature_c"]
        if _degrees_left(self._kept | {"temperature_c": 0}) is not None:
            self._unsupported.pop("degrees_to_slowdown_c", None)


def _degrees_left(values: dict[str, Any]) -> int | None:
    """Degrees Celsius to the lower of the two slowdown temperatures; None without either."""
    limit = lowest((values.get("gpu_max_temperature_c"), values.get("slowdown_temperature_c")))
    now: int | None = values.get("temperature_c")
    return None if now is None or limit is None else int(limit) - now


def as_text(value: str | bytes) -> str:
    """A string of NVML; bindings before 11.515 return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
