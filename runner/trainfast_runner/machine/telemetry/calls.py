"""The threads in the driver: calls that may never return, so that only their own readings are late, and Xid errors.

One thread makes all calls, because parallel callers only queue for the driver's lock. When a call outlasts its time,
that thread is left to it, and another goes on with the rest. A killable process instead would need seconds for each GPU
to open the driver again, and state D takes no signal (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.binding import NvmlError
from trainfast_runner.machine.telemetry.device import Device, Handle
from trainfast_runner.records.tick import is_instance

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
