"""All GPUs of the machine through NVML and its binding nvidia-ml-py (`import pynvml`), read by threads in the driver.

A call may never return, so that only its own readings are late. One thread makes all calls, because parallel callers
only queue for the driver's lock. When a call outlasts its time, that thread is left to it, and another goes on with the
rest. A killable process instead would need seconds for each GPU to open the driver again, and state D takes no signal
(docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.binding import FIRST_RETRY_NS, Driver, NvmlError, NvmlFailure
from trainfast_runner.machine.telemetry.device import Device, DeviceList, Handle
from trainfast_runner.records.tick import DeviceReading, is_instance

T = TypeVar("T")
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 0.01, 0.1
"""Seconds of sleep at a time while waiting."""
_MIN_TIMEOUT_S = 0.1
"""Least timeout, which halves with each hung call: 8 healthy GPUs answer in milliseconds."""
_STOPPING_TIMEOUT_S = 0.2
"""Time for a call at the end of the sampling."""


@dataclass
class Job(Generic[T]):
    """A call and its result. Belongs to the thread that runs it until it has `ended`."""

    call: Callable[[], T]
    result: T | None = None
    error: BaseException | None = None
    began_s: float | None = None
    """Time of the start, seconds of CLOCK_MONOTONIC."""
    ended: bool = False

    @property
    def age_s(self) -> float:
        """Seconds since the start of the call; 0 before it."""
        return 0.0 if self.began_s is None else time.monotonic() - self.began_s

    def run(self) -> None:
        """Make the call and keep its result or its error."""
        self.began_s = time.monotonic()
        try:
            self.result = self.call()
        except BaseException as error:  # the thread that waits for the job raises it again
            self.error = error
        self.ended = True


@dataclass
class _Round:
    """Jobs in order, and the end of them."""

    jobs: Sequence[Job[Any]]
    ended: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False
    """True once the round is abandoned: no further call is begun."""

    def run(self) -> None:
        for job in self.jobs:
            if self.abandoned:
                return
            job.run()
        self.ended.set()


class TimedCalls:
    """Runs calls one after another in a thread of its own. Use it from one thread."""

    def __init__(self, stopping: threading.Event | None = None) -> None:
        """Once `stopping` is set, no call is waited for longer than a fraction of a second."""
        self._stopping = stopping or threading.Event()
        self.cut_short = False
        """True if a call was given up early because `stopping` was set: it may not hang at all."""
        self._rounds: queue.SimpleQueue[_Round | None] | None = None

    def run(self, jobs: Sequence[Job[Any]], timeout_s: float) -> None:
        """Run the jobs; leave one behind that takes longer than `timeout_s` seconds.

        A job left behind may have `ended` later. An exception of a call is in the job's `error`. Each job that hangs
        halves the time for the next ones: a driver that hangs mostly does so for every GPU, and all jobs together
        then take little more than twice `timeout_s`.
        """
        waiting = list(jobs)
        while waiting:
            if self._rounds is None:
                self._rounds = queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._rounds,), name="nvml-calls", daemon=True).start()
            round_of_jobs = _Round(waiting)
            self._rounds.put(round_of_jobs)
            hung_job = self._wait(round_of_jobs, timeout_s)
            if hung_job is None:
                return
            round_of_jobs.abandoned = True
            timeout_s = max(timeout_s / 2, min(timeout_s, _MIN_TIMEOUT_S))
            self.close()
            waiting = waiting[waiting.index(hung_job) + 1 :]

    def close(self) -> None:
        """Let the thread end, at once or when its call comes back."""
        if self._rounds is not None:
            self._rounds.put(None)
            self._rounds = None

    def _wait(self, round_of_jobs: _Round, timeout_s: float) -> Job[Any] | None:
        """The job that takes too long, or None when all have ended."""
        queued_s = time.monotonic()
        stalled_s = 0.0
        while True:
            current = next((job for job in round_of_jobs.jobs if not job.ended), None)
            if current is None:
                return None
            since_s = current.began_s if current.began_s is not None else queued_s
            now_s = time.monotonic()
            limit_s = min(timeout_s, _STOPPING_TIMEOUT_S) if self._stopping.is_set() else timeout_s
            left_s = since_s + limit_s + stalled_s - now_s
            if left_s <= 0 and current.began_s is not None:
                self.cut_short = self.cut_short or limit_s < timeout_s
                return current
            wait_s = min(max(left_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S)
            if round_of_jobs.ended.wait(wait_s):
                return None
            # A machine that had no time for this thread had none for the call either.
            stalled_s += max(0.0, time.monotonic() - now_s - wait_s)


def _work(rounds: queue.SimpleQueue[_Round | None]) -> None:
    while (round_of_jobs := rounds.get()) is not None:
        round_of_jobs.run()


_SHORTEST_REST_NS = 1_000_000_000
_LONGEST_REST_NS = 60_000_000_000
"""Shortest and longest pause in the calls to a GPU after one has hung."""


@dataclass(frozen=True)
class Hang:
    """A GPU's call that timed out, and when the GPU is asked again."""

    job: Job[Any]
    rest_until_ns: int
    rest_ns: int

    def has_recovered(self, t_ns: int) -> bool:
        """True once the GPU has answered for long enough to be treated as any other."""
        return self.job.ended and t_ns > self.rest_until_ns + _LONGEST_REST_NS


