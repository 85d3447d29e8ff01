"""The available memory of a rank: one rule for the memory bar, `predict`, and a search without `memory_limit`."""

from __future__ import annotations

from dataclasses import dataclass

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cgroup import free_within_limits
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.model_size import least_weight_bytes
from trainfast_runner.records.run_states import EXIT_CODES
from trainfast_runner.settings.device_counts import chosen_gpus
from trainfast_runner.settings.knob_values import tightest_limit_bytes
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import mebibytes


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Available memory of the tightest rank, in bytes."""

    size_bytes: int
    source: str
    """The origin of the figure, as text."""
    with_context: bool = False
    """True if a CUDA context takes some of these bytes too, as of a GPU's free memory; `memory_limit` caps the
    allocator alone."""
    from_memory_limit: bool = False
    """True if this is the limit set for the run, and not the free memory."""

    def for_allocator(self, context_bytes: int | None) -> int:
        """Bytes left for tensors beside a context of this size; nothing is taken off for an unknown size, None."""
        return max(0, self.size_bytes - (context_bytes or 0)) if self.with_context else self.size_bytes


def available_memory(
    spec: RunSpec,
    machine: Machine,
    ranks: int,
    host_free_bytes: int | None,
    context_bytes: int | None = None,
    *,
    is_here: bool = True,
) -> AvailableMemory | None:
    """Return the smaller of `memory_limit` and the free memory: of the fullest GPU, or a share of the host's.

    `host_free_bytes` and `context_bytes` (a CUDA context) are None if unknown. With `is_here` False the run is for
    another machine, and free memory does not count. None when nothing is known. Raises UserError for GPUs that do not
    exist.
    """
    free = _free_memory(spec, machine, ranks, host_free_bytes) if is_here else None
    limit_bytes = tightest_limit_bytes(spec.knobs)
    if limit_bytes is None:
        return free
    limit = AvailableMemory(limit_bytes, "memory_limit", from_memory_limit=True)
    if free is None or limit.size_bytes <= free.for_allocator(context_bytes):
        return limit
    return AvailableMemory(free.size_bytes, f"{free.source}, less than memory_limit", free.with_context)


def limit_below_weights_error(spec: RunSpec, parameter_count: int | None, device_count: int) -> UserError | None:
    """The refusal of a `memory_limit` that the weights alone exceed; None if they fit or are unknown."""
    limit_bytes = tightest_limit_bytes(spec.knobs)
    if parameter_count is None or limit_bytes is None:
        return None
    needed_bytes = least_weight_bytes(parameter_count, spec.knobs, device_count)
    if limit_bytes >= needed_bytes:
        return None
    return UserError(
        f"memory_limit={spec.knobs['memory_limit']} is below what the {parameter_count:,} parameters alone need"
        f"{' on each device' if device_count > 1 else ''}: {needed_bytes:,} bytes ({mebibytes(needed_bytes)})",
        key="memory_limit",
        exit_code=EXIT_CODES["oom"],
    )


def _free_memory(spec: RunSpec, machine: Machine, ranks: int, host_free_bytes: int | None) -> AvailableMemory | None:
    gpus = chosen_gpus(spec.knobs, machine).gpus
    if gpus:
        free = [(gpu.memory_free_bytes, gpu.index) for gpu in gpus if gpu.memory_free_bytes is not None]
        if free:
            return AvailableMemory(min(free)[0], f"free on GPU {min(free)[1]}", with_context=True)
        # A GPU without a memory reading has none of its own: it shares the host's.
        if host_free_bytes is None:
            return None
        source = f"free on the host, whose memory GPU {gpus[0].index} shares"
        return AvailableMemory(host_free_bytes // max(1, ranks), source, with_context=True)
    if host_free_bytes is None:
        return None
    source = "free" if ranks == 1 else f"free, shared by {ranks} processes"
    return AvailableMemory(host_free_bytes // max(1, ranks), source)


def read_host_free_bytes() -> int:
    """Bytes of host memory that this process's control groups let it use now without swapping."""
    # Imported late: the screen needs AvailableMemory before its first frame, and no readings yet.
    import psutil

    return free_within_limits(int(psutil.virtual_memory().available))
