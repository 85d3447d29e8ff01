"""Xid errors, which the driver reports when they happen: one thread waits for them."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from trainfast_runner.machine.telemetry import failures
from trainfast_runner.machine.telemetry.device import Device
from trainfast_runner.machine.telemetry.failures import NvmlError
from trainfast_runner.machine.telemetry.queries import Handle
from trainfast_runner.records.tick import is_instance

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
            # An old binding may lack any of the three.
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
                if error.value == failures.UNINITIALIZED:
                    break
                if error.value != failures.TIMEOUT:
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
    return failures.reading_failure(error.value, str(error))
