"""Contents of the speed bar: the predicted speed of the next run, or why there is none, and the measured one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import PredictedSpeed
    from trainfast_runner.running.follower import RunSnapshot


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The samples/s of the run on the screen, and the speed that was predicted before that run."""

    samples_per_s: float
    predicted: PredictedSpeed | None


@dataclass(frozen=True, slots=True)
class NextRunSpeed:
    """A prediction in samples/s, or else `why` there is none; and a measurement where there is one."""

    predicted: PredictedSpeed | None = None
    why: str = ""
    reference: float | None = None
    """The median predicted for the knobs of the run on the screen, or of the preset; None if all are the same."""
    measured: MeasuredSpeed | None = None

    @property
    def change_percent(self) -> float | None:
        """The predicted change by the overrides; None without a prediction of both."""
        if self.predicted is None or not self.reference:
            return None
        return 100 * (self.predicted.median / self.reference - 1)


def measured_speed(run: RunSnapshot | None) -> MeasuredSpeed | None:
    """Speed of the ended run on the screen; None for a live one, and where it ranks against no other run."""
    result = run.result if run is not None else None
    if result is None or result.provisional or result.measured_under is not None:
        return None
    rate = result.throughput.samples_per_s.median
    return None if rate is None else MeasuredSpeed(rate, result.throughput.predicted)