class GpuCalls:
    """Runs calls about GPUs, and remembers which of them hung."""

    def __init__(self, stopping: threading.Event | None) -> None:
        """Once `stopping` is set, no call is waited for longer than a fraction of a second."""
        self.timed = TimedCalls(stopping)
        self._hangs: dict[int, Hang] = {}
        """The last call that took too long, by GPU index."""

    @property
    def any_hanging(self) -> bool:
        """True if a call is still in the driver."""
        return any(not hang.job.ended for hang in self._hangs.values())

    def hung_before(self, device: Device) -> bool:
        """True if a call about this GPU took too long, and the GPU has not yet answered well for long."""
        return device.index in self._hangs

    def is_rested(self, device: Device, t_ns: int) -> bool:
        """True if the call that hung has come back, and the GPU may be asked again."""
        hang = self._hangs.get(device.index)
        return hang is not None and hang.job.ended and t_ns >= hang.rest_until_ns

    def run(
        self, devices: Sequence[Device], call: Callable[[Device], T], timeout_s: float, t_ns: int
    ) -> list[tuple[Device, Job[T]]]:
        """Call for each of these GPUs; return the calls that ended, whose errors are in their jobs.

        A GPU whose call takes longer than `timeout_s` is marked as not answering.
        """
        jobs = [Job(partial(call, device)) for device in devices]
        self.timed.run(jobs, timeout_s)
        ended = []
        for device, job in zip(devices, jobs, strict=True):
            if job.ended:
                ended.append((device, job))
            else:
                self._leave_alone(device, job, t_ns)
        return ended

    def refresh(self, devices: Sequence[Device], t_ns: int) -> None:
        """Forget the hangs of GPUs that have recovered, and renew the sentences about the others."""
        self._hangs = {index: hang for index, hang in self._hangs.items() if not hang.has_recovered(t_ns)}
        for device in devices:
            hang = self._hangs.get(device.index)
            if hang is not None and not hang.job.ended:
                device.error = _sentence(hang.job)

    def _leave_alone(self, device: Device, job: Job[Any], t_ns: int) -> None:
        """Mark the GPU; it rests for twice as long as after its hang before."""
        earlier_hang = self._hangs.get(device.index)
        rest_ns = min(earlier_hang.rest_ns * 2, _LONGEST_REST_NS) if earlier_hang else _SHORTEST_REST_NS
        self._hangs[device.index] = Hang(job, t_ns + rest_ns, rest_ns)
        device.fail(_sentence(job), lost=False)


