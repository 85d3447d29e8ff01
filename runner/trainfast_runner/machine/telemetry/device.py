"""One GPU seen through NVML: its identity, whether it answers, the readings it has, and its reading a tick."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import binding, throttle
from trainfast_runner.machine.telemetry.binding import NvmlError, as_text, gpu_count, text_or_reason, uuid_of
from trainfast_runner.machine.telemetry.plausible import drop_impossible
from trainfast_runner.machine.telemetry.queries import (
    CAUSE_COUNTERS,
    ENERGY_BY_FUNCTION,
    FIELDS,
    QUERIES,
    Ask,
    FieldBatch,
    Handle,
    Pace,
    Query,
    unreported_reasons,
)
from trainfast_runner.machine.telemetry.throttle import degrees_by_limits
from trainfast_runner.records.tick import DeviceReading, is_instance

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
