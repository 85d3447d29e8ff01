"""Memory that a rank needs by batch size: one straight line per phase of a step."""

from __future__ import annotations

import msgspec

from trainfast_runner.units import mebibytes


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
