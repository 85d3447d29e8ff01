"""`topo`: the GPUs' connections, as `nvidia-smi topo -m` draws them, and what they mean for the strategies."""

from __future__ import annotations

import argparse

import msgspec

from trainfast_runner.machine.link_advice import link_advice
from trainfast_runner.machine.telemetry.topology import LEGEND, read_topology
from trainfast_tui.cli.printing.output import print_json, print_line, print_lines
from trainfast_tui.text.topology import topology_sections


def topo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print {devices, matrix, p2p, legend, advice}")


def topo(arguments: argparse.Namespace) -> int:
    """Print matrix, links, legend and advice; return 0 with and without a GPU."""
    topology = read_topology()
    if arguments.json:
        print_json({**msgspec.to_builtins(topology), "legend": LEGEND, "advice": link_advice(topology)})
        return 0
    if not topology.devices:
        print_lines(link_advice(topology))
        return 0
    for index, section in enumerate(topology_sections(topology)):
        if index:
            print_line()
        print_line(section.title)
        for line in section.lines:
            print_line(f"  {line}")
    return 0
