"""All GPUs of the machine through NVML and its binding nvidia-ml-py (`import pynvml`)."""

import contextlib
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import binding, failures
from trainfast_runner.machine.telemetry.capabilities import Handle
from trainfast_runner.machine.telemetry.device import Device, as_text
from trainfast_runner.machine.telemetry.timed_calls import Job, TimedCalls
from trainfast_runner.machine.telemetry.xid import OnXid, XidWatch
from trainfast_runner.records.tick import DeviceReading, is_instance

_FIRST_RETRY_NS = 1_000_000_000
_LONGEST_RETRY_NS = 60_000_000_000
_LOST_RETRY_NS = 2_000_000_000
"""Interval between two tries to reach a lost GPU: a few calls that fail at once, unlike another initialization."""
READING_TIMEOUT_S = 0.8
"""Time for all readings of one GPU before the others are read without it. Less than a tick at 1 Hz, or all GPUs would
miss the next one."""
HUNG_TIMEOUT_S = 0.25
"""The same for a GPU that took too long before: it is read last."""
OPENING_S = 15.0
"""Time for the driver to open: seconds for each GPU that is not in persistence mode."""
_PROBES = 3
"""Divisor of `OPENING_S` for the first reading of one GPU, which asks for everything."""

Answer = tuple[DeviceReading, dict[str, str]]
"""A GPU's reading, and the reasons of missing parts."""
Found = tuple[Device, Handle]


@dataclass(frozen=True)
class Hang:
    """A GPU's call that timed out, and when the GPU is asked again."""

    job: Job[Any]
    rest_until_ns: int
    delay_ns: int

    @classmethod
    def after(cls, earlier: "Hang | None", job: Job[Any], t_ns: int) -> "Hang":
        """Each one leaves the GPU alone for twice as long as the one before it."""
        delay_ns = min(earlier.delay_ns * 2, _LONGEST_RETRY_NS) if earlier else _FIRST_RETRY_NS
        return cls(job, t_ns + delay_ns, delay_ns)

    def has_recovered(self, t_ns: int) -> bool:
        """True once the GPU has answered for long enough to be treated as any other."""
        return self.job.over and t_ns > self.rest_until_ns + _LONGEST_RETRY_NS


