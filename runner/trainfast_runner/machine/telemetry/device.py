"""One GPU seen through NVML: its identity, whether it answers, and its reading a tick."""

from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import failures
from trainfast_runner.machine.telemetry.binding import as_text, text_or_reason
from trainfast_runner.machine.telemetry.capabilities import Capabilities, probe
from trainfast_runner.machine.telemetry.counter_checks import CounterChecks
from trainfast_runner.machine.telemetry.failures import NvmlError
from trainfast_runner.machine.telemetry.plausible import drop_impossible, refusal
from trainfast_runner.machine.telemetry.queries import Handle
from trainfast_runner.machine.telemetry.slowdown import degrees_by_limits
from trainfast_runner.records.tick import DeviceReading


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
        self._checks = CounterChecks()
        self._kept: dict[str, Any] = {}
        """Values that hold until they are read again: of the probe, and of the last sparse reading."""
        self._kept_failures: dict[str, str] = {}
        """The reasons of the values that the last sparse reading did not get."""

    @property
    def needs_reason_polls(self) -> bool:
        """True if only its throttle reasons, read often, show for how long a cause throttles it."""
        capabilities = self.capabilities
        if self.error is not None or capabilities is None or capabilities.ask_throttle_reasons is None:
            return False
        return capabilities.has_uncounted_cause or self._checks.has_suspect

    def poll_throttle_reasons(self, nv: ModuleType, t_ns: int) -> None:
        """Read the throttle reasons alone, between two readings. Raises NvmlError."""
        assert self.capabilities is not None
        assert self.capabilities.ask_throttle_reasons is not None
        (bits,) = nv.call(self.capabilities.ask_throttle_reasons, nv, self.handle)
        if refusal("throttle_reasons", bits) is None:
            self._checks.see_bits(bits, t_ns)

    def attach(self, nv: ModuleType, handle: Handle) -> None:
        """Take a fresh handle, and probe the GPU's readings unless they are known."""
        self.handle = handle
        self._checks.start_again()
        if self.capabilities is not None:
            self.capabilities.batch.start_again()
            if self.error is None:
                return
        self.name, self._name_failure = text_or_reason(nv, lambda: as_text(nv.nvmlDeviceGetName(handle)))
        self.capabilities = probe(nv, handle, self.uuid)
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
        reasons = self._checks.decode_reasons(values)
        for name, reason in self._checks.drop_implausible(values, reasons, t_ns).items():
            capabilities.drop_counter(name, reason)
        if reasons is not None and self.needs_reason_polls:
            values["throttled_sampled_ns"] = self._checks.throttled_ns(reasons, t_ns)
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
        return reading, self._identity_failures() | capabilities.absent | self._kept_failures | failure_by_field

    def _identity_failures(self) -> dict[str, str]:
        reasons = {"uuid": self.uuid_failure, "name": self._name_failure}
        return {name: reason for name, reason in reasons.items() if reason is not None}

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
                if failures.is_fatal(error.value):
                    raise
                failure_by_field.update(dict.fromkeys(query.fields, failures.reading_failure(error.value, str(error))))
                values.update(dict.fromkeys(query.fields))
        field_values, field_failures = capabilities.batch.read(nv, self.handle, sparse=sparse)
        values |= field_values
        return values, failure_by_field | field_failures | drop_impossible(values)
