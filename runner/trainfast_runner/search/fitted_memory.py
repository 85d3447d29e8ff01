"""Fit peak memory by batch size: one straight line per phase of a step; the step needs the highest of them.

Peak memory is affine in the batch size per phase, not overall (`max(optimizer step, F + k * batch)`), so each phase is
fitted on its own peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from trainfast_runner.errors import UserError, lowest
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.units import gibibytes, mebibytes

NOISE_BYTES = {"cpu": 4 << 20, "cuda": 48 << 20}
"""Scatter of a measured peak, in bytes: a CPU's C library keeps small blocks, a GPU's allocator works in large ones."""
SLOPE_SHARE = {"cpu": 0.015, "cuda": 0.03}
"""Error of a slope between two sizes, as a share: on a CPU small sizes were 0 to 2 % steeper than large ones."""
PREDICTED_SHARE = 0.15
"""Error of a predicted slope, as a share."""
CONSTANT_PHASE = "optimizer"
"""The phase whose peak does not grow with the batch: weights, gradients and states."""
SCRIPT_PHASE = "step"
"""The phase of a script's peak: its hooks see no phases of memory."""
MAX_SIZE_RATIO = 0.75
"""Two sizes give a slope if the smaller is at most this share of the larger."""


def fit_lines(points: Mapping[int, Mapping[str, int]], device: str, predicted_slope: float | None = None) -> SizeFit:
    """Fit a line per phase to the peaks of a rank, `points`: bytes by phase, by batch size.

    Each line goes through the largest size; its slope is the secant from the largest size well below. With one size
    the slope is the predicted one; without a prediction all memory is assumed to grow with the batch.
    """
    *smaller_sizes, largest_size = sorted(points)
    sizes_below = [size for size in smaller_sizes if size <= MAX_SIZE_RATIO * largest_size] or smaller_sizes[:1]
    peaks = points[largest_size]
    if sizes_below:
        base = points[sizes_below[-1]]
        slopes = {
            phase: max(0.0, (peak - base.get(phase, peak)) / (largest_size - sizes_below[-1]))
            for phase, peak in peaks.items()
        }
        error = _secant_error(
            device, largest_size - sizes_below[-1], max(slopes.values()), predicted_slope, is_first=len(points) == 2
        )
    else:
        assumed_slopes = {
            phase: peak / largest_size if predicted_slope is None else predicted_slope for phase, peak in peaks.items()
        }
        slopes = {phase: 0.0 if phase == CONSTANT_PHASE else slope for phase, slope in assumed_slopes.items()}
        error = PREDICTED_SHARE * (predicted_slope or 0.0)
    return SizeFit(
        lines=[
            PhaseFit(phase=phase, fixed_bytes=peak - slopes[phase] * largest_size, bytes_per_sample=slopes[phase])
            for phase, peak in peaks.items()
        ],
        error_bytes=NOISE_BYTES[device],
        error_per_sample=error,
        anchor=largest_size,
    )


def _secant_error(
    device: str, size_distance: int, slope: float, predicted_slope: float | None, *, is_first: bool
) -> float:
    """Error of a slope between sizes `size_distance` apart, in bytes per sample.

    On a CPU a prediction that agrees leaves half of the scatter. If the prediction is clearly steeper, the first secant
    may be too flat by the difference: a peak is convex in the batch.
    """
    scatter = NOISE_BYTES[device] / size_distance
    measured_error = 2 * scatter + SLOPE_SHARE[device] * slope
    if predicted_slope is None:
        return measured_error
    if abs(predicted_slope - slope) <= PREDICTED_SHARE * predicted_slope:
        return scatter / 2 if device == "cpu" else measured_error
    return max(measured_error, predicted_slope - slope) if is_first else measured_error


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


class PhaseFit(msgspec.Struct, frozen=True, kw_only=True):
    """`fixed_bytes + batch_size * bytes_per_sample` of one phase."""

    phase: str
    fixed_bytes: float
    bytes_per_sample: float

    def at(self, batch_size: float) -> float:
        """Return the bytes at the peak of this phase."""
        return self.fixed_bytes + batch_size * self.bytes_per_sample


class SizeFit(msgspec.Struct, frozen=True, kw_only=True):
    """Memory by batch size: a line for each phase, and the error of their peak."""

    lines: list[PhaseFit]
    error_bytes: float = 0.0
    """The largest error at the batch size `anchor`."""
    error_per_sample: float = 0.0
    """Growth of the error with every sample away from `anchor`."""
    anchor: int = 0
    """The largest batch size that was measured."""

    def need_bytes(self, batch_size: float) -> float:
        """Return the peak of the step: that of the highest phase at this batch size."""
        return max(line.at(batch_size) for line in self.lines)

    def error_at(self, batch_size: float) -> float:
        """Return the largest error of `need_bytes`, in bytes."""
        return self.error_bytes + self.error_per_sample * abs(batch_size - self.anchor)


class MemoryFit(SizeFit, frozen=True, kw_only=True):
    """Memory that one rank needs by batch size, as its limit counts memory."""

    rank: int
    limit_bytes: int

    def need_text(self, batch_size: int) -> str:
        """Return the need at this batch size and the limit: `60 MiB of 64 MiB`."""
        return f"{mebibytes(self.need_bytes(batch_size))} of {mebibytes(self.limit_bytes)}"

    def surely_fits(self, batch_size: int) -> bool:
        """True if the batch fits even if the need is too low by its whole error."""
        return self.need_bytes(batch_size) + self.error_at(batch_size) <= self.limit_bytes
