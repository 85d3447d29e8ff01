"""The choice of GPUs for a run that asks for a number of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from trainfast_runner.machine.telemetry.topology import Topology
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.units import gpus_text

NEARLY_AS_FREE = 0.9
"""Chosen, not measured: GPUs joined by NVLink are taken if the fullest of them has this share of the free memory of the
fullest GPU in the freest set."""


@dataclass(frozen=True)
class GpuChoice:
    """The GPUs of a run. `reason` is None if they are the GPUs with the most free memory."""

    gpus: tuple[DeviceReading, ...]
    reason: str | None = None


def choose_count(usable: Sequence[DeviceReading], count: int, topology: Topology | None) -> GpuChoice:
    """The `count` GPUs with the most free memory, or a set joined by NVLink that has nearly as much free."""
    by_free = sorted(usable, key=lambda gpu: -_free_bytes(gpu))[:count]
    freest = tuple(sorted(by_free, key=lambda gpu: gpu.index))
    if topology is None or count < 2 or count == len(usable) or _weakest_link(freest, topology):
        return GpuChoice(freest)
    enough_bytes = NEARLY_AS_FREE * min(map(_free_bytes, freest))
    linked_sets = [
        (min(map(_free_bytes, gpus)), links, gpus)
        for gpus in combinations(sorted(usable, key=lambda gpu: gpu.index), count)
        if min(map(_free_bytes, gpus)) >= enough_bytes and (links := _weakest_link(gpus, topology))
    ]
    if not linked_sets:
        return GpuChoice(freest)
    # Equally free sets rank by links, then by lower indexes.
    free_bytes, links, gpus = max(linked_sets, key=lambda choice: choice[:2])
    more_percent = 100 * (min(map(_free_bytes, freest)) / free_bytes - 1) if free_bytes else 0
    than = f", which have {more_percent:.0f} % more free memory" if more_percent >= 1 else ""
    chosen, instead = (gpus_text([gpu.index for gpu in group]) for group in (gpus, freest))
    return GpuChoice(gpus, f"{chosen}: linked by NVLink (NV{links}), instead of {instead}{than}")


def _weakest_link(gpus: Sequence[DeviceReading], topology: Topology) -> int:
    """The fewest NVLinks between two of these GPUs; 0 if a pair has none."""
    index_of = {device.uuid: index for index, device in enumerate(topology.devices)}
    pairs = [(index_of.get(a.uuid), index_of.get(b.uuid)) for a, b in combinations(gpus, 2)]
    signs = ["" if a is None or b is None else topology.matrix[a][b] for a, b in pairs]
    return min((int(sign[2:]) if sign.startswith("NV") else 0 for sign in signs), default=0)


def _free_bytes(gpu: DeviceReading) -> int:
    return gpu.memory_free_bytes or 0
