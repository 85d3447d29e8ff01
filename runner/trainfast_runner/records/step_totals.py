"""Totals over all steps of a rank, counted as steps are read: exact however few steps stay in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfast_runner.known_values import highest
from trainfast_runner.records.run_lines import Step


@dataclass
class StepTotals:
    """Counts and highest peaks over the steps of one rank. The cap of the file removed the lines of `dropped` steps."""

    measured_read: int = 0
    """Measured steps whose lines were read."""
    warmup: int = 0
    not_finite: int = 0
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    alloc_retries: int | None = None
    phase_peaks: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    missing: int = 0
    """Steps between the first and the last that have no line."""
    _last_step: int | None = None

    @property
    def measured(self) -> int:
        """Measured steps, the dropped ones included: a cap is reached long after the warm-up."""
        return self.measured_read + self.dropped

    def add(self, step: Step) -> None:
        """Add the rank's next step."""
        if step.warmup:
            self.warmup += 1
        else:
            self.measured_read += 1
        self.not_finite += step.loss_not_finite
        self.peak_allocated_bytes = highest((self.peak_allocated_bytes, step.peak_allocated_bytes))
        self.peak_reserved_bytes = highest((self.peak_reserved_bytes, step.peak_reserved_bytes))
        self.alloc_retries = highest((self.alloc_retries, step.alloc_retries))
        for phase, peak in (step.phase_peaks or {}).items():
            self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), peak)
        if self._last_step is not None:
            self.missing += max(0, step.step - self._last_step - 1)
        self._last_step = step.step
