"""The connections of the GPUs: the matrix of `nvidia-smi topo -m`, PCIe links, CPU and NUMA affinity, peer access.
`read_topology` opens NVML for its readings only; `machine.links` has the meaning for training."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.binding import (
    NvmlError,
    NvmlFailure,
    answer_or_none,
    as_text,
    ask_once,
    gpu_count,
    possible_count,
    uuid_of,
)
from trainfast_runner.machine.telemetry.device import Handle
from trainfast_runner.machine.telemetry.plausible import drop_impossible
from trainfast_runner.records.tick import MIG_PREFIX

SCHEMA = 1
SELF_SIGN, UNKNOWN_SIGN = "X", "?"
SIGN_OF_ANCESTOR: Final = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""`nvmlGpuTopologyLevel_t` of nvml.h; internal (two GPUs of one board) is shown as nvidia-smi shows it, as PIX."""
LEGEND: Final = {
    "X": "the GPU itself",
    "SYS": "over PCIe and the link between NUMA nodes (QPI, UPI, Infinity Fabric)",
    "NODE": "over PCIe and the link between the PCIe host bridges of one NUMA node",
    "PHB": "over PCIe and one host bridge (usually the CPU)",
    "PXB": "over several PCIe bridges, without the host bridge",
    "PIX": "over a single PCIe bridge",
    "NV#": "over # bonded NVLinks",
}
"""The signs of the matrix, slowest link first, in the words of `nvidia-smi topo -m`."""
PEER_ACCESS: Final = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the PCIe topology does not support it",
    4: "disabled by the driver's settings",
    5: "not supported",
}
"""`nvmlGpuP2PStatus_t` of nvml.h."""
_READ_CAPABILITY, _NVLINK_CAPABILITY = 0, 2
"""`nvmlGpuP2PCapsIndex_t`; the binding's own name for the first is a tuple by mistake."""
_SWITCH_TYPE = 2
"""`nvmlIntNvLinkDeviceType_t`: the other end of the link is an NVSwitch."""
_MAX_LINKS = 36
"""The most NVLinks that are asked for; NVML refuses the first number past a GPU's last link."""
_NODE_SCOPE = 0
"""NVML_AFFINITY_SCOPE_NODE of nvml.h."""
_WORD_BITS = 64
"""Bits of each integer in an affinity mask of NVML."""
SYSFS = Path("/sys/bus/pci/devices")


class TopologyDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and its connections; unavailable readings are None."""

    index: int
    uuid: str | None = None
    name: str | None = None
    bus_id: str | None = None
    """Linux notation: domain:bus:device.function, in hexadecimal."""
    memory_total_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    """Lanes in use."""
    pcie_width_max: int | None = None
    pcie_below_max: str | None = None
    """Properties below their maximum: generation, width, or both joined by `+`; None without any."""
    busy_percent: int | None = None
    """Share of the last moment in which a kernel ran: an idle GPU lowers its PCIe generation to save power."""
    cpu_affinity: str | None = None
    """The CPUs nearest to the GPU, as ranges: 0-31,64-95."""
    numa_node: int | None = None
    nvlinks: int | None = None
    """NVLinks that are up, to any end; None when the GPU has none."""
    error: str | None = None


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """`matrix[a][b]` is the link between the GPUs at positions a and b of `devices`: X, NV4, PIX, PXB, PHB, NODE, SYS.

    `p2p[a][b]` is `ok` if a can read b's memory, else the reason; None on the diagonal and when unknown.
    """

    schema: int = SCHEMA
    devices: list[TopologyDevice] = []
    matrix: list[list[str]] = []
    p2p: list[list[str | None]] = []
    missing: str | None = None
    """The reason that there is no GPU to show; None with GPUs."""


def read_topology() -> Topology:
    """Ask NVML once; a few milliseconds a pair of GPUs. Raises nothing: without a GPU `missing` is the reason."""
    topology = ask_once(_read_topology)
    return Topology(missing=topology.sentence) if isinstance(topology, NvmlFailure) else topology


def _read_topology(nv: ModuleType) -> Topology:
    devices: list[TopologyDevice] = []
    handles: list[Handle] = []
    for index in range(gpu_count(nv)):
        try:
            handle = nv.nvmlDeviceGetHandleByIndex(index)
            device = _device(nv, handle, index)
        except NvmlError as error:
            handle = None
            device = TopologyDevice(index=index, error=binding.device_failure(error.value, str(error)))
        handles.append(handle)
        devices.append(device)
    if not devices:
        return Topology(missing=binding.NO_DEVICES)
    links = [_Links(nv, handle) for handle in handles]
    buses = [device.bus_id for device in devices]
    positions = range(len(devices))
    return Topology(
        devices=[msgspec.structs.replace(device, nvlinks=link.up) for device, link in zip(devices, links, strict=True)],
        matrix=[
            [SELF_SIGN if a == b else _link(nv, handles, links, buses, a, b) for b in positions] for a in positions
        ],
        p2p=[[None if a == b else _peer_access(nv, handles[a], handles[b]) for b in positions] for a in positions],
    )


def _device(nv: ModuleType, handle: Handle, index: int) -> TopologyDevice:
    bus = answer_or_none(nv, lambda: _bus_id(nv.nvmlDeviceGetPciInfo(handle).busId))
    figures = {
        "memory_total_bytes": answer_or_none(nv, lambda: nv.nvmlDeviceGetMemoryInfo(handle).total),
        "gpu_utilization_percent": answer_or_none(nv, lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu),
        "pcie_generation": answer_or_none(nv, lambda: nv.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "pcie_generation_max": answer_or_none(nv, lambda: nv.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "pcie_width": answer_or_none(nv, lambda: nv.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_width_max": answer_or_none(nv, lambda: nv.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }
    drop_impossible(figures)
    names_below_max = [
        name
        for name in ("generation", "width")
        if (figures[f"pcie_{name}"] or 0) < (figures[f"pcie_{name}_max"] or 0) and figures[f"pcie_{name}"] is not None
    ]
    return TopologyDevice(
        index=index,
        uuid=answer_or_none(nv, lambda: uuid_of(nv, handle)),
        name=answer_or_none(nv, lambda: as_text(nv.nvmlDeviceGetName(handle))),
        bus_id=bus,
        pcie_below_max="+".join(names_below_max) or None,
        busy_percent=figures.pop("gpu_utilization_percent"),
        cpu_affinity=answer_or_none(nv, lambda: _cpus(nv, handle)),
        numa_node=_numa_node(nv, handle, bus),
        **figures,
    )


def _bus_id(answer: str | bytes) -> str:
    """`00000000:3B:00.0` of NVML as sysfs has it, `0000:3b:00.0`."""
    text = as_text(answer).lower()
    domain, _, bus_and_device = text.partition(":")
    return f"{int(domain, 16):04x}:{bus_and_device}" if bus_and_device else text


def _cpus(nv: ModuleType, handle: Handle) -> str | None:
    count = os.sysconf("SC_NPROCESSORS_CONF")
    words = nv.nvmlDeviceGetCpuAffinity(handle, (count + _WORD_BITS - 1) // _WORD_BITS)
    return ranges(_bits(words)) or None


def _numa_node(nv: ModuleType, handle: Handle, bus_id: str | None) -> int | None:
    """The one memory node nearest to the GPU, from NVML, else from sysfs; None on a machine that has only one."""
    nodes = answer_or_none(nv, lambda: list(_bits(nv.nvmlDeviceGetMemoryAffinity(handle, 1, _NODE_SCOPE))))
    if nodes:
        return int(nodes[0])
    try:
        node = int((SYSFS / (bus_id or "-") / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def _bits(words: Iterable[int]) -> list[int]:
    return [
        index * _WORD_BITS + bit
        for index, word in enumerate(words)
        for bit in range(_WORD_BITS)
        if int(word) >> bit & 1
    ]


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2,5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


class _Links:
    """One GPU's NVLinks that are up: where each leads."""

    def __init__(self, nv: ModuleType, handle: Handle) -> None:
        self.up: int | None = None
        self.switched = 0
        """Links to an NVSwitch, which reaches every GPU on it."""
        self.ends: list[str] = []
        """Bus ids at the other ends of the rest."""
        if handle is None:
            return
        for link in range(_MAX_LINKS):
            try:
                is_up = nv.nvmlDeviceGetNvLinkState(handle, link)
            except NvmlError:
                # Not supported, or past the last link.
                return
            self.up = (self.up or 0) + bool(is_up)
            if is_up and answer_or_none(nv, partial(_end_type, nv, handle, link)) == _SWITCH_TYPE:
                self.switched += 1
            elif is_up and (end := answer_or_none(nv, partial(_end_bus, nv, handle, link))):
                self.ends.append(end)