def _sentence(job: Job[Any]) -> str:
    return binding.slow_call_sentence(job.age_s, "this GPU")


OnXid = Callable[[int, int, int], None]
"""Gets the time (CLOCK_MONOTONIC nanoseconds), the GPU's index and the Xid's number."""

_XID_EVENTS: Final = 0x8
"""nvmlEventTypeXidCriticalError of nvml.h."""
_WAIT_MS: Final = 250
"""Milliseconds of one wait in the driver; the watch can only be ended between two of them."""
_LOST_PAUSE_S: Final = 1.0
"""Chosen, not measured: pause after a wait that failed."""
_WHOLE_GPU: Final = 0xFFFFFFFF
"""gpuInstanceId of nvmlEventData_t for an error that NVML attributes to no single instance."""

XID_MEANINGS: Final = {
    13: "graphics engine exception, often an illegal access of the program",
    31: "memory page fault of the program",
    43: "the GPU stopped processing for this program",
    45: "clean-up after earlier errors or a killed program",
    48: "double-bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "a row of memory was marked for remapping",
    64: "a row of memory could not be marked for remapping",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor (GSP) does not answer",
    120: "error of the GPU's system processor (GSP)",
}
"""Xid errors that a training meets, after NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors)."""


def xid_text(code: int) -> str:
    """The number, with its meaning if known."""
    return f"{code}: {XID_MEANINGS[code]}" if code in XID_MEANINGS else str(code)


class XidWatch:
    """Waits for Xid errors of some GPUs until `stop`. NVML must stay initialized meanwhile.

    In MIG mode NVML reports an error for the whole GPU. `on_xid` gets it for that GPU and for each watched instance in
    it, except for an error of another GPU instance.
    """

    def __init__(self, nv: ModuleType, devices: Sequence[Device], on_xid: OnXid) -> None:
        self.missing: dict[int, str] = {}
        """The reason that a GPU's Xid errors are not seen, by index, as soon as it is known."""
        self._nv = nv
        self._on_xid = on_xid
        self._stopping = threading.Event()
        self._handles = {device.index: device.handle for device in devices if not is_instance(device.uuid)}
        self._instances = {device.index: device.handle for device in devices if is_instance(device.uuid)}
        self._indexes = {_address(handle): index for index, handle in self._handles.items()}
        # Registering is a call into the driver too: only this thread waits for it.
        self._thread = threading.Thread(target=self._run, name="nvml-xid", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """End the waiting, in up to a quarter of a second. False when a call into the driver does not come back."""
        self._stopping.set()
        self._thread.join(2 * _WAIT_MS / 1000)
        return not self._thread.is_alive()

    def _register(self) -> tuple[Any, Callable[[Any, int], Any]] | None:
        """The set of events to wait for, and the call that waits; None when no GPU gives any."""
        nv = self._nv
        try:
            # A foreign or old binding may lack any of the three.
            register, wait, events = nv.nvmlDeviceRegisterEvents, nv.nvmlEventSetWait_v2, nv.nvmlEventSetCreate()
        except NvmlError as error:
            self.missing = dict.fromkeys([*self._handles, *self._instances], _reason(error))
            return None
        refused_reasons = {}
        for index, handle in self._handles.items():
            try:
                register(handle, _XID_EVENTS, events)
            except NvmlError as error:
                refused_reasons[index] = _reason(error)
        self.missing = self.missing | refused_reasons
        return (events, wait) if len(refused_reasons) < len(self._handles) else None

    def _run(self) -> None:
        nv = self._nv
        instances = self._instances_by_gpu()
        registered = self._register()
        if registered is None:
            return
        events, wait = registered
        while not self._stopping.is_set():
            try:
                event = wait(events, _WAIT_MS)
            except NvmlError as error:
                if error.value == binding.UNINITIALIZED:
                    break
                if error.value != binding.TIMEOUT:
                    # A lost GPU makes every wait fail at once: pause, since the others may still report.
                    self._stopping.wait(_LOST_PAUSE_S)
                continue
            index = self._indexes.get(_address(event.device))
            if event.eventType == _XID_EVENTS and index is not None:
                t_ns = time.monotonic_ns()
                self._on_xid(t_ns, index, event.eventData)
                for instance, number in instances.get(index, ()):
                    if event.gpuInstanceId in (number, _WHOLE_GPU):
                        self._on_xid(t_ns, instance, event.eventData)
        with contextlib.suppress(NvmlError):
            nv.nvmlEventSetFree(events)

    def _instances_by_gpu(self) -> dict[int, list[tuple[int, int]]]:
        """The instances of each GPU by its index: their own index and the number of the GPU instance."""
        nv = self._nv
        by_gpu: dict[int, list[tuple[int, int]]] = {}
        for index, handle in self._instances.items():
            try:
                gpu = self._indexes.get(_address(nv.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)))
                number = nv.nvmlDeviceGetGpuInstanceId(handle)
            except NvmlError as error:
                self.missing = self.missing | {index: _reason(error)}
                continue
            if gpu is not None:
                by_gpu.setdefault(gpu, []).append((index, number))
        return by_gpu


