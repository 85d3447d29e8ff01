"""Peak memory by batch size: one straight line per phase of a step; the step needs the highest of them.

Peak memory is affine in the batch size per phase, not overall (`max(optimizer step, F + k * batch)`), so each phase is
fitted on its own peaks.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from trainfast_runner.units import mebibytes

NOISE_BYTES = {"cpu": 4 << 20, "cuda": 48 << 20}
"""Scatter of a measured peak, in bytes: a CPU's C library keeps small blocks, a GPU's allocator works in large ones."""
SLOPE_SHARE = {"cpu": 0.015, "cuda": 0.03}
"""Error of a slope between two sizes, as a share: on a CPU small sizes were 0 to 2 % steeper than large ones."""
PREDICTED_SHARE = 0.15
"""Error of a predicted slope, as a share."""
CONSTANT_PHASE = "optimizer"
"""The phase whose peak does not grow with the batch: weights, gradients and states."""
APART = 0.75
"""Two sizes give a slope when the smaller is at most this share of the larger."""


class PhaseLine(msgspec.Struct, frozen=True, kw_only=True):
    """`fixed_bytes + batch_size * bytes_per_sample` of one phase."""

    phase: str
    fixed_bytes: float
    bytes_per_sample: float

    def at(self, batch_size: float) -> float:
        """Bytes at the peak of this phase."""
        return self.fixed_bytes + batch_size * self.bytes_per_sample


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory one rank needs by batch size, as its limit counts it.

    The error is `error_bytes` at the batch size `anchor`, the largest that was measured, and grows by
    `error_per_sample` for each sample away from it.
    """

    rank: int
    lines: list[PhaseLine]
    limit_bytes: int
    error_bytes: float = 0.0
    error_per_sample: float = 0.0
    anchor: int = 0

    def need_bytes(self, batch_size: float) -> float:
        """Peak of the step: that of the highest phase at this batch size."""
        return max(line.at(batch_size) for line in self.lines)

    def need_text(self, batch_size: int) -> str:
        """The need at this batch size and the limit: `60 MiB of 64 MiB`."""
        return f"{mebibytes(self.need_bytes(batch_size))} of {mebibytes(self.limit_bytes)}"

    def error_at(self, batch_size: float) -> float:
        """Largest error of `need_bytes`, in bytes."""
        return self.error_bytes + self.error_per_sample * abs(batch_size - self.anchor)

    def surely_fits(self, batch_size: int) -> bool:
        """True if the batch fits with the whole error against it."""
        return self.need_bytes(batch_size) + self.error_at(batch_size) <= self.limit_bytes


def fit_memory(
    rank: int,
    points: Mapping[int, Mapping[str, int]],
    limit_bytes: int,
    device: str,
    predicted_slope: float | None = None,
) -> RankMemory:
    """Fit a line per phase to a rank's peaks, `points`: bytes by phase, by batch size.

    Each line goes through the largest size; its slope is the secant from the largest size well below. With one size
    the slope is the predicted one, or that of a need in proportion to the batch, which no real one reaches.
    """
    *smaller, last = sorted(points)
    apart = [size for size in smaller if size <= APART * last] or smaller[:1]
    peaks = points[last]
    if apart:
        base = points[apart[-1]]
        slopes = {phase: max(0.0, (peak - base.get(phase, peak)) / (last - apart[-1])) for phase, peak in peaks.items()}
        error = _secant_error(
            device, last - apart[-1], max(slopes.values()), predicted_slope, is_first=len(points) == 2
        )
    else:
        usual = {phase: peak / last if predicted_slope is None else predicted_slope for phase, peak in peaks.items()}
        slopes = {phase: 0.0 if phase == CONSTANT_PHASE else slope for phase, slope in usual.items()}
        error = PREDICTED_SHARE * (predicted_slope or 0.0)
    return RankMemory(
        rank=rank,
        lines=[
            PhaseLine(phase=phase, fixed_bytes=peak - slopes[phase] * last, bytes_per_sample=slopes[phase])
            for phase, peak in peaks.items()
        ],
        limit_bytes=limit_bytes,
        error_bytes=NOISE_BYTES[device],
        error_per_sample=error,
        anchor=last,
    )


def _secant_error(device: str, apart: int, slope: float, predicted: float | None, *, is_first: bool) -> float:
    """Error of a slope between sizes `apart`, in bytes per sample.

    On a CPU a prediction that agrees leaves a part of the scatter of the peaks. A clearly steeper one is the error
    of the first secant: a peak is convex in the batch, and at a small size it may be at a point that grows less.
    """
    scatter = NOISE_BYTES[device] / apart
    measured = 2 * scatter + SLOPE_SHARE[device] * slope
    if predicted is None:
        return measured
    if abs(predicted - slope) <= PREDICTED_SHARE * predicted:
        return scatter / 2 if device == "cpu" else measured
    return max(measured, predicted - slope) if is_first else measured
