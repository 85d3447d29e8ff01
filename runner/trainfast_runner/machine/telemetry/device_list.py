"""The GPUs of the machine as NVML lists them, in PCI order, and those that it listed before."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from types import ModuleType

from trainfast_runner.machine.telemetry import failures
from trainfast_runner.machine.telemetry.binding import gpu_count, text_or_reason, uuid_of
from trainfast_runner.machine.telemetry.device import Device
from trainfast_runner.machine.telemetry.failures import NvmlError
from trainfast_runner.machine.telemetry.queries import Handle


class DeviceList:
    """Every GPU that was ever listed: a known one never vanishes silently."""

    def __init__(self, instances: Collection[str]) -> None:
        """`instances` are UUIDs of MIG instances that follow the GPUs."""
        self.devices: list[Device] = []
        self._instances = tuple(instances)

    def find(self, nv: ModuleType) -> dict[Device, Handle]:
        """Ask for the driver's list, add new GPUs and mark missing ones; return the handles of those that answer.

        Raises NvmlError when the library fails.
        """
        handles: dict[Device, Handle] = {}
        seen_indexes: set[int] = set()
        asks = [partial(nv.nvmlDeviceGetHandleByIndex, position) for position in range(gpu_count(nv))]
        asks += [partial(nv.nvmlDeviceGetHandleByUUID, uuid.encode()) for uuid in self._instances]
        for position, ask in enumerate(asks):
            device = None
            try:
                handle = ask()
                uuid, reason = text_or_reason(nv, partial(uuid_of, nv, handle))
                if uuid is not None and uuid in (known.uuid for known in handles):
                    uuid, reason = None, f"the driver gives {uuid} to two GPUs"
                device = self._identify(position, uuid)
                device.uuid_failure = None if device.uuid else reason
                handles[device] = handle
            except NvmlError as error:
                if error.value in failures.LIBRARY_FAILURES:
                    raise
                device = device or self._identify(position, None)
                device.fail(failures.device_failure(error.value, str(error)), lost=failures.may_pass(error.value))
            seen_indexes.add(device.index)
        for device in self.devices:
            if device.index not in seen_indexes:
                device.fail(failures.VANISHED, lost=True)
        return handles

    def find_lost(self, nv: ModuleType) -> dict[Device, Handle]:
        """The handles of the lost GPUs, without another initialization; empty if not all of them have one."""
        lost = [device for device in self.devices if device.lost]
        try:
            return {device: nv.nvmlDeviceGetHandleByUUID((device.uuid or "").encode()) for device in lost}
        except NvmlError:
            return {}

    def _identify(self, position: int, uuid: str | None) -> Device:
        """The GPU known by this UUID, else the one last seen at this position without one, else a new one."""
        at_position = next((device for device in self.devices if device.index == position), None)
        gpu = next((device for device in self.devices if uuid and device.uuid == uuid), None)
        if gpu is None and at_position is not None and (uuid is None or at_position.uuid is None):
            gpu = at_position
            gpu.uuid = uuid or gpu.uuid
        if gpu is None:
            index = position if at_position is None else max(device.index for device in self.devices) + 1
            gpu = Device(index, uuid)
            self.devices.append(gpu)
        return gpu
