"""Peak memory as a function of the batch size: a straight line for each phase of a step, the highest of them the need.

Peak memory is affine in the batch size per phase, not overall (`max(optimizer step, F + k * batch)`), so each phase is
fitted on its own peaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec


class PhaseLine(msgspec.Struct, frozen=True, kw_only=True):
    """`fixed_bytes + batch_size * bytes_per_sample` of one phase."""

    phase: str
    fixed_bytes: float
    bytes_per_sample: float

    def at(self, batch_size: float) -> float:
        """Bytes at the peak of this phase."""
        return self.fixed_bytes + batch_size * self.bytes_per_sample


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank needs by batch size, as its limit counts it.

    It may be off by `error_bytes` at the batch size `anchor`, the largest that was measured, and by `error_per_sample`
    more for each sample away from it.
    """

    rank: int
    lines: list[PhaseLine]
    limit_bytes: int
    error_bytes: float = 0.0
    error_per_sample: float = 0.0
    anchor: int = 0
    agreed: bool = False
    """Whether the slope between measured sizes and the predicted one are the same, as far as predictions are exact."""

    def need_bytes(self, batch_size: float) -> float:
        """The peak of the step: of the phase that is highest at this batch size."""
        return max(line.at(batch_size) for line in self.lines)

    def error_at(self, batch_size: float, share: float = 1.0) -> float:
        """How far the need may be off there, in bytes: more, the further it lies from what was measured.

        Of what the slope may be off only a `share` is counted.
        """
        return self.error_bytes + share * self.error_per_sample * abs(batch_size - self.anchor)

    def surely_fits(self, batch_size: int) -> bool:
        """Whether it fits with the whole error against it."""
        return self.need_bytes(batch_size) + self.error_at(batch_size) <= self.limit_bytes

    def surely_not(self, batch_size: int) -> bool:
        """Whether it does not fit with the whole error for it."""
        return self.need_bytes(batch_size) - self.error_at(batch_size) > self.limit_bytes


@dataclass(frozen=True)
class Point:
    """What one rank was seen to need at one batch size: bytes by phase, as its limit counts them."""

    batch_size: int
    phase_peaks: dict[str, int]


@dataclass(frozen=True)
class Noise:
    """How exact peaks are on a device: `bytes` that one may scatter, `share` of what is extrapolated."""

    bytes: int
    share: float


# A process on a CPU keeps blocks below the C library's threshold, and the kernel counts by pages: what was the same
# size measured 1 to 3 MiB apart. A GPU's allocator works in blocks of 2 and 20 MiB and fragments.
NOISE = {"cpu": Noise(4 << 20, 0.015), "cuda": Noise(48 << 20, 0.03)}
PREDICTION_SHARE = 0.15
"""How far a predicted growth per sample is taken to be off, before any second point."""
CONSTANT_PHASE = "optimizer"
"""The phase whose peak is made of weights, gradients and states, whatever the batch."""
APART = 0.75
"""Points are far enough apart for a slope when the smaller is at most this share of the larger."""


def fit(rank: int, points: list[Point], limit_bytes: int, noise: Noise, predicted_slope: float | None = None) -> Fit:
    """The lines through a rank's points (at least one, of different batch sizes).

    Each goes through the largest point; its slope comes from the largest point well below that. With one point the
    slope is the predicted one, or that of a need in proportion to the batch, which no real one reaches.

    Two points tell the slope themselves: on a CPU tiny-llama's from 4 to 16 samples was that from 16 to 35 within
    0.01 %, the traced one 7 % steeper. Only where the prediction is clearly steeper the error is the difference: a peak
    is convex in the batch, and a small size may have it at a point of the step that grows less.
    """
    ordered = sorted(points, key=lambda point: point.batch_size)
    last = ordered[-1]
    agreed = False
    if len(ordered) == 1:
        lines = [_first_line(phase, peak, last.batch_size, predicted_slope) for phase, peak in last.phase_peaks.items()]
        error = 0.0 if predicted_slope is None else PREDICTION_SHARE * predicted_slope
    else:
        lines, error, agreed = _through(ordered, noise, predicted_slope)
    return Fit(
        rank=rank,
        lines=lines,
        limit_bytes=limit_bytes,
        error_bytes=noise.bytes,
        error_per_sample=error,
        anchor=last.batch_size,
        agreed=agreed,
    )


def _through(ordered: list[Point], noise: Noise, predicted_slope: float | None) -> tuple[list[PhaseLine], float, bool]:
    """The lines through points in the order of their size, how many bytes a sample they may be off, and whether the
    prediction agrees."""
    last = ordered[-1]
    below = [point for point in ordered[:-1] if point.batch_size <= APART * last.batch_size]
    base = below[-1] if below else ordered[0]
    apart = last.batch_size - base.batch_size
    slopes = {
        phase: max(0.0, (peak - base.phase_peaks.get(phase, peak)) / apart) for phase, peak in last.phase_peaks.items()
    }
    steepest = max(slopes, key=lambda phase: slopes[phase])
    error = 2 * noise.bytes / apart + noise.share * slopes[steepest]
    agreed = False
    if predicted_slope is not None:
        steeper = predicted_slope - slopes[steepest]
        agreed = abs(steeper) <= PREDICTION_SHARE * predicted_slope
        if len(ordered) == 2 and not agreed:
            error = max(error, steeper)
    lines = [
        PhaseLine(phase=phase, fixed_bytes=peak - slopes[phase] * last.batch_size, bytes_per_sample=slopes[phase])
        for phase, peak in last.phase_peaks.items()
    ]
    return lines, error, agreed


def _first_line(phase: str, peak: int, batch_size: int, predicted_slope: float | None) -> PhaseLine:
    if phase == CONSTANT_PHASE:
        return PhaseLine(phase=phase, fixed_bytes=peak, bytes_per_sample=0.0)
    slope = peak / batch_size if predicted_slope is None else predicted_slope
    return PhaseLine(phase=phase, fixed_bytes=peak - slope * batch_size, bytes_per_sample=slope)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch size up to `most` that passes a test which every smaller one passes too; 0 where 1 does not."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