def _end_type(nv: ModuleType, handle: Handle, link: int) -> int:
    return int(nv.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))


def _end_bus(nv: ModuleType, handle: Handle, link: int) -> str:
    return _bus_id(nv.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)


def _link(nv: ModuleType, handles: list[Handle], links: list[_Links], buses: list[str | None], a: int, b: int) -> str:
    direct_links = sum(end == buses[b] for end in links[a].ends) if buses[b] else 0
    link_count = direct_links or _through_switch(nv, handles, links, a, b)
    if link_count:
        return f"NV{link_count}"
    if handles[a] is None or handles[b] is None:
        return UNKNOWN_SIGN
    level = answer_or_none(nv, lambda: nv.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b]))
    return SIGN_OF_ANCESTOR.get(level, UNKNOWN_SIGN)


def _through_switch(nv: ModuleType, handles: list[Handle], links: list[_Links], a: int, b: int) -> int:
    """Bonded links between two GPUs that hang on the same switches: the smaller number of the two."""
    link_count = min(links[a].switched, links[b].switched)
    if not link_count:
        return 0
    # GPUs of two partitions hang on switches too, and cannot reach each other over them.
    status = answer_or_none(nv, lambda: nv.nvmlDeviceGetP2PStatus(handles[a], handles[b], _NVLINK_CAPABILITY))
    return link_count if status in (None, 0) else 0


def _peer_access(nv: ModuleType, a: Handle, b: Handle) -> str | None:
    if a is None or b is None:
        return None
    status = answer_or_none(nv, lambda: nv.nvmlDeviceGetP2PStatus(a, b, _READ_CAPABILITY))
    return None if status is None else PEER_ACCESS.get(status, "not known")


@dataclass(frozen=True)
class Instance:
    """One MIG instance."""

    uuid: str
    name: str | None
    gpu_index: int
    gpu_uuid: str
    gpu_instance: int | None
    """Number of the instance within the GPU, as `compute_instance`; None if unknown."""
    compute_instance: int | None

    @property
    def old_name(self) -> str:
        """The instance's name before driver R470, which CUDA still takes."""
        return f"{MIG_PREFIX}{self.gpu_uuid}/{self.gpu_instance}/{self.compute_instance}"


def read_instances() -> list[Instance]:
    """Every instance of every GPU in MIG mode. Opens NVML for as long as that takes; empty when it does not answer."""
    instances = ask_once(
        lambda nv: [instance for index in range(gpu_count(nv)) for instance in _instances_of_gpu(nv, index)]
    )
    return [] if isinstance(instances, NvmlFailure) else instances


def _instances_of_gpu(nv: ModuleType, index: int) -> list[Instance]:
    """The instances of one GPU; empty when it does not answer or is not in MIG mode."""
    try:
        gpu = nv.nvmlDeviceGetHandleByIndex(index)
        slot_count = possible_count(nv, "mig_slot_count", partial(nv.nvmlDeviceGetMaxMigDeviceCount, gpu))
        gpu_uuid = nv.call(uuid_of, nv, gpu)
    except NvmlError:
        return []
    instances = []
    for slot in range(slot_count):
        # A slot without an instance answers NotFound.
        handle = answer_or_none(nv, partial(_handle_of_slot, nv, gpu, slot))
        if handle is not None and (instance := _instance(nv, handle, index, gpu_uuid)) is not None:
            instances.append(instance)
    return instances


def _handle_of_slot(nv: ModuleType, gpu: Handle, slot: int) -> Handle:
    return nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)


def _instance(nv: ModuleType, handle: Handle, gpu_index: int, gpu_uuid: str) -> Instance | None:
    uuid = answer_or_none(nv, lambda: uuid_of(nv, handle))
    if uuid is None:
        return None
    return Instance(
        uuid=uuid,
        name=answer_or_none(nv, lambda: as_text(nv.nvmlDeviceGetName(handle))),
        gpu_index=gpu_index,
        gpu_uuid=gpu_uuid,
        gpu_instance=answer_or_none(nv, lambda: nv.nvmlDeviceGetGpuInstanceId(handle)),
        compute_instance=answer_or_none(nv, lambda: nv.nvmlDeviceGetComputeInstanceId(handle)),
    )
