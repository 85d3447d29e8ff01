"""The links between GPUs as decisions about strategies need them: islands of NVLink, and the slowest path."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import visible_devices
from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.topology import SELF_SIGN, UNKNOWN_SIGN, Topology, TopologyDevice, read_topology
from trainfast_runner.units import gpus_text

SLOWEST_FIRST = ("SYS", "NODE", "PHB", "PXB", "PIX")


@dataclass(frozen=True)
class Interconnect:
    """The links among some GPUs, as the decisions need them."""

    islands: tuple[tuple[int, ...], ...]
    """The groups whose members are all reached over NVLink, as positions in the topology."""
    slowest: str | None
    """The slowest sign of the matrix among them; None for a single GPU or when unknown."""
    peer_access: bool | None = None

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return sum(map(len, self.islands))

    @property
    def all_nvlink(self) -> bool:
        """True if every pair is joined by NVLink."""
        return self.count > 1 and len(self.islands) == 1

    @property
    def any_nvlink(self) -> bool:
        """True if some pair is joined by NVLink."""
        return any(len(island) > 1 for island in self.islands)


def interconnect(topology: Topology, among: Sequence[int] | None = None) -> Interconnect:
    """The links among the GPUs at these positions of the topology; by default all."""
    indexes = list(range(len(topology.devices)) if among is None else among)
    pairs = [(a, b) for a in indexes for b in indexes if a < b]
    signs = [topology.matrix[a][b] for a, b in pairs]
    slow = [sign for sign in SLOWEST_FIRST if sign in signs]
    nvlinks = sorted({sign for sign in signs if sign.startswith("NV")}, key=lambda sign: int(sign[2:]))
    peers = [topology.p2p[a][b] for a, b in pairs]
    return Interconnect(
        islands=_islands(topology, indexes),
        slowest=next(iter([*slow, *nvlinks]), None),
        peer_access=None if None in peers or not peers else all(peer == "ok" for peer in peers),
    )


def read_links_among(uuids: Collection[str]) -> Interconnect | None:
    """The links among these GPUs, asked of NVML now; None for fewer than two."""
    if len(uuids) < 2:
        return None
    topology = read_topology()
    indexes = [index for index, device in enumerate(topology.devices) if device.uuid in uuids]
    return interconnect(topology, indexes) if len(indexes) > 1 else None


def _islands(topology: Topology, indexes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups whose members all reach each other over NVLink; each GPU is in its first group."""
    groups: list[list[int]] = []
    for index in indexes:
        island = next(
            (group for group in groups if all(topology.matrix[index][other].startswith("NV") for other in group)), None
        )
        if island is None:
            groups.append([index])
        else:
            island.append(index)
    return tuple(map(tuple, groups))


DDP_MEASURED = "On two GPUs the guide measured 101 s for ddp over NVLink and 131 s without (p2p=off), dp 110 s with it."


def link_advice(topology: Topology, environment: Mapping[str, str] | None = None) -> list[str]:
    """Sentences about the whole machine, the most important first.

    Examples name GPUs as the `devices` knob counts them in this environment, by default the process's own.
    """
    if not topology.devices:
        missing = topology.missing or binding.NO_DEVICES
        if binding.comes_from_a_driver(missing):
            return [f"No GPU to show: {missing}. Until then devices=cpu trains on the CPU."]
        return [f"No GPU to show, runs train on the CPU: {missing}."]
    answering_indexes = [index for index, device in enumerate(topology.devices) if device.error is None]
    silent = _silent_note([device for device in topology.devices if device.error is not None])
    if len(answering_indexes) < 2:
        single = "One GPU: strategy=single; nothing has to be sent to another."
        return [*silent, *([single] if answering_indexes else []), *_pcie(topology.devices)]
    links = interconnect(topology, answering_indexes)
    knob_indexes = _knob_indexes(topology, os.environ if environment is None else environment)
    lines = [*silent, *_strategies(links, knob_indexes), *_crossing(topology, links, knob_indexes)]
    if links.peer_access is False:
        reason = next(peer for row in topology.p2p for peer in row if peer not in (None, "ok"))
        words = (
            f"Some GPUs cannot read each other's memory ({reason}): NCCL copies through host memory, as with p2p=off."
        )
        lines.append(words)
    return [*lines, *_pcie(topology.devices), *_affinity(topology.devices)]


def _silent_note(devices: Sequence[TopologyDevice]) -> list[str]:
    if not devices:
        return []
    verb = "does" if len(devices) == 1 else "do"
    return [f"{gpus_text([device.index for device in devices])} {verb} not answer: the rest is about the others."]


