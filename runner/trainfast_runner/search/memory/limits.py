"""The memory each rank of a search may use: `memory_limit`, or on a CPU the free memory, set as a real limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainfast_runner.errors import UserError
from trainfast_runner.known_values import lowest
from trainfast_runner.machine.cgroup import read_host_free_bytes
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.units import gibibytes

FREE_SHARE = 0.9
"""Share of the free host memory that a search may use; the rest is left to other processes."""
CONTEXT_WITHOUT_KERNELS_BYTES = 512 << 20
"""Chosen, not measured: about the GPU memory of a CUDA context without the kernels that are loaded on demand, which
`memory.model_size` counts too."""


@dataclass(frozen=True)
class Limits:
    """Bytes by rank, empty on a GPU without memory_limit, and the source of the limit in words."""

    by_rank: tuple[int, ...]
    source: str


def limits_of(plan: RunPlan) -> Limits:
    """Return the limits of a search of this plan: never beyond the free memory, or the machine would swap."""
    limits_bytes, ranks = plan.memory_limit_bytes, plan.world_size
    source = f"memory_limit={plan.spec.knobs.get('memory_limit')}"
    if plan.device == "cuda":
        # A GPU allocates no more than its memory: each rank reports its own limit.
        if limits_bytes is None:
            return Limits((), "the GPU's free memory, without its context")
        return Limits(limits_bytes, source)
    free_bytes = read_host_free_bytes()
    if limits_bytes is not None and sum(limits_bytes) <= free_bytes:
        return Limits(limits_bytes, source)
    sharing_text = f", shared by {ranks} ranks" if ranks > 1 else ""
    limit_text = f", less than {source}" if limits_bytes is not None else ""
    source = f"{FREE_SHARE:.0%} of the {gibibytes(free_bytes)} free{sharing_text}, set as a real limit{limit_text}"
    return Limits((share_of_free(free_bytes, ranks),) * ranks, source)


def share_of_free(free_bytes: int, ranks: int) -> int:
    """Return the bytes of each rank where all of them share the free host memory, a whole number of MiB."""
    return int(FREE_SHARE * free_bytes / max(1, ranks)) >> 20 << 20


def smallest_limit(plan: RunPlan, free_bytes: int | None) -> int:
    """Return the smallest limit of a rank in bytes: of `memory_limit`, else the free memory of its GPU.

    Raises UserError if neither is known.
    """
    limit_bytes = min(plan.memory_limit_bytes or (), default=free_bytes)
    if limit_bytes is None:
        raise limit_unknown_error()
    return limit_bytes


def limit_unknown_error() -> UserError:
    """The refusal of a search on a GPU that reports no free memory, without `memory_limit`."""
    return UserError(
        "the free memory of the GPU is unknown",
        key="memory_limit",
        advice="a memory_limit",
        option="--set memory_limit=…",
    )


def free_gpu_bytes(plan: RunPlan) -> int | None:
    """Return the bytes that the fullest GPU has free beside a context, by estimate; None on a CPU and if unknown."""
    free_bytes = lowest(gpu.memory_free_bytes for gpu in plan.gpus)
    return None if free_bytes is None else free_bytes - CONTEXT_WITHOUT_KERNELS_BYTES


def with_limits(plan: RunPlan, by_rank: tuple[int, ...]) -> RunPlan:
    """Return the plan under these limits: on a CPU every run of the search gets them as its `memory_limit`."""
    if not by_rank or plan.memory_limit_bytes == by_rank:
        return plan
    memory_limit = "+".join(f"{limit >> 20}MiB" for limit in by_rank)
    return replace(plan, spec=plan.spec.with_overrides(memory_limit=memory_limit), memory_limit_bytes=by_rank)
