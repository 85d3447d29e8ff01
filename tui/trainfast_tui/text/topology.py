"""The machine's topology in lines of text, the same on the command line and on the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainfast_runner.machine.telemetry.topology import LEGEND, Topology
from trainfast_runner.records.tick import DeviceReading
from trainfast_tui.text.format import ABSENT, FigureHeading, pair_lines, plain, table

SectionKind = Literal["table", "text", "errors", "prose"]
"""The first line of a table names its columns; errors and prose are sentences of any length."""


@dataclass(frozen=True)
class TopologySection:
    """A part of the topology: its title and its lines."""

    title: str
    kind: SectionKind
    lines: list[str]


def _device_lines(topology: Topology) -> list[str]:
    """Return a line for each GPU: name, bus id, NVLinks."""
    rows = [
        [
            f"GPU{device.index}",
            plain(device.name or ("does not answer" if device.error else ABSENT)),
            device.bus_id or ABSENT,
            ABSENT if device.nvlinks is None else str(device.nvlinks),
        ]
        for device in topology.devices
    ]
    return table(("", "NAME", "BUS", FigureHeading("NVLINKS")), rows, max_cells=48)


def silent_lines(topology: Topology) -> list[str]:
    """Return a sentence with its cure, too long for a table's cell, for each GPU that does not answer."""
    return [f"GPU{device.index} does not answer: {device.error}" for device in topology.devices if device.error]


def pcie_link(device: DeviceReading) -> str:
    """Return the PCIe generation and width, with the maximum if it is higher: `1 x8 of 4 x16`."""
    generation, width = device.pcie_generation, device.pcie_width
    if generation is None or width is None:
        return ABSENT
    widest = device.pcie_generation_max or generation, device.pcie_width_max or width
    return f"{generation} x{width}" + ("" if widest == (generation, width) else f" of {widest[0]} x{widest[1]}")


def peer_lines(topology: Topology) -> list[str]:
    """Name the GPUs that can read each other's memory, in one line if all can or none is known."""
    answers = [peer for row in topology.p2p for peer in row if peer is not None]
    if len(topology.devices) < 2:
        return []
    if not answers:
        return ["Peer access between the GPUs is unknown."]
    if all(answer == "ok" for answer in answers):
        gpu_words = "GPU that answers" if any(device.error for device in topology.devices) else "GPU"
        return [f"Every {gpu_words} can read every other one's memory."]
    return [
        f"GPU{a.index} cannot read GPU{b.index}'s memory: {peer}"
        for a, row in zip(topology.devices, topology.p2p, strict=True)
        for b, peer in zip(topology.devices, row, strict=True)
        if peer not in (None, "ok")
    ]


def topology_sections(topology: Topology) -> list[TopologySection]:
    """Return the sections of a machine; without a GPU only the consequences for training."""
    # Not needed for the line of a GPU, which `monitor` shows first.
    from trainfast_runner.machine.telemetry.topology import link_advice

    advice = TopologySection("for training", "prose", link_advice(topology))
    if not topology.devices:
        return [advice]
    silent_gpus, names = silent_lines(topology), [f"GPU{device.index}" for device in topology.devices]
    # As `nvidia-smi topo -m` lays it out.
    matrix = table(["", *names], [[name, *row] for name, row in zip(names, topology.matrix, strict=True)])
    return [
        TopologySection("links between GPUs", "table", matrix),
        TopologySection("GPUs", "table", _device_lines(topology)),
        *([TopologySection("GPUs without an answer", "errors", silent_gpus)] if silent_gpus else []),
        *([TopologySection("peer access", "text", peer_lines(topology))] if len(topology.devices) > 1 else []),
        TopologySection("legend", "text", pair_lines(LEGEND.items())),
        advice,
    ]