def _knob_indexes(topology: Topology, environment: Mapping[str, str]) -> dict[int, int]:
    """The index in the `devices` knob by position in the topology; empty if CUDA's order is unknown without torch."""

    def refuse_order() -> Sequence[str]:
        raise UserError("CUDA's own order is unknown")

    try:
        visible = visible_devices(topology.devices, environment, refuse_order)
    except UserError:
        return {}
    return {topology.devices.index(device): index for index, device in enumerate(visible)}


def _strategies(links: Interconnect, knob_indexes: Mapping[int, int]) -> list[str]:
    fits = "A model that fits one GPU: strategy=ddp, which sends gradients only, while the backward computes."
    if links.all_nvlink:
        return [
            f"Every pair of GPUs is joined by NVLink ({links.slowest} at the least).",
            fits,
            "A model that does not fit one: pp, zero3, fsdp and tp are about equal over NVLink; measure them.",
        ]
    if links.any_nvlink:
        largest = max(len(island) for island in links.islands)
        names = " and ".join(gpus_text(island) for island in links.islands if len(island) > 1)
        usable = [island for island in links.islands if len(island) == largest and knob_indexes.keys() >= set(island)]
        example = ""
        if usable:
            devices = "+".join(str(knob_indexes[position]) for position in usable[0])
            example = f", such as --set strategy=tp --set tp_degree={largest} --set devices={devices}"
        return [
            f"NVLink joins {names}; what crosses from one group to another goes over PCIe ({links.slowest}).",
            f"Keep tensor parallelism inside a group: tp_degree at most {largest}{example}.",
            fits + " Across the groups its all-reduce is bound by the slow link, and still the cheapest.",
            "A model that does not fit one group: pp across the groups sends the least; zero and fsdp gather every"
            " weight over the slow link.",
        ]
    return [
        f"No NVLink: GPUs talk over PCIe ({links.slowest or 'the path is not known'} at the worst).",
        fits + " grad_accum makes its exchanges rarer. " + DDP_MEASURED,
        "A model that does not fit one GPU: pp beats tp and zero here, because it sends the least.",
    ]


def _crossing(topology: Topology, links: Interconnect, knob_indexes: Mapping[int, int]) -> list[str]:
    if links.slowest != "SYS":
        return []
    crossing = "SYS pairs cross the link between the CPU sockets"
    pair = _best_pair(topology, knob_indexes)
    if pair is None:
        return [f"{crossing}, the slowest path there is."]
    return [f"{crossing}: for two GPUs choose a pair that does not, such as devices={pair}."]


def _best_pair(topology: Topology, knob_indexes: Mapping[int, int]) -> str | None:
    """The best connected pair, as the devices knob takes it; None when all pairs cross the sockets."""
    pairs = [(topology.matrix[a][b], a, b) for a, b in combinations(sorted(knob_indexes), 2)]
    sign, a, b = max(pairs, key=lambda pair: (_speed(pair[0]), -pair[1], -pair[2]), default=(SELF_SIGN, 0, 0))
    return None if sign in ("SYS", UNKNOWN_SIGN, SELF_SIGN) else f"{knob_indexes[a]}+{knob_indexes[b]}"


def _speed(sign: str) -> int:
    """An order of the signs, slower ones lower."""
    if sign.startswith("NV"):
        return len(SLOWEST_FIRST) + int(sign[2:])
    return SLOWEST_FIRST.index(sign) if sign in SLOWEST_FIRST else -1


def _pcie(devices: Sequence[TopologyDevice]) -> list[str]:
    """The meaning of PCIe links below their maximum; an idle GPU lowers its generation to save power."""
    lines = []
    for device in devices:
        lowered_parts = (device.pcie_below_max or "").split("+")
        if "width" in lowered_parts:
            lines.append(
                f"GPU {device.index} uses {device.pcie_width} of {device.pcie_width_max} PCIe lanes: check its slot,"
                " riser or the board's lane sharing; transfers to it are slower by as much."
            )
    lowered_devices = [device for device in devices if "generation" in (device.pcie_below_max or "")]
    idle = [device for device in lowered_devices if not device.busy_percent]
    busy = [device for device in lowered_devices if device.busy_percent]
    if idle:
        lines.append(
            f"{gpus_text([device.index for device in idle])}: PCIe generation below the maximum while idle, which"
            " saves power; look again during a run."
        )
    if busy:
        lines.append(
            f"{gpus_text([device.index for device in busy])}: PCIe generation below the maximum under load: check"
            " slot, riser and the BIOS setting of the slot's speed."
        )
    return lines


def _affinity(devices: Sequence[TopologyDevice]) -> list[str]:
    nodes = {device.numa_node for device in devices if device.numa_node is not None}
    if len(nodes) < 2:
        return []
    return [
        f"The GPUs are attached to {len(nodes)} NUMA nodes: pin loader processes to the CPUs of their GPU's node"
        " (numactl --cpunodebind)."
    ]
