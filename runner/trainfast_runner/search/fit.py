"""Peak memory as a function of the batch size: a straight line for each phase of a step, the highest of them the need.

Peak memory is affine in the batch size per phase, not overall (`max(optimizer step, F + k * batch)`), so each phase is
fitted on its own peaks.
"""

from __future__ import annotations

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
    """What one rank needs by batch size, as its limit counts it; `error_bytes` is how far off that may be."""

    rank: int
    lines: list[PhaseLine]
    limit_bytes: int
    error_bytes: float = 0.0

    def need_bytes(self, batch_size: float) -> float:
        """The peak of the step: of the phase that is highest at this batch size."""
        return max(line.at(batch_size) for line in self.lines)
