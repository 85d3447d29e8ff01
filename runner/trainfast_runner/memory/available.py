"""What a rank may use: the one rule behind the memory bar, `predict`, and a search without `memory_limit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.memory.model_size import least_weight_bytes
from trainfast_runner.settings.knob_values import parse_bytes_per_rank
from trainfast_runner.units import mebibytes

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.records.tick import DeviceReading
    from trainfast_runner.settings.spec import RunSpec

NOTHING_FITS = 3
"""The exit code."""
MEMORY_LIMIT = "memory_limit"
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Room:
    """What the tightest rank may use, in bytes; `words` say whose figure that is.

    `with_context`: a CUDA context comes out of it too. It does out of what a GPU has free; `memory_limit` caps the
    allocator alone.
    """

    limit_bytes: int
    words: str
    with_context: bool = False

    @property
    def is_memory_limit(self) -> bool:
        """Whether it is the limit that is set for the run, and not what is free."""
        return self.words == MEMORY_LIMIT

    def for_allocator(self, context_bytes: int | None) -> int:
        """What is left for tensors, in bytes, when a context takes so much; None for a context of unknown size."""
        return max(0, self.limit_bytes - (context_bytes or 0)) if self.with_context else self.limit_bytes


def room_of(
    spec: RunSpec,
    machine: Machine,
    ranks: int,
    host_free_bytes: int | None,
    context_bytes: int | None = None,
    *,
    is_here: bool = True,
) -> Room | None:
    """The smaller of `memory_limit` and what is free: on the fullest GPU, or a share of the host's.

    `host_free_bytes` is what the host has free, `context_bytes` a CUDA context; None where unknown. `is_here` False
    leaves out what is free: the run is for another machine. None where nobody limits anything. Raises UserError for
    GPUs that are not there.
    """
    free = _free(spec, machine, ranks, host_free_bytes) if is_here else None
    asked = spec.knobs["memory_limit"]
    if not isinstance(asked, str):
        return free
    limit = Room(min(parse_bytes_per_rank(asked)), MEMORY_LIMIT)
    if free is None or limit.limit_bytes <= free.for_allocator(context_bytes):
        return limit
    return Room(free.limit_bytes, f"{free.words}, less than memory_limit", free.with_context)


def hopeless_limit(spec: RunSpec, parameters: int | None, devices: int) -> UserError | None:
    """The refusal of a `memory_limit` that the weights alone do not fit in; None where they may, or are unknown."""
    limit = spec.knobs["memory_limit"]
    if parameters is None or not isinstance(limit, str):
        return None
    needed = least_weight_bytes(parameters, spec.knobs, devices)
    if min(parse_bytes_per_rank(limit)) >= needed:
        return None
    return UserError(
        f"memory_limit={limit} is below what the {parameters:,} parameters alone need"
        f"{' on each device' if devices > 1 else ''}: {needed:,} bytes ({mebibytes(needed)})",
        key="memory_limit",
        exit_code=NOTHING_FITS,
    )


def gpu_of(spec: RunSpec, machine: Machine) -> str | None:
    """The name of the first GPU that a run takes; None on a CPU. Raises UserError for GPUs that are not there."""
    if machine.used_by(spec.knobs["devices"]).device != "cuda":
        return None
    return _chosen(spec, machine)[0].name


def _chosen(spec: RunSpec, machine: Machine) -> tuple[DeviceReading, ...]:
    devices = spec.knobs["devices"]
    return machine.choose(devices if isinstance(devices, int | str) else None, str(spec.knobs["strategy"]))


def _free(spec: RunSpec, machine: Machine, ranks: int, host_free_bytes: int | None) -> Room | None:
    if machine.used_by(spec.knobs["devices"]).device == "cuda":
        chosen = _chosen(spec, machine)
        free = [(gpu.memory_free_bytes, gpu.index) for gpu in chosen if gpu.memory_free_bytes is not None]
        if free:
            return Room(min(free)[0], f"free on GPU {min(free)[1]}", with_context=True)
        # A GPU that tells of no memory has none of its own: its limit is the host's.
        if host_free_bytes is None or not chosen:
            return None
        words = f"free on the host, whose memory GPU {chosen[0].index} shares"
        return Room(host_free_bytes // max(1, ranks), words, with_context=True)
    if host_free_bytes is None:
        return None
    words = "free" if ranks == 1 else f"free, shared by {ranks} processes"
    return Room(host_free_bytes // max(1, ranks), words)


def host_free_bytes() -> int:
    """What can be used now without swapping, in bytes."""
    import psutil  # the screen needs a `Room` before its first frame, and no readings yet

    return within_container(int(psutil.virtual_memory().available))


def within_container(free_bytes: int) -> int:
    """What the host has free, or less where the container this runs in may use less."""
    try:
        most = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        return max(0, min(free_bytes, int(most) - used))
    except (OSError, ValueError):
        return free_bytes  # no container, or one whose limit is the word max
