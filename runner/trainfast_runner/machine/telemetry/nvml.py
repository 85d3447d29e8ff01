"""All GPUs of the machine through NVML and its binding nvidia-ml-py (`import pynvml`), read by threads in the driver.

A call may never return, so that only its own readings are late. One thread makes all calls, because parallel callers
only queue for the driver's lock. When a call outlasts its time, that thread is left to it, and another goes on with the
rest. A killable process instead would need seconds for each GPU to open the driver again, and state D takes no signal
(docs/decisions.md).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.binding import NvmlError, NvmlFailure, answer_or_none, call
from trainfast_runner.machine.telemetry.device import Device, DeviceList, Handle
from trainfast_runner.records.tick import DeviceReading

T = TypeVar("T")
_LOOK_EVERY_S = 0.05
"""Seconds between two looks at a call that has not returned."""
_MIN_TIMEOUT_S = 0.1
"""Least timeout, which halves with each hung call: 8 healthy GPUs answer in milliseconds."""


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


def run_timed(jobs: Iterable[Job[Any]], timeout_s: float) -> None:
    """Run the jobs one after another in another thread; leave one behind that takes longer than `timeout_s` seconds.

    A job left behind may have `ended` later. An exception of a call is in the job's `error`. Each job that hangs halves
    the time for the next ones: a driver that hangs mostly does so for every GPU, and all jobs together then take little
    more than twice `timeout_s`.
    """
    waiting = deque(jobs)
    while waiting:
        ended = threading.Event()
        threading.Thread(target=_work, args=(waiting, ended), name="nvml-calls", daemon=True).start()
        if _ends(waiting, ended, timeout_s):
            return
        # The thread that hangs finds no further job.
        waiting = deque(_taken_out(waiting))
        timeout_s = max(timeout_s / 2, min(timeout_s, _MIN_TIMEOUT_S))


def _ends(waiting: deque[Job[Any]], ended: threading.Event, timeout_s: float) -> bool:
    """True when all jobs have ended, False once one of them takes too long."""
    left, waited_s = len(waiting), 0.0
    while not ended.wait(_LOOK_EVERY_S):
        # The sum of the waits: a machine that had no time for this thread had none for the call either.
        waited_s = waited_s + _LOOK_EVERY_S if left == len(waiting) else _LOOK_EVERY_S
        left = len(waiting)
        if waited_s >= timeout_s:
            return False
    return True


def _work(waiting: deque[Job[Any]], ended: threading.Event) -> None:
    for job in _taken_out(waiting):
        job.run()
    ended.set()


def _taken_out(jobs: deque[Job[Any]]) -> Iterator[Job[Any]]:
    """The jobs, each given to one thread alone."""
    with suppress(IndexError):
        while True:
            yield jobs.popleft()


OnXid = Callable[[int, int, int], None]
"""Gets the time (CLOCK_MONOTONIC nanoseconds), the GPU's index and the Xid's number."""

_XID_EVENTS: Final = 0x8
"""nvmlEventTypeXidCriticalError of nvml.h."""
_WAIT_MS: Final = 500
"""Milliseconds of one wait in the driver; the watch can only be ended between two of them."""
_LOST_PAUSE_S: Final = 1.0
"""Chosen, not measured: pause after a wait that failed."""

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
    """Waits for Xid errors of some GPUs until `stop`. NVML must stay initialized meanwhile, and reports none of a MIG
    instance.
    """

    def __init__(self, nv: ModuleType, devices: Sequence[Device], on_xid: OnXid) -> None:
        self.missing: dict[int, str] = {}
        """The reason that a GPU's Xid errors are not seen, by index, as soon as it is known."""
        self._nv = nv
        self._on_xid = on_xid
        self._stopping = threading.Event()
        self._devices = devices
        # Registering is a call into the driver too: only this thread waits for it.
        self._thread = threading.Thread(target=self._run, name="nvml-xid", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """End the waiting, in up to half a second. False when a call into the driver does not come back."""
        self._stopping.set()
        self._thread.join(2 * _WAIT_MS / 1000)
        return not self._thread.is_alive()

    def _run(self) -> None:
        nv = self._nv
        watched: dict[int | None, int] = {}
        try:
            # An old binding may lack either function.
            events, _ = call(lambda: (nv.nvmlEventSetCreate(), nv.nvmlEventSetWait_v2))
        except NvmlError as error:
            self.missing = dict.fromkeys((device.index for device in self._devices), binding.reading_text(error))
            return
        for device in self._devices:
            try:
                call(lambda handle: nv.nvmlDeviceRegisterEvents(handle, _XID_EVENTS, events), device.handle)
                watched[_address(device.handle)] = device.index
            except NvmlError as error:
                self.missing = self.missing | {device.index: binding.reading_text(error)}
        while watched and not self._stopping.is_set():
            try:
                event = call(nv.nvmlEventSetWait_v2, events, _WAIT_MS)
            except NvmlError as error:
                if error.value == binding.UNINITIALIZED:
                    break
                if error.value != binding.TIMEOUT:
                    # A lost GPU makes every wait fail at once: pause, since the others may still report.
                    self._stopping.wait(_LOST_PAUSE_S)
                continue
            index = watched.get(_address(event.device))
            if index is not None and event.eventType == _XID_EVENTS:
                self._on_xid(time.monotonic_ns(), index, event.eventData)
        answer_or_none(lambda: nv.nvmlEventSetFree(events))


def _address(handle: Handle) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


SPARSE_EVERY = 5
"""Ticks between two readings of process lists, fans, limits and PCIe links."""
_FIRST_RETRY_NS = 1_000_000_000
_LONGEST_RETRY_NS = 60_000_000_000
"""The first and the longest wait before NVML is opened again; each is twice the one before."""
READING_TIMEOUT_S = 0.8
"""Time for all readings of one GPU before the others are read without it. Less than a tick at 1 Hz, or all GPUs would
miss the next one."""
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
        self, *, timeout_s: float = READING_TIMEOUT_S, opening_s: float = OPENING_S, on_xid: OnXid | None = None
    ) -> None:
        """`opening_s`: how long a `sample` waits for the driver to open; a slower opening goes on, and a later `sample`
        finds it open. `on_xid` gets Xid errors, from a thread of its own."""
        self.timeout_s = timeout_s
        """Time for all readings of one GPU."""
        self.driver_version: str | None = None
        """The driver's version; None before it answers."""
        self._opening_s = opening_s
        self._on_xid = on_xid
        self._nv: ModuleType | None = None
        """The binding while NVML is open."""
        self._failure: NvmlFailure | None = None
        """The reason that NVML as a whole does not answer, or None."""
        self._gpus = DeviceList()
        self._hangs: dict[Device, Job[Any]] = {}
        """The call of a GPU that has not come back."""
        self._xids: XidWatch | None = None
        self._opening: Job[dict[Device, Handle]] | None = None
        """The initialization that has not come back."""
        self._retry_at_ns = 0
        """Before this time NVML is not opened again, and no lost GPU is looked for."""
        self._delay_ns = _FIRST_RETRY_NS
        self._ticks = 0

    @property
    def failure(self) -> NvmlFailure | None:
        """The reason that NVML as a whole does not answer or lists no GPU, or None."""
        if self._opening is not None:
            return binding.opening_failure(self._opening.age_s)
        return self._failure or (None if self._gpus.devices else NvmlFailure(binding.NO_DEVICES))

    def sample(self, t_ns: int) -> tuple[list[DeviceReading], dict[str, str]]:
        """One reading for each GPU, and the reasons of missing ones. `t_ns` is CLOCK_MONOTONIC and paces retries."""
        if self._opening is not None and self._opening.ended:
            opened, self._opening = self._opening, None
            self._attach(opened, t_ns)
        for device, job in [*self._hangs.items()]:
            if not job.ended:
                device.error = _hang_sentence(job)
            else:
                del self._hangs[device]
                # The call that hung may have been the first reading, and may have failed in the end.
                device.error, device.lost = None, not device.is_probed
        if self._nv is None:
            self._open_when_due(t_ns)
        devices = self._gpus.devices
        answered = {} if self._nv is None else self._read_all(self._nv, t_ns)
        missing: dict[str, str] = {}
        readings = []
        for device in devices:
            if device in answered:
                reading, reasons = answered[device]
                missing |= {f"gpu{device.index}.{field}": reason for field, reason in reasons.items()}
            else:
                sentence = device.error or (binding.VANISHED if self.failure is None else self.failure.sentence)
                missing[f"gpu{device.index}"] = sentence
                reading = DeviceReading(index=device.index, uuid=device.uuid, name=device.name, error=sentence)
            readings.append(reading)
        if self._nv is not None and any(device.lost for device in devices):
            # After the readings: opening the driver again can take seconds, and the others must not wait for it.
            self._open_when_due(t_ns)
        if self._xids is not None:
            missing |= {f"gpu{index}.xid_errors": reason for index, reason in self._xids.missing.items()}
        if (failure := self.failure) is not None:
            missing["nvml"] = failure.sentence
        return readings, missing

    def _read_all(self, nv: ModuleType, t_ns: int) -> dict[Device, tuple[DeviceReading, dict[str, str]]]:
        """The readings of the GPUs that answer, each with the reasons of its missing parts."""
        offset_ns, tick = t_ns - time.monotonic_ns(), self._ticks
        self._ticks += 1

        def read(device: Device) -> tuple[DeviceReading, dict[str, str]]:
            # Slow questions are asked of one GPU after another, so that no tick has to carry all of them.
            sparse = (tick + device.index) % SPARSE_EVERY == 0
            return device.read(nv, time.monotonic_ns() + offset_ns, sparse=sparse)

        due = [device for device in self._gpus.devices if device.is_probed and device.error is None and not device.lost]
        jobs = self._run(due, read, self.timeout_s, t_ns)
        return {device: job.result for device, job in jobs.items() if job.result is not None}

    def _run(
        self, devices: Sequence[Device], call: Callable[[Device], T], timeout_s: float, t_ns: int
    ) -> dict[Device, Job[T]]:
        """Call for each of these GPUs; return the calls that ended. Raises their errors that are not NVML's.

        A GPU whose call fails, or takes longer than `timeout_s`, is marked as not answering; or the whole library is.
        """
        jobs = {device: Job(partial(call, device)) for device in devices}
        run_timed(jobs.values(), timeout_s)
        hanging = {device: job for device, job in jobs.items() if not job.ended}
        self._hangs |= hanging
        for device, job in hanging.items():
            device.fail(_hang_sentence(job), lost=False)
        for device, job in jobs.items():
            if isinstance(job.error, NvmlError):
                try:
                    device.fail_by(job.error)
                except NvmlError as error:
                    self._nv = None
                    self._retry_later(t_ns, error)
                    break
                if device.lost:
                    self._retry_at_ns = max(self._retry_at_ns, t_ns + _FIRST_RETRY_NS)
            elif job.error is not None:
                raise job.error
        return {device: job for device, job in jobs.items() if job.ended}

    def _retry_later(self, t_ns: int, error: NvmlError | None = None) -> None:
        """Open NVML again later; the error is the reason that it does not answer as a whole."""
        if error is not None:
            self._failure = binding.library_failure(error.value, str(error))
        self._retry_at_ns = t_ns + self._delay_ns
        self._delay_ns = min(self._delay_ns * 2, _LONGEST_RETRY_NS)

    def _open_when_due(self, t_ns: int) -> None:
        """Open NVML, or look for a lost GPU again, in a thread that may hang; not beside a call that hangs, under which
        the driver must not be closed."""
        if self._opening is not None or t_ns < self._retry_at_ns or self._hangs:
            return
        job = Job(partial(self._find_gpus, t_ns))
        run_timed([job], self._opening_s)
        if job.ended:
            self._attach(job, t_ns)
        else:
            self._opening = job

    def _find_gpus(self, t_ns: int) -> dict[Device, Handle]:
        """Open NVML, closed before if it is open; return the GPUs to ask."""
        self.close()
        nv = None
        try:
            nv = binding.load()
            call(lambda: nv.nvmlInit())
            self.driver_version = answer_or_none(binding.driver_version, nv)
            found = self._gpus.find(nv)
        except NvmlError as error:
            if nv is not None:
                binding.shut_down(nv)
            self._retry_later(t_ns, error)
            return {}
        # From here on the GPUs may be read: not before, with handles of an earlier initialization.
        self._nv = nv
        return found

    def _attach(self, opening: Job[dict[Device, Handle]], t_ns: int) -> None:
        """Probe the readings of the GPUs that were found; a hanging GPU delays no other."""
        if opening.error is not None:
            raise opening.error
        if (nv := self._nv) is None:
            return
        self._failure, handles = None, opening.result or {}
        timeout_s = max(self.timeout_s, self._opening_s * _FIRST_READING_SHARE)
        self._run(list(handles), lambda gpu: gpu.attach(nv, handles[gpu]), timeout_s, t_ns)
        if any(device.lost for device in self._gpus.devices):
            self._retry_later(t_ns)
        elif self._nv is not None:
            self._delay_ns = _FIRST_RETRY_NS
        if self._on_xid is not None and self._nv is not None:
            answering_gpus = [device for device in self._gpus.devices if device.error is None]
            self._xids = XidWatch(nv, answering_gpus, self._on_xid)

    def close(self) -> None:
        """Close the driver. A later `sample` opens it again."""
        watch, self._xids, self._retry_at_ns = self._xids, None, 0
        # Shutting the driver down under a call that is still in it may crash this process.
        is_idle = (watch is None or watch.stop()) and all(job.ended for job in tuple(self._hangs.values()))
        nv, self._nv = self._nv, None
        if nv is not None and is_idle:
            binding.shut_down(nv)


def _hang_sentence(job: Job[Any]) -> str:
    """The reason that a GPU does not answer, with the age of the call."""
    return binding.slow_call_sentence(job.age_s, "this GPU")
