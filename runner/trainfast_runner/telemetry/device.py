"""One GPU: its capability table, found by asking each question once, and its reading a tick."""

from types import ModuleType
from typing import Any

from trainfast_runner.telemetry import failures, throttle
from trainfast_runner.telemetry.capabilities import QUERIES, Ask, Handle, Pace, Query
from trainfast_runner.telemetry.counters import DurationCounter
from trainfast_runner.telemetry.readings import DeviceReading

_VIOLATIONS = {"power_violation_ns": "power", "thermal_violation_ns": "thermal"}


def is_fatal(code: int) -> bool:
    """Whether an NVML code says that the GPU or the library is gone, not only one reading."""
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
        """What this GPU answers, and the call that it answered."""
        self.absent: dict[str, str] = {}
        """What it does not answer, and why."""
        self._handle: Handle = None
        self._kept: dict[str, Any] = {}
        self._bits = 0
        self._counters: dict[str, DurationCounter] = {}

    def attach(self, nv: ModuleType, handle: Handle) -> None:
        """Takes a fresh handle, and finds out what the GPU can tell unless that is known already."""
        self._handle = handle
        if self.capabilities and self.error is None:
            return
        self.name = as_text(nv.nvmlDeviceGetName(handle))
        self._probe(nv)
        self.error, self.lost = None, False

    def fail(self, sentence: str, *, lost: bool) -> None:
        """Marks the GPU as not answering; `lost` when it may come back."""
        self.error, self.lost = sentence, lost

    def failed_reading(self, sentence: str) -> DeviceReading:
        """What is still true of a GPU that does not answer: which one it is, and why."""
        return DeviceReading(index=self.index, uuid=self.uuid, name=self.name, error=sentence)

    def read(self, nv: ModuleType, t_ns: int, *, sparse: bool, missing: dict[str, str]) -> DeviceReading:
        """Asks what is due at `t_ns` (`sparse` includes the slow questions) and adds to `missing` what failed."""
        absent = dict(self.absent)
        values: dict[str, Any] = {}
        for query, ask in self.capabilities.items():
            if query.pace is Pace.ONCE or (query.pace is Pace.SPARSE and not sparse):
                continue
            try:
                values.update(zip(query.fields, ask(nv, self._handle), strict=True))
            except nv.NVMLError as error:
                if is_fatal(error.value):
                    raise
                reason = failures.reading(error.value, str(error))
                absent.update(dict.fromkeys(query.fields, reason))
                values.update(dict.fromkeys(query.fields))
            if query.pace is Pace.SPARSE:
                self._kept.update({field: values[field] for field in query.fields})
        self._judge(values, t_ns, absent)
        missing.update({f"gpu{self.index}.{field}": reason for field, reason in absent.items()})
        return DeviceReading(index=self.index, uuid=self.uuid, name=self.name, **(self._kept | values))

    def _judge(self, values: dict[str, Any], t_ns: int, absent: dict[str, str]) -> None:
        """Turns raw throttle bits into names, and drops duration counters that misbehave."""
        bits = values.get("throttle_reasons")
        if bits is not None:
            values["throttle_reasons"] = throttle.decode(throttle.believed(bits, self._bits))
            self._bits = bits
        kinds = {throttle.kind(name) for name in values.get("throttle_reasons") or ()}
        for field, kind in _VIOLATIONS.items():
            if values.get(field) is None:
                continue
            counter = self._counters.setdefault(field, DurationCounter())
            values[field] = counter.accept(values[field], t_ns, kind in kinds)
            if counter.distrust:
                absent[field] = self.absent[field] = counter.distrust
                self.capabilities = {q: a for q, a in self.capabilities.items() if field not in q.fields}

    def _probe(self, nv: ModuleType) -> None:
        """Asks every question of the table once, and keeps the calls that answered."""
        capabilities: dict[Query, Ask] = {}
        absent: dict[str, str] = {}
        kept: dict[str, Any] = {}
        for query in QUERIES:
            reasons: list[str] = []
            for ask in query.asks:
                try:
                    answer = ask(nv, self._handle)
                except nv.NVMLError as error:
                    if is_fatal(error.value):
                        raise
                    if error.value in failures.TRANSIENT:
                        capabilities[query] = ask
                        break
                    reasons.append(failures.reading(error.value, str(error)))
                except (AttributeError, TypeError):
                    # An old or foreign binding lacks the function, or its `version` argument.
                    reasons.append(failures.BINDING_TOO_OLD)
                else:
                    capabilities[query] = ask
                    if query.pace is not Pace.TICK:
                        kept.update(zip(query.fields, answer, strict=True))
                    break
            else:
                unsupported = failures.reading(failures.NOT_SUPPORTED, "")
                reason = unsupported if unsupported in reasons else reasons[-1]
                absent.update(dict.fromkeys(query.fields, reason))
        self.capabilities, self.absent, self._kept, self._counters = capabilities, absent, kept, {}


def as_text(value: str | bytes) -> str:
    """A string of NVML; bindings before 11.515 return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
