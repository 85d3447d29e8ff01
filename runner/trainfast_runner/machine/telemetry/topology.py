"""The connections of the GPUs: the matrix of `nvidia-smi topo -m`, peer access, and their meaning for the choice of a
strategy. `read_topology` opens NVML for its readings only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, NamedTuple

import msgspec

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.binding import NvmlError, NvmlFailure, answer_or_none, ask_once, call, gpu_count
from trainfast_runner.machine.telemetry.device import Handle
from trainfast_runner.units import gpus_text

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


class TopologyDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and its connections; unavailable readings are None."""

    index: int
    uuid: str | None = None
    name: str | None = None
    bus_id: str | None = None
    """Linux notation: domain:bus:device.function, in hexadecimal."""
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
    links: list[_Links] = []
    for index in range(gpu_count(nv)):
        handle, link = None, _Links(None, 0, [])
        try:
            handle = call(lambda index: nv.nvmlDeviceGetHandleByIndex(index), index)
            uuid, name = (answer_or_none(ask, nv, handle) for ask in (binding.uuid_of, binding.name_of))
            bus_id = answer_or_none(lambda handle: _bus_id(nv.nvmlDeviceGetPciInfo(handle)), handle)
            link = _links(nv, handle)
            device = TopologyDevice(index=index, uuid=uuid, name=name, bus_id=bus_id, nvlinks=link.up)
        except NvmlError as error:
            device = TopologyDevice(index=index, error=binding.device_failure(error.value, str(error)))
        handles.append(handle)
        links.append(link)
        devices.append(device)
    if not devices:
        return Topology(missing=binding.NO_DEVICES)
    positions = range(len(devices))

    def peer_status(a: int, b: int, capability: int) -> int | None:
        """NVML's answer about peer access; None without one."""
        if a == b or handles[a] is None or handles[b] is None:
            return None
        return answer_or_none(lambda: int(nv.nvmlDeviceGetP2PStatus(handles[a], handles[b], capability)))

    def sign(a: int, b: int) -> str:
        if a == b or handles[a] is None or handles[b] is None:
            return SELF_SIGN if a == b else UNKNOWN_SIGN
        link_count = sum(end == devices[b].bus_id for end in links[a].ends)
        switched = min(links[a].switched, links[b].switched)
        # GPUs of two partitions hang on switches too, and cannot reach each other over them.
        if not link_count and switched and peer_status(a, b, _NVLINK_CAPABILITY) in (None, 0):
            link_count = switched
        if link_count:
            return f"NV{link_count}"
        level = answer_or_none(lambda: int(nv.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b])))
        return SIGN_OF_ANCESTOR.get(-1 if level is None else level, UNKNOWN_SIGN)

    def peer(a: int, b: int) -> str | None:
        status = peer_status(a, b, _READ_CAPABILITY)
        return None if status is None else PEER_ACCESS.get(status, "not known")

    return Topology(
        devices=devices,
        matrix=[[sign(a, b) for b in positions] for a in positions],
        p2p=[[peer(a, b) for b in positions] for a in positions],
    )


def _bus_id(pci: Any) -> str:
    """`00000000:3B:00.0` of NVML as sysfs has it, `0000:3b:00.0`."""
    domain, _, bus_and_device = pci.busId.lower().partition(":")
    return f"{int(domain, 16):04x}:{bus_and_device}"


class _Links(NamedTuple):
    """One GPU's NVLinks that are up."""

    up: int | None
    switched: int
    """Links to an NVSwitch, which reaches every GPU on it."""
    ends: list[str]
    """Bus ids at the other ends of the rest."""


def _links(nv: ModuleType, handle: Handle) -> _Links:
    up, switched, ends = None, 0, list[str]()
    for link in range(_MAX_LINKS):
        is_up = answer_or_none(lambda link: bool(nv.nvmlDeviceGetNvLinkState(handle, link)), link)
        if is_up is None:
            break  # not supported, or past the last link
        up = (up or 0) + is_up
        if not is_up:
            continue
        kind = answer_or_none(lambda link: int(nv.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)), link)
        if kind == _SWITCH_TYPE:
            switched += 1
        elif end := answer_or_none(lambda link: _bus_id(nv.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)), link):
            ends.append(end)
    return _Links(up, switched, ends)


