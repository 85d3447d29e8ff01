"""The readings that one GPU answers, found by asking for each of them once."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import failures
from trainfast_runner.machine.telemetry.failures import NvmlError
from trainfast_runner.machine.telemetry.field_values import CAUSE_COUNTERS, FIELDS, FieldBatch
from trainfast_runner.machine.telemetry.plausible import drop_impossible
from trainfast_runner.machine.telemetry.queries import (
    ENERGY_BY_FUNCTION,
    QUERIES,
    Ask,
    Handle,
    Pace,
    Query,
    unreported_reasons,
)
from trainfast_runner.machine.telemetry.slowdown import degrees_by_limits
from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.tick import is_instance

_THROTTLE_REASONS = next(query for query in QUERIES if "throttle_reasons" in query.fields)
_INSTANCE_QUERIES = tuple(query for query in QUERIES if {"memory_used_bytes", "processes"} & set(query.fields))
"""The rest NVML refuses for a MIG instance, or answers for the whole GPU."""
_PACES = {name: query.pace for query in (*QUERIES, ENERGY_BY_FUNCTION) for name in query.fields}
"""The paces of the readings by function."""


@dataclass
class Capabilities:
    """The calls that one GPU answers, and the reasons of the readings that it never gives."""

    queries: dict[Query, Ask] = field(default_factory=dict)
    """The queries with an answer, each with the call that gives it."""
    batch: FieldBatch = field(default_factory=FieldBatch)
    """The field values with an answer, asked for in one call."""
    probed: dict[str, Any] = field(default_factory=dict)
    """The answers to the probe of the readings that not every tick asks for."""
    probe_failures: dict[str, str] = field(default_factory=dict)
    """The reasons of the sparse readings that the probe did not get; later ticks ask again."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """The fields of `DeviceReading` that no query answers, with the reasons."""
    due: dict[bool, list[tuple[Query, Ask]]] = field(init=False)
    """The queries of a tick without (False) and with (True) the sparse ones."""
    sparse_names: list[str] = field(init=False)
    """The fields that the sparse queries and field values give."""
    absent: dict[str, str] = field(init=False)
    """Every field that the GPU never gives, with the reason."""
    ask_throttle_reasons: Ask | None = field(init=False)
    has_uncounted_cause: bool = field(init=False)
    """True if a cause of throttling that drivers count has no counter here."""

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Derive the query lists and the absent fields of a tick from `queries` and `batch`."""
        every_tick = [(query, ask) for query, ask in self.queries.items() if query.pace is Pace.TICK]
        sparse = [(query, ask) for query, ask in self.queries.items() if query.pace is Pace.SPARSE]
        self.due = {False: every_tick, True: every_tick + sparse}
        self.sparse_names = [name for query, _ in sparse for name in query.fields] + self.batch.sparse_names
        self.absent = self.batch.absent | self.unsupported
        self.ask_throttle_reasons = self.queries.get(_THROTTLE_REASONS)
        counted_names = {field.name for field in self.batch.answered}
        self.has_uncounted_cause = any(
            cause.policy_counter not in counted_names
            and not (cause.reason_counters and counted_names.issuperset(cause.reason_counters))
            for cause in CAUSES
            if cause.policy_counter is not None
        )

    def drop_counter(self, name: str, reason: str) -> None:
        """Stop asking for a counter; if it moved together with others, try the next field numbers for all of them."""
        if name in CAUSE_COUNTERS:
            self.batch.use_spare(dict.fromkeys(CAUSE_COUNTERS, reason))
        else:
            self.batch.give_up(name, reason)
        if name in ENERGY_BY_FUNCTION.fields:
            self.queries.pop(ENERGY_BY_FUNCTION, None)
        self.refresh()


def probe(nv: ModuleType, handle: Handle, uuid: str | None) -> Capabilities:
    """Ask a GPU, or a MIG instance, for every reading once. Raises NvmlError when the GPU or the library is gone."""
    capabilities = Capabilities()
    if is_instance(uuid):
        _probe_instance(nv, handle, capabilities)
    else:
        _probe_gpu(nv, handle, capabilities)
    capabilities.refresh()
    return capabilities


