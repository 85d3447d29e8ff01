"""The links between GPUs as decisions about strategies need them: islands of NVLink, and the slowest path."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainfast_runner.machine.telemetry.topology import Topology, read_topology

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
