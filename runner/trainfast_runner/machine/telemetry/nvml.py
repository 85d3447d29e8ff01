"""All GPUs of the machine through NVML and its binding nvidia-ml-py (`import pynvml`)."""

import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.binding import FIRST_RETRY_NS, Driver, NvmlError, NvmlFailure
from trainfast_runner.machine.telemetry.calls import GpuCalls, Job, OnXid, XidWatch
from trainfast_runner.machine.telemetry.device import Device, DeviceList, Handle
from trainfast_runner.records.tick import DeviceReading

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
