"""Fit peak memory by batch size: one straight line per phase of a step; the step needs the highest of them.

Peak memory is affine in the batch size per phase, not overall (`max(optimizer step, F + k * batch)`), so each phase is
fitted on its own peaks.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainfast_runner.search.journal.fitted_memory import PhaseFit, SizeFit

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
