"""What each rank of a search may use: `memory_limit`, or on a CPU the memory that is free, made a real limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trainfast_runner.launch import RunPlan

FREE_SHARE = 0.9
"""Of the memory that is available now; the rest is for everything else on this machine."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """Bytes by rank, none on an open GPU, and in words whose limit that is."""

    by_rank: tuple[int, ...]
    words: str


def limits_of(plan: RunPlan) -> Limits:
    """The limits that a search of this plan goes up to."""
    asked = plan.spec.knobs["memory_limit"]
    if plan.memory_limit_bytes is not None:
        return Limits(plan.memory_limit_bytes, f"memory_limit={asked}")
    if plan.device == "cuda":
        return Limits((), "what is free on the GPU, the CUDA context taken off")
    free = _available_bytes()
    each = int(FREE_SHARE * free / plan.world_size) >> 20 << 20
    words = f"{FREE_SHARE:.0%} of the {free / 2**30:.1f} GiB of memory available, set as a real limit"
    if plan.world_size > 1:
        words = words.replace(",", f", shared by {plan.world_size} ranks,", 1)
    return Limits((each,) * plan.world_size, words)


def limited(plan: RunPlan, by_rank: tuple[int, ...]) -> RunPlan:
    """The plan under these limits: on a CPU without `memory_limit` every run of the search gets the same one."""
    if plan.memory_limit_bytes is not None or not by_rank:
        return plan
    asked = "+".join(f"{limit >> 20}MiB" for limit in by_rank)
    knobs = {**plan.spec.knobs, "memory_limit": asked}
    changed = tuple(dict.fromkeys((*plan.spec.changed, "memory_limit")))
    return replace(plan, spec=replace(plan.spec, knobs=knobs, changed=changed), memory_limit_bytes=by_rank)


def _available_bytes() -> int:
    """What can be used without swapping: of the machine, or of the container where that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        most = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if most == "max" else max(0, min(free, int(most) - used))
