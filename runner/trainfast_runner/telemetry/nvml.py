"""All GPUs of the machine through NVML and its binding nvidia-ml-py (`import pynvml`)."""

import contextlib
import importlib
from types import ModuleType

from trainfast_runner.telemetry import failures
from trainfast_runner.telemetry.device import Device, as_text
from trainfast_runner.telemetry.readings import DeviceReading

_FIRST_RETRY_NS = 1_000_000_000
_LONGEST_RETRY_NS = 60_000_000_000


class Nvml:
    """Reads every GPU the driver lists, in PCI order, whatever CUDA_VISIBLE_DEVICES says.

    NVML is opened by the first `sample`, because it does not survive a fork: create and use this in the one
    thread that samples. After a failure it is initialized again with a growing delay (1 s up to 60 s); GPUs
    that still answer keep reporting meanwhile. Nothing here raises for a missing driver, GPU or reading.
    """

    def __init__(self, *, sparse_every: int = 5) -> None:
        """`sparse_every`: ticks between two looks at process lists, fans, limits and PCIe links."""
        self.driver_version: str | None = None
        self.failure: str | None = None
        """Why NVML as a whole does not answer, or None."""
        self.binding_warning: str | None = None
        """A sentence when the imported pynvml is not nvidia-ml-py's, or None."""
        self._sparse_every = sparse_every
        self._ticks = 0
        self._nv: ModuleType | None = None
        self._open = False
        self._devices: list[Device] = []
        self._retry_at_ns = 0
        self._retry_delay_ns = _FIRST_RETRY_NS

    @property
    def capabilities(self) -> dict[int, frozenset[str]]:
        """By GPU index, the fields of `DeviceReading` that the GPU answers; the rest is in `missing`."""
        return {
            device.index: frozenset(field for query in device.capabilities for field in query.fields)
            for device in self._devices
        }

    def sample(self, t_ns: int) -> tuple[list[DeviceReading], dict[str, str]]:
        """One reading a GPU, and why what is missing is missing. `t_ns` is CLOCK_MONOTONIC and paces retries."""
        missing: dict[str, str] = {}
        if t_ns >= self._retry_at_ns and (not self._open or any(device.lost for device in self._devices)):
            self._initialize(t_ns)
        sparse = self._ticks % self._sparse_every == 0
        self._ticks += 1
        readings = [self._read(device, t_ns, sparse, missing) for device in self._devices]
        if self.binding_warning:
            missing["nvml.binding"] = self.binding_warning
        if self.failure:
            missing["nvml"] = self.failure
        elif not self._devices:
            missing["nvml"] = failures.NO_DEVICES
        return readings, missing

    def close(self) -> None:
        """Lets go of the driver. A later `sample` opens it again."""
        if self._nv is not None and self._open:
            with contextlib.suppress(self._nv.NVMLError):
                self._nv.nvmlShutdown()
        self._open = False
        self._retry_at_ns = 0

    def _read(self, device: Device, t_ns: int, sparse: bool, missing: dict[str, str]) -> DeviceReading:
        if self._open and self._nv is not None and device.error is None:
            try:
                return device.read(self._nv, t_ns, sparse=sparse, missing=missing)
            except self._nv.NVMLError as error:
                if error.value in failures.LIBRARY_FAILURES:
                    self._open = False
                    self.failure = failures.initialization(error.value, str(error))
                else:
                    device.fail(failures.device(error.value, str(error)), lost=True)
                self._schedule_retry(t_ns)
        sentence = device.error or self.failure or failures.VANISHED
        missing[f"gpu{device.index}"] = sentence
        return device.failed_reading(sentence)

    def _initialize(self, t_ns: int) -> None:
        """Opens NVML, or closes and opens it again, and finds the GPUs."""
        self.close()
        if self._nv is None:
            try:
                self._nv = importlib.import_module("pynvml")
            except ImportError:
                self.failure = failures.NO_BINDING
                self._schedule_retry(t_ns)
                return
            self.binding_warning = failures.foreign_binding(self._nv)
        nv = self._nv
        if not hasattr(nv, "NVMLError") or not hasattr(nv, "nvmlInit"):
            self.failure = self.binding_warning or failures.NO_BINDING
            self._schedule_retry(t_ns)
            return
        try:
            nv.nvmlInit()
            self._open = True
            self.failure = None
            self.driver_version = as_text(nv.nvmlSystemGetDriverVersion())
            self._find_devices(nv)
        except nv.NVMLError as error:
            self.close()
            self.failure = failures.initialization(error.value, str(error))
        if not self._open or any(device.lost for device in self._devices):
            self._schedule_retry(t_ns)
        else:
            self._retry_delay_ns = _FIRST_RETRY_NS

    def _find_devices(self, nv: ModuleType) -> None:
        """Matches what the driver lists with the GPUs known before; a known one never vanishes silently."""
        seen: set[int] = set()
        for position in range(nv.nvmlDeviceGetCount()):
            device = None
            try:
                handle = nv.nvmlDeviceGetHandleByIndex(position)
                device = self._identify(position, as_text(nv.nvmlDeviceGetUUID(handle)))
                device.attach(nv, handle)
            except nv.NVMLError as error:
                if error.value in failures.LIBRARY_FAILURES:
                    raise
                device = device or self._identify(position, None)
                sentence = failures.device(error.value, str(error))
                device.fail(sentence, lost=error.value in failures.DEVICE_FAILURES)
            seen.add(device.index)
        for device in self._devices:
            if device.index not in seen:
                device.fail(failures.VANISHED, lost=True)

    def _identify(self, position: int, uuid: str | None) -> Device:
        """The GPU known by this UUID, else the one last seen at this position without one, else a new one."""
        here = next((device for device in self._devices if device.index == position), None)
        known = next((device for device in self._devices if uuid and device.uuid == uuid), None)
        if known is None and here is not None and (uuid is None or here.uuid is None):
            known = here
            known.uuid = uuid or known.uuid
        if known is None:
            index = position if here is None else max(device.index for device in self._devices) + 1
            known = Device(index, uuid)
            self._devices.append(known)
        return known

    def _schedule_retry(self, t_ns: int) -> None:
        self._retry_at_ns = t_ns + self._retry_delay_ns
        self._retry_delay_ns = min(self._retry_delay_ns * 2, _LONGEST_RETRY_NS)
