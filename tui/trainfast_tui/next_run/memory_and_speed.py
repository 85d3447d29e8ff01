"""Memory and speed of the next run: predicted, or why not, beside the measurements of the run on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trainfast_tui.live.figures import predicted_peak_bytes
from trainfast_tui.text.format import percent_change

if TYPE_CHECKING:
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.records.run_file import PredictedSpeed
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.next_run.next_run import NextRun


class MeasuredMemory(msgspec.Struct, frozen=True):
    """The measured memory of the run on the screen."""

    peak_bytes: int
    """The worst rank's peak."""
    predicted_bytes: int | None
    """The peak that was predicted for that run; None without a prediction."""
    has_same_knobs: bool
    """True if the next run repeats that run, so that both predictions are about the same settings."""


class NextRunMemory(msgspec.Struct, frozen=True):
    """The predicted memory of the next run, beside the measured memory of the run on the screen."""

    fit: PredictedFit | None = None
    spec: RunSpec | None = None
    """The predicted settings, with their number of devices; None without a prediction."""
    reason: str = ""
    """Why there is no prediction, or none yet."""
    failed: bool = False
    """True if there will be no prediction."""
    since_ns: int | None = None
    """CLOCK_MONOTONIC at which the trace under way began."""
    measured: MeasuredMemory | None = None
    reference_bytes: int | None = None
    """The peak predicted for the knobs of the run on the screen, or of the preset; None if all are the same."""


def measured_memory(run: RunSnapshot | None, next_run: NextRun | None) -> MeasuredMemory | None:
    """Return the shown run's peak memory; None before the second step, when the optimizer's states are allocated."""
    if run is None or run.run_file is None or run.peak_allocated_bytes is None or len(run.steps) < 2:
        return None
    return MeasuredMemory(
        run.peak_allocated_bytes, predicted_peak_bytes(run), next_run is not None and next_run.repeats(run.run_file)
    )


class MeasuredSpeed(msgspec.Struct, frozen=True):
    """The measured speed of the run on the screen."""

    samples_per_s: float
    predicted: PredictedSpeed | None
    """The speed that was predicted before that run; None without a prediction."""


class NextRunSpeed(msgspec.Struct, frozen=True):
    """The predicted speed of the next run, beside the measured speed of the run on the screen."""

    predicted: PredictedSpeed | None = None
    reason: str = ""
    """Why there is no prediction."""
    reference_samples_per_s: float | None = None
    """The predicted median for the knobs of the run on the screen, or of the preset; None if all are the same."""
    measured: MeasuredSpeed | None = None

    @property
    def change_percent(self) -> float | None:
        """The predicted change from the run on the screen, or from the preset; None without a prediction of both."""
        return None if self.predicted is None else percent_change(self.predicted.median, self.reference_samples_per_s)


def measured_speed(run: RunSnapshot | None) -> MeasuredSpeed | None:
    """Return the speed of the ended run on the screen; None for a live one, and where it ranks against no other run."""
    result = run.result if run is not None else None
    if result is None or result.provisional or result.measured_under is not None:
        return None
    rate = result.throughput.samples_per_s.typical
    return None if rate is None else MeasuredSpeed(rate, result.throughput.predicted)