SLOWEST_FIRST = ("SYS", "NODE", "PHB", "PXB", "PIX")


@dataclass(frozen=True)
class Interconnect:
    """The links among some GPUs, as the decisions need them."""

    islands: tuple[tuple[int, ...], ...]
    """The groups whose members are all reached over NVLink, as positions in the topology."""
    slowest: str | None
    """The slowest sign of the matrix among them; None for a single GPU or when unknown."""

    @property
    def all_nvlink(self) -> bool:
        """True if every pair is joined by NVLink."""
        return self.any_nvlink and len(self.islands) == 1

    @property
    def any_nvlink(self) -> bool:
        """True if some pair is joined by NVLink."""
        return any(len(island) > 1 for island in self.islands)


def interconnect(topology: Topology, among: Sequence[int] | None = None) -> Interconnect:
    """The links among the GPUs at these positions of the topology; by default all.

    A group is of GPUs that all reach each other over NVLink; each GPU is in its first group.
    """
    indexes = list(range(len(topology.devices)) if among is None else among)
    signs = {topology.matrix[a][b] for a in indexes for b in indexes if a < b}
    nvlinks = sorted((sign for sign in signs if sign.startswith("NV")), key=lambda sign: int(sign[2:]))
    islands: list[tuple[int, ...]] = []
    for index in indexes:
        for place, island in enumerate(islands):
            if all(topology.matrix[index][other].startswith("NV") for other in island):
                islands[place] = (*island, index)
                break
        else:
            islands.append((index,))
    return Interconnect(tuple(islands), next((s for s in (*SLOWEST_FIRST, *nvlinks) if s in signs), None))


def read_links_among(uuids: Collection[str]) -> Interconnect | None:
    """The links among these GPUs, asked of NVML now; None for fewer than two."""
    if len(uuids) < 2:
        return None
    topology = read_topology()
    indexes = [index for index, device in enumerate(topology.devices) if device.uuid in uuids]
    return interconnect(topology, indexes) if len(indexes) > 1 else None


FITS_ONE = "A model that fits one GPU: strategy=ddp, which sends gradients only, while the backward computes."


def link_advice(topology: Topology) -> list[str]:
    """Sentences about the whole machine, the most important first."""
    if not topology.devices:
        missing = topology.missing or binding.NO_DEVICES
        if binding.comes_from_a_driver(missing):
            return [f"No GPU to show: {missing}. Until then devices=cpu trains on the CPU."]
        return [f"No GPU to show, runs train on the CPU: {missing}."]
    answering, silent = (
        [index for index, device in enumerate(topology.devices) if (device.error is None) == is_asked]
        for is_asked in (True, False)
    )
    lines = []
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        lines.append(f"{gpus_text(silent)} {verb} not answer: the rest is about the others.")
    if len(answering) == 1:
        lines.append("One GPU: strategy=single; nothing has to be sent to another.")
    if len(answering) < 2:
        return lines
    links = interconnect(topology, answering)
    lines.append(FITS_ONE)
    if links.all_nvlink:
        lines.append("NVLink joins every pair. A larger model: pp, zero3, fsdp and tp are about equal; measure them.")
    elif links.any_nvlink:
        names = " and ".join(gpus_text(island) for island in links.islands if len(island) > 1)
        inside = f"keep tp inside a group (tp_degree at most {max(map(len, links.islands))})"
        lines.append(f"NVLink joins {names}. A larger model: {inside}; pp across the groups sends the least.")
    else:
        measured = "101 s for ddp over NVLink and 131 s without (p2p=off), dp 110 s with it"
        least = "A larger model: pp beats tp and zero, because it sends the least"
        lines.append(f"No NVLink. {least}. On two GPUs the guide measured {measured}.")
    if links.slowest == "SYS":
        lines.append("SYS pairs cross the link between the CPU sockets: for two GPUs choose a pair that does not.")
    if refused := [peer for row in topology.p2p for peer in row if peer not in (None, "ok")]:
        reason = f"Some GPUs cannot read each other's memory ({refused[0]})"
        lines.append(f"{reason}: NCCL copies through host memory, as with p2p=off.")
    return lines