class Nvml:
    """Reads every GPU the driver lists, in PCI order, hidden by CUDA_VISIBLE_DEVICES or not.

    NVML is opened by the first `sample`, because it does not survive a fork: create and use this in the one
    thread that samples. After a failure it is initialized again with a growing delay (1 s up to 60 s); GPUs that still
    answer keep reporting meanwhile, and so do GPUs beside a hanging one. A missing driver, GPU or reading raises
    nothing.
    """

    def __init__(
        self,
        *,
        sparse_every: int = 5,
        timeout_s: float = READING_TIMEOUT_S,
        opening_s: float = OPENING_S,
        on_xid: OnXid | None = None,
        stopping: threading.Event | None = None,
        instances: Collection[str] = (),
    ) -> None:
        """`sparse_every`: ticks between two looks at process lists, fans, limits and PCIe links. `opening_s`: how long
        a `sample` waits for the driver to open; a slower opening goes on, and a later `sample` finds it open. `on_xid`
        gets Xid errors, from a thread of its own. Once `stopping` is set, no wait takes longer than a fraction of a
        second. `instances` are UUIDs of MIG instances to read after the GPUs."""
        self.driver_version: str | None = None
        self.failure: str | None = None
        """The reason that NVML as a whole does not answer, or None."""
        self.binding_warning: str | None = None
        """A sentence when the imported pynvml is not nvidia-ml-py's, or None."""
        self._sparse_every = sparse_every
        self.timeout_s = timeout_s
        """Time for all readings of one GPU."""
        self._ticks = 0
        self._nv: ModuleType | None = None
        self._open = False
        self._devices: list[Device] = []
        self._retry_at_ns = 0
        self._retry_delay_ns = _FIRST_RETRY_NS
        self._reopen_at_ns = 0
        """Before this time a lost GPU is asked for without opening the driver again."""
        self._opening_s = opening_s
        self._calls = TimedCalls(stopping)
        self._hangs: dict[int, Hang] = {}
        """The last call that took too long, by GPU index."""
        self._opening: Job[list[Found]] | None = None
        """The initialization that has not come back."""
        self._reopen = False
        """True if a lost GPU needs more than a new handle."""
        self._on_xid = on_xid
        self._instances = tuple(instances)
        self._xids: XidWatch | None = None

    @property
    def cut_short(self) -> bool:
        """True if a reading was given up early because `stopping` was set: that GPU may not hang."""
        return self._calls.cut_short

    def sample(self, t_ns: int) -> tuple[list[DeviceReading], dict[str, str]]:
        """One reading for each GPU, and the reasons of missing ones. `t_ns` is CLOCK_MONOTONIC and paces retries."""
        missing: dict[str, str] = {}
        if self._opening is not None and self._opening.over:
            opened, self._opening = self._opening, None
            self._opened(opened, t_ns)
        self._hangs = {index: hang for index, hang in self._hangs.items() if not hang.has_recovered(t_ns)}
        if not self._open:
            self._open_when_due(t_ns)
        self._renew_durations()
        devices = list(self._devices)
        answered = self._read_all(devices, t_ns, missing) if self._open else {}
        readings = [answered.get(device.index) or self._silent_reading(device, missing) for device in devices]
        if self._open and any(device.lost for device in devices):
            # After the readings: opening the driver again can take seconds, and the others must not wait for it.
            self._open_when_due(t_ns)
        if self._xids is not None:
            missing.update({f"gpu{index}.xid_errors": why for index, why in self._xids.missing.items()})
        if self.binding_warning:
            missing["nvml.binding"] = self.binding_warning
        if self.failure:
            missing["nvml"] = self.failure
        elif not self._devices:
            missing["nvml"] = failures.NO_DEVICES
        return readings, missing

    @property
    def wants_looks(self) -> bool:
        """True if a GPU has no counter of throttled time, so that `look` is needed between two samples."""
        return self._open and any(device.error is None and device.only_reasons for device in self._devices)

    def look(self) -> None:
        """Read the throttle reasons of those GPUs. The next sample reports failures."""
        nv = self._nv
        assert nv is not None
        due = [device for device in self._devices if device.error is None and device.only_reasons]
        jobs = [Job(partial(device.look, nv, time.monotonic_ns())) for device in due]
        self._calls.run(jobs, self.timeout_s)
        for device, job in zip(due, jobs, strict=True):
            if not job.over:
                self._hangs[device.index] = Hang.after(self._hangs.get(device.index), job, time.monotonic_ns())
                device.fail(failures.slow(job.age_s, "this GPU"), lost=False)
            elif job.error is not None and not isinstance(job.error, nv.NVMLError):
                raise job.error

    def close(self) -> None:
        """Close the driver. A later `sample` opens it again."""
        self._shut()
        self._calls.close()

    def _renew_durations(self) -> None:
        """Renew the sentences about hanging calls with their duration."""
        if self._opening is not None:
            self.failure = failures.opening(self._opening.age_s, OPENING_S)
        for device in self._devices:
            hang = self._hangs.get(device.index)
            if hang is not None and not hang.job.over:
                device.error = failures.slow(hang.job.age_s, "this GPU")

    def _silent_reading(self, device: Device, missing: dict[str, str]) -> DeviceReading:
        sentence = device.error or self.failure or failures.VANISHED
        missing[f"gpu{device.index}"] = sentence
        return device.failed_reading(sentence)

    def _read_all(self, devices: list[Device], t_ns: int, missing: dict[str, str]) -> dict[int, DeviceReading]:
        """The readings of the GPUs that answer, by index."""
        nv = self._nv
        assert nv is not None
        due = [device for device in devices if self._answers(device, t_ns)]
        # GPUs that have hung before come last: the others have their readings on time.
        due.sort(key=lambda device: device.index in self._hangs)
        offset_ns = t_ns - time.monotonic_ns()
        jobs = [Job(partial(self._read, nv, device, offset_ns, self._ticks)) for device in due]
        self._ticks += 1
        answering_count = sum(device.index not in self._hangs for device in due)
        self._calls.run(jobs[:answering_count], self.timeout_s)
        self._calls.run(jobs[answering_count:], min(self.timeout_s, HUNG_TIMEOUT_S))
        readings: dict[int, DeviceReading] = {}
        for device, job in zip(due, jobs, strict=True):
            if not job.over:
                self._hangs[device.index] = Hang.after(self._hangs.get(device.index), job, t_ns)
                device.fail(failures.slow(job.age_s, "this GPU"), lost=False)
            elif isinstance(job.error, nv.NVMLError):
                self._failed(device, job.error.value, str(job.error), t_ns)
                if device.lost:
                    self._reopen = False
                    self._retry_at_ns = t_ns + _FIRST_RETRY_NS
            elif job.error is not None:
                raise job.error
            elif job.result is not None:
                readings[device.index], reasons = job.result
                missing.update(reasons)
        return readings

    def _read(self, nv: ModuleType, device: Device, offset_ns: int, tick: int) -> Answer:
        # Slow questions are asked of one GPU after another, so that no tick has to carry all of them.
        sparse = (tick + device.index) % self._sparse_every == 0
        return device.read(nv, time.monotonic_ns() + offset_ns, sparse=sparse)

    def _answers(self, device: Device, t_ns: int) -> bool:
        """True if this GPU is to be read now; after a call that hung only after a rest."""
        hang = self._hangs.get(device.index)
        if hang is not None and hang.job.over and t_ns >= hang.rest_until_ns and not device.lost:
            # What hung may have been the first look at it, and may have failed in the end.
            device.error, device.lost = None, not device.capabilities
        if device.lost:
            return False
        return device.error is None

    def _failed(self, device: Device, code: int, text: str, t_ns: int) -> None:
        """A fatal answer about a GPU: of this GPU only, or of the whole library."""
        if code in failures.LIBRARY_FAILURES:
            self._open = False
            self.failure = failures.initialization(code, text)
            self._schedule_retry(t_ns)
        else:
            device.fail(failures.device(code, text), lost=failures.may_pass(code))

    def _open_when_due(self, t_ns: int) -> None:
        """Open NVML, or look for a lost GPU again, in the thread that may hang."""
        hanging = any(not hang.job.over for hang in self._hangs.values())
        if self._opening is not None or t_ns < self._retry_at_ns or (hanging and not self._open):
            return
        # A lost GPU can be asked for beside a call that hangs; closing the driver under that call is another matter.
        may_close = not hanging and t_ns >= self._reopen_at_ns
        job = Job(partial(self._initialize, t_ns, may_close=may_close))
        self._calls.run([job], self._opening_s if may_close or not self._open else self.timeout_s)
        if job.over:
            self._opened(job, t_ns)
        else:
            self._opening = job

    def _opened(self, job: Job[list[Found]], t_ns: int) -> None:
        """Probe the readings of the GPUs that were found; a hanging GPU delays no other."""
        if job.error is not None:
            raise job.error
        nv = self._nv
        if nv is None or not self._open:
            return
        self.failure = None
        opened = job.result or []
        jobs = [Job(partial(device.attach, nv, handle)) for device, handle in opened]
        self._calls.run(jobs, max(self.timeout_s, self._opening_s / _PROBES))
        for (device, _), attached in zip(opened, jobs, strict=True):
            if not attached.over:
                self._hangs[device.index] = Hang.after(self._hangs.get(device.index), attached, t_ns)
                device.fail(failures.slow(attached.age_s, "this GPU"), lost=False)
            elif isinstance(attached.error, nv.NVMLError):
                self._failed(device, attached.error.value, str(attached.error), t_ns)
            elif attached.error is not None:
                raise attached.error
        self._reopen = any(device.lost for device in self._devices)
        if self._reopen:
            self._retry_at_ns = t_ns + _LOST_RETRY_NS
        elif self._open:
            self._retry_delay_ns = _FIRST_RETRY_NS
        if self._xids is None or any(device.error is None for device, _ in opened):
            self._watch_for_xids(nv)

    def _watch_for_xids(self, nv: ModuleType) -> None:
        """Watch for errors of the GPUs that answer now."""
        self._stop_watching()
        if self._open and self._on_xid is not None:
            answering = [device for device in self._devices if device.error is None]
            gpus = {device.index: device.handle for device in answering if not is_instance(device.uuid)}
            instances = {device.index: device.handle for device in answering if is_instance(device.uuid)}
            self._xids = XidWatch(nv, gpus, instances, self._on_xid)

    def _stop_watching(self) -> bool:
        """End the wait for Xid errors; True once it has ended."""
        watch, self._xids = self._xids, None
        return watch is None or watch.stop()

    def _shut(self) -> None:
        # Shutting the driver down under a call that is still in it may crash this process.
        idle = self._stop_watching() and all(hang.job.over for hang in self._hangs.values())
        if self._nv is not None and self._open and idle:
            _shut_down(self._nv)
        self._open = False
        self._retry_at_ns = 0

    def _initialize(self, t_ns: int, *, may_close: bool) -> list[Found]:
        """Open NVML, or if it `may_close` close and open it again; return the GPUs to ask: all, or the lost ones."""
        if self._open:
            if not (self._reopen and may_close) and ((regained := self._regain()) or not may_close):
                return regained
            self._reopen_at_ns = t_ns + self._retry_delay_ns
            self._retry_delay_ns = min(self._retry_delay_ns * 2, _LONGEST_RETRY_NS)
        self._shut()
        nv = self._import(t_ns)
        if nv is None:
            return []
        try:
            nv.nvmlInit()
            self.driver_version = as_text(nv.nvmlSystemGetDriverVersion())
            devices = self._find_devices(nv)
        except nv.NVMLError as error:
            _shut_down(nv)
            # A foreign binding's error may have no code.
            self.failure = failures.initialization(getattr(error, "value", failures.UNKNOWN), str(error))
            self._schedule_retry(t_ns)
            return []
        # From here on the GPUs may be read: not before, with handles of an earlier initialization.
        self._open = True
        return devices

    def _import(self, t_ns: int) -> ModuleType | None:
        """The binding; None with `failure` set when there is none that can be used."""
        if self._nv is None:
            loaded = binding.load()
            self._nv, self.binding_warning = loaded.module, loaded.warning
            if loaded.failure is not None:
                self.failure = loaded.failure
                self._schedule_retry(t_ns)
        return self._nv

    def _regain(self) -> list[Found]:
        """The lost GPUs with new handles, the others undisturbed by another initialization; [] if not all have one."""
        nv = self._nv
        assert nv is not None
        lost = [device for device in self._devices if device.lost]
        try:
            return [(device, nv.nvmlDeviceGetHandleByUUID((device.uuid or "").encode())) for device in lost]
        except nv.NVMLError:
            return []

    def _find_devices(self, nv: ModuleType) -> list[Found]:
        """Match the driver's list with the GPUs known before; a known one never vanishes silently."""
        devices: list[Found] = []
        seen: set[int] = set()
        asks = [partial(nv.nvmlDeviceGetHandleByIndex, position) for position in range(nv.nvmlDeviceGetCount())]
        asks += [partial(nv.nvmlDeviceGetHandleByUUID, uuid.encode()) for uuid in self._instances]
        for position, ask in enumerate(asks):
            device = None
            try:
                handle = ask()
                device = self._identify(position, as_text(nv.nvmlDeviceGetUUID(handle)))
                devices.append((device, handle))
            except nv.NVMLError as error:
                if error.value in failures.LIBRARY_FAILURES:
                    raise
                device = device or self._identify(position, None)
                device.fail(failures.device(error.value, str(error)), lost=failures.may_pass(error.value))
            seen.add(device.index)
        for device in self._devices:
            if device.index not in seen:
                device.fail(failures.VANISHED, lost=True)
        return devices

    def _identify(self, position: int, uuid: str | None) -> Device:
        """The GPU known by this UUID, else the one last seen at this position without one, else a new one."""
        here = next((device for device in self._devices if device.index == position), None)
        gpu = next((device for device in self._devices if uuid and device.uuid == uuid), None)
        if gpu is None and here is not None and (uuid is None or here.uuid is None):
            gpu = here
            gpu.uuid = uuid or gpu.uuid
        if gpu is None:
            index = position if here is None else max(device.index for device in self._devices) + 1
            gpu = Device(index, uuid)
            self._devices.append(gpu)
        return gpu

    def _schedule_retry(self, t_ns: int) -> None:
        self._retry_at_ns = t_ns + self._retry_delay_ns
        self._retry_delay_ns = min(self._retry_delay_ns * 2, _LONGEST_RETRY_NS)


def _shut_down(nv: ModuleType) -> None:
    # A foreign binding may lack even this; the process's end closes the driver too.
    with contextlib.suppress(nv.NVMLError, AttributeError):
        nv.nvmlShutdown()