def _probe_gpu(nv: ModuleType, handle: Handle, capabilities: Capabilities) -> None:
    batch, unsupported = capabilities.batch, capabilities.unsupported
    capabilities.probed |= batch.probe(nv, handle)
    for query in QUERIES:
        _probe_query(nv, handle, query, capabilities)
    if batch.absent.pop("energy_mj", None) is not None:
        _probe_query(nv, handle, ENERGY_BY_FUNCTION, capabilities)
    if "throttle_reasons" not in unsupported:
        for name in unreported_reasons(nv, handle):
            unsupported[f"throttle_reasons.{name}"] = failures.UNREPORTED
    _drop_impossible(capabilities)
    _explain(capabilities)


def _probe_instance(nv: ModuleType, handle: Handle, capabilities: Capabilities) -> None:
    """Probe a MIG instance's own readings; the rest is absent."""
    whole_gpu_queries = [query for query in (*QUERIES, ENERGY_BY_FUNCTION) if query not in _INSTANCE_QUERIES]
    names = [
        *(name for query in whole_gpu_queries for name in query.fields),
        *CAUSE_COUNTERS,
        *(field.name for field in FIELDS),
    ]
    capabilities.unsupported |= dict.fromkeys(names, failures.OF_THE_WHOLE_GPU)
    for query in _INSTANCE_QUERIES:
        _probe_query(nv, handle, query, capabilities)
    _drop_impossible(capabilities)


def _probe_query(nv: ModuleType, handle: Handle, query: Query, capabilities: Capabilities) -> None:
    reasons: list[str] = []
    transient: Ask | None = None
    for ask in query.asks:
        try:
            answer = nv.call(ask, nv, handle)
        except NvmlError as error:
            if failures.is_fatal(error.value):
                raise
            if error.value in failures.TRANSIENT and query.pace is not Pace.ONCE:
                transient = transient or ask
            reasons.append(failures.reading_failure(error.value, str(error)))
        else:
            capabilities.queries[query] = ask
            capabilities.probed.update(zip(query.fields, answer, strict=True))
            return
    # A reason about the reading is worth more than one about an unknown call.
    telling_reasons = [reason for reason in reasons if reason not in failures.TOO_OLD_REASONS]
    failed = dict.fromkeys(query.fields, [*telling_reasons, *reasons][0])
    if transient is None:
        capabilities.unsupported.update(failed)
    else:
        capabilities.queries[query] = transient
        if query.pace is Pace.SPARSE:
            capabilities.probe_failures.update(failed)


def _drop_impossible(capabilities: Capabilities) -> None:
    """Drop the probed values that cannot be, and those that every tick asks for again."""
    for name, reason in drop_impossible(capabilities.probed).items():
        pace = _PACES.get(name, Pace.SPARSE)  # field values that the probe keeps are sparse, and so are processes
        if pace is Pace.ONCE:
            capabilities.unsupported[name] = reason
        elif pace is Pace.SPARSE:
            capabilities.probe_failures[name] = reason
    probed = capabilities.probed.items()
    capabilities.probed = {name: value for name, value in probed if _PACES.get(name) is not Pace.TICK}


def _explain(capabilities: Capabilities) -> None:
    """Replace "not supported" by the cause where it is known."""
    unsupported, batch = capabilities.unsupported, capabilities.batch
    not_supported = failures.reading_failure(failures.NOT_SUPPORTED, "")
    if unsupported.get("memory_total_bytes") == not_supported:
        memory_fields = ("memory_used_bytes", "memory_total_bytes", "memory_free_bytes")
        unsupported.update(dict.fromkeys(memory_fields, failures.UNIFIED_MEMORY))
    if capabilities.probed.get("mig_mode"):
        for name, reason in unsupported.items():
            if reason == not_supported and "utilization" in name:
                unsupported[name] = failures.UNDER_MIG
    for name in ("ecc_corrected_errors", "ecc_uncorrected_errors"):
        if batch.absent.get(name) == not_supported:
            batch.absent[name] = failures.NO_ECC
    if unsupported.get("degrees_to_slowdown_c") in failures.TOO_OLD_REASONS and "slowdown_temperature_c" in unsupported:
        # An older driver computes the margin from the thresholds, so the missing threshold is the reason.
        unsupported["degrees_to_slowdown_c"] = unsupported["slowdown_temperature_c"]
    if degrees_by_limits(capabilities.probed | {"temperature_c": 0}) is not None:
        unsupported.pop("degrees_to_slowdown_c", None)