def _address(handle: Handle) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _reason(error: NvmlError) -> str:
    return binding.reading_failure(error.value, str(error))


SPARSE_EVERY = 5
"""Ticks between two readings of process lists, fans, limits and PCIe links."""
_LOST_RETRY_NS = 2_000_000_000
"""Interval between two tries to reach a lost GPU: a few calls that fail at once, unlike another initialization."""
READING_TIMEOUT_S = 0.8
"""Time for all readings of one GPU before the others are read without it. Less than a tick at 1 Hz, or all GPUs would
miss the next one."""
HUNG_TIMEOUT_S = 0.25
"""Time for all readings of a GPU that took too long before; it is read last."""
OPENING_S = 15.0
"""Time for the driver to open: seconds for each GPU that is not in persistence mode."""
_FIRST_READING_SHARE = 1 / 3
"""Share of the opening time for one GPU's first reading, which asks for everything."""


class Nvml:
    """Reads every GPU the driver lists, in PCI order, hidden by CUDA_VISIBLE_DEVICES or not.

    NVML is opened by the first `sample`, because it does not survive a fork: create and use this in the one
    thread that samples. After a failure it is initialized again with a growing delay; GPUs that still answer keep
    reporting meanwhile, and so do GPUs beside a hanging one. A missing driver, GPU or reading raises nothing.
    """

    def __init__(
        self,
        *,
        timeout_s: float = READING_TIMEOUT_S,
        opening_s: float = OPENING_S,
        on_xid: OnXid | None = None,
        stopping: threading.Event | None = None,
        instances: Collection[str] = (),
    ) -> None:
        """`opening_s`: how long a `sample` waits for the driver to open; a slower opening goes on, and a later `sample`
        finds it open. `on_xid` gets Xid errors, from a thread of its own. Once `stopping` is set, no wait takes longer
        than a fraction of a second. `instances` are UUIDs of MIG instances to read after the GPUs."""
        self.timeout_s = timeout_s
        """Time for all readings of one GPU."""
        self._opening_s = opening_s
        self._on_xid = on_xid
        self._driver = Driver()
        self._gpus = DeviceList(instances)
        self._calls = GpuCalls(stopping)
        self._xids: XidWatch | None = None
        self._opening: Job[dict[Device, Handle]] | None = None
        """The initialization that has not come back."""
        self._needs_reopening = False
        """True if a lost GPU needs more than a new handle."""
        self._reopen_at_ns = 0
        """Before this time a lost GPU is asked for without opening the driver again."""
        self._ticks = 0

    @property
    def driver_version(self) -> str | None:
        """The driver's version; None before it answers."""
        return self._driver.version

    @property
    def cut_short(self) -> bool:
        """True if a reading was given up early because `stopping` was set: that GPU may not hang."""
        return self._calls.timed.cut_short

    def sample(self, t_ns: int) -> tuple[list[DeviceReading], dict[str, str]]:
        """One reading for each GPU, and the reasons of missing ones. `t_ns` is CLOCK_MONOTONIC and paces retries."""
        if self._opening is not None and self._opening.ended:
            opened, self._opening = self._opening, None
            self._attach(opened, t_ns)
        self._calls.refresh(self._gpus.devices, t_ns)
        if not self._driver.is_open:
            self._open_when_due(t_ns)
        devices = list(self._gpus.devices)
        answered, missing = self._read_all(devices, t_ns) if self._driver.is_open else ({}, {})
        readings = []
        for device in devices:
            reading = answered.get(device.index)
            if reading is None:
                sentence = device.error or (binding.VANISHED if self.failure is None else self.failure.sentence)
                missing[f"gpu{device.index}"] = sentence
                reading = device.failed_reading(sentence)
            readings.append(reading)
        if self._driver.is_open and any(device.lost for device in devices):
            # After the readings: opening the driver again can take seconds, and the others must not wait for it.
            self._open_when_due(t_ns)
        return readings, missing | self._general_reasons()

    def close(self) -> None:
        """Close the driver. A later `sample` opens it again."""
        self._shut()
        self._calls.timed.close()

    @property
    def failure(self) -> NvmlFailure | None:
        """The reason that NVML as a whole does not answer or lists no GPU, or None."""
        if self._opening is not None:
            return binding.opening_failure(self._opening.age_s, OPENING_S)
        return self._driver.failure or (None if self._gpus.devices else NvmlFailure(binding.NO_DEVICES))

    def _general_reasons(self) -> dict[str, str]:
        """The reasons of missing readings that are not in the readings of single GPUs."""
        reasons = {}
        if self._xids is not None:
            reasons = {f"gpu{index}.xid_errors": reason for index, reason in self._xids.missing.items()}
        if (failure := self.failure) is not None:
            reasons["nvml"] = failure.sentence
        if self._driver.is_open and self._driver.version_failure is not None:
            reasons["nvml.driver_version"] = self._driver.version_failure
        return reasons

    def _read_all(self, devices: Sequence[Device], t_ns: int) -> tuple[dict[int, DeviceReading], dict[str, str]]:
        """The readings of the GPUs that answer, by index, and the reasons of their missing parts."""
        nv = self._driver.nv
        assert nv is not None
        read = partial(_timed_reading, nv, t_ns - time.monotonic_ns(), self._ticks)
        self._ticks += 1
        for device in devices:
            self._revive_if_rested(device, t_ns)
        due = [device for device in devices if device.error is None and not device.lost]
        # GPUs that have hung before come last: the others have their readings on time.
        sound_devices = [device for device in due if not self._calls.hung_before(device)]
        doubtful_devices = [device for device in due if self._calls.hung_before(device)]
        ended_jobs = self._calls.run(sound_devices, read, self.timeout_s, t_ns)
        ended_jobs += self._calls.run(doubtful_devices, read, min(self.timeout_s, HUNG_TIMEOUT_S), t_ns)
        readings: dict[int, DeviceReading] = {}
        missing: dict[str, str] = {}
        for device, job in ended_jobs:
            if self._mark_failed(device, job, t_ns):
                if device.lost:
                    self._needs_reopening = False
                    self._driver.retry_at_ns = t_ns + FIRST_RETRY_NS
            elif job.result is not None:
                readings[device.index], reasons = job.result
                missing.update({f"gpu{device.index}.{field}": reason for field, reason in reasons.items()})
        return readings, missing

    def _revive_if_rested(self, device: Device, t_ns: int) -> None:
        """Let a GPU whose call hung be read again once it has rested."""
        if self._calls.is_rested(device, t_ns) and not device.lost:
            # The call that hung may have been the first reading, and may have failed in the end.
            device.error, device.lost = None, device.capabilities is None

    def _mark_failed(self, device: Device, job: Job[Any], t_ns: int) -> bool:
        """Mark the GPU or the whole library if NVML failed in this call; True if it did. Raises any other error."""
        error = job.error
        if error is None:
            return False
        if not isinstance(error, NvmlError):
            raise error
        code = error.value
        if code in binding.LIBRARY_FAILURES:
            self._driver.fail(code, str(error), t_ns)
        else:
            device.fail(binding.device_failure(code, str(error)), lost=binding.may_pass(code))
        return True

    def _open_when_due(self, t_ns: int) -> None:
        """Open NVML, or look for a lost GPU again, in the thread that may hang."""
        hanging, is_open = self._calls.any_hanging, self._driver.is_open
        if self._opening is not None or t_ns < self._driver.retry_at_ns or (hanging and not is_open):
            return
        # A lost GPU can be asked for beside a call that hangs; closing the driver under that call is another matter.
        may_close = not hanging and t_ns >= self._reopen_at_ns
        job = Job(partial(self._find_gpus, t_ns, may_close=may_close))
        self._calls.timed.run([job], self._opening_s if may_close or not is_open else self.timeout_s)
        if job.ended:
            self._attach(job, t_ns)
        else:
            self._opening = job

    def _find_gpus(self, t_ns: int, *, may_close: bool) -> dict[Device, Handle]:
        """Open NVML, or if it `may_close` close and open it again; return the GPUs to ask: all, or the lost ones."""
        nv = self._driver.nv
        if nv is not None and self._driver.is_open:
            if not (self._needs_reopening and may_close):
                handles = self._gpus.find_lost(nv)
                if handles or not may_close:
                    return handles
            self._reopen_at_ns = t_ns + self._driver.next_delay_ns()
        self._shut()
        return self._driver.open(self._gpus.find, t_ns) or {}

    def _attach(self, opening: Job[dict[Device, Handle]], t_ns: int) -> None:
        """Probe the readings of the GPUs that were found; a hanging GPU delays no other."""
        if opening.error is not None:
            raise opening.error
        nv = self._driver.nv
        if nv is None or not self._driver.is_open:
            return
        self._driver.failure = None
        handles = opening.result or {}
        timeout_s = max(self.timeout_s, self._opening_s * _FIRST_READING_SHARE)
        probes = self._calls.run(list(handles), lambda device: device.attach(nv, handles[device]), timeout_s, t_ns)
        for device, job in probes:
            self._mark_failed(device, job, t_ns)
        self._needs_reopening = any(device.lost for device in self._gpus.devices)
        if self._needs_reopening:
            self._driver.retry_at_ns = t_ns + _LOST_RETRY_NS
        elif self._driver.is_open:
            self._driver.reset_delay()
        if self._xids is None or any(device.error is None for device in handles):
            self._watch_for_xids(nv)

    def _watch_for_xids(self, nv: ModuleType) -> None:
        """Watch for errors of the GPUs that answer now."""
        self._stop_watching()
        if self._driver.is_open and self._on_xid is not None:
            answering_gpus = [device for device in self._gpus.devices if device.error is None]
            self._xids = XidWatch(nv, answering_gpus, self._on_xid)

    def _stop_watching(self) -> bool:
        """End the wait for Xid errors; True once it has ended."""
        watch, self._xids = self._xids, None
        return watch is None or watch.stop()

    def _shut(self) -> None:
        # Shutting the driver down under a call that is still in it may crash this process.
        is_idle = self._stop_watching() and not self._calls.any_hanging
        self._driver.close(shut_down=is_idle)


def _timed_reading(nv: ModuleType, offset_ns: int, tick: int, device: Device) -> tuple[DeviceReading, dict[str, str]]:
    """A GPU's reading at `offset_ns` beside the clock, and the reasons of its missing parts."""
    # Slow questions are asked of one GPU after another, so that no tick has to carry all of them.
    sparse = (tick + device.index) % SPARSE_EVERY == 0
    return device.read(nv, time.monotonic_ns() + offset_ns, sparse=sparse)
