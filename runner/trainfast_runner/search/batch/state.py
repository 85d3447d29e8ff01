"""The state of a batch search, from its journal: the sizes tried, and each rank's memory fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from trainfast_runner.search.journal.batch import BatchJournal, BatchLine, ConfirmationRun, Predicted, Probe
from trainfast_runner.search.journal.fitted_memory import MemoryFit
from trainfast_runner.search.memory.fit_lines import fit_lines
from trainfast_runner.worker.shared.memory_limit import limit_of_rank

LARGEST_BATCH = 1 << 20
"""The largest batch size that is tried."""


@dataclass(frozen=True)
class BatchState:
    """State of a search: the question, and every size tried.

    Limits are bytes by rank, empty on a GPU without memory_limit.
    """

    device: str
    world_size: int
    limits_bytes: tuple[int, ...] = ()
    prediction: Predicted | None = None
    probes: tuple[Probe, ...] = ()
    confirmations: tuple[ConfirmationRun, ...] = ()
    no_oom: bool = False

    @property
    def probes_that_fit(self) -> list[Probe]:
        """Probes that fitted, the smallest first."""
        return sorted((probe for probe in self.probes if probe.outcome == "fits"), key=lambda probe: probe.batch_size)

    @property
    def largest_fitted(self) -> int:
        """The largest size that fitted; 0 before any did."""
        return max((probe.batch_size for probe in self.probes_that_fit), default=0)

    @property
    def largest_allowed(self) -> int:
        """The largest size that may be tried: a script's data fills no larger one."""
        return min((probe.batch_size for probe in self.probes if probe.fills_data), default=LARGEST_BATCH)

    @property
    def too_large(self) -> int | None:
        """The smallest size that ran out of memory in a probe."""
        return min((probe.batch_size for probe in self.probes if probe.outcome == "oom"), default=None)

    @property
    def counted_probes(self) -> int:
        """Number of probes that count."""
        return sum(probe.outcome != "void" for probe in self.probes)


def state_of_batch_journal(lines: Sequence[BatchLine], *, no_oom: bool = False) -> BatchState:
    """Return the state of a search from the lines of its journal."""
    journal = BatchJournal(tuple(lines))
    question = journal.question
    assert question is not None, "a journal begins with its question"
    return BatchState(
        device=question.device,
        world_size=question.world_size,
        limits_bytes=tuple(question.limits_bytes),
        prediction=journal.prediction,
        probes=journal.probes,
        confirmations=journal.confirmations,
        no_oom=no_oom,
    )


def memory_fits_by_rank(state: BatchState) -> tuple[MemoryFit, ...]:
    """Return the fit of each rank; empty before any size fitted."""
    slope = state.prediction.bytes_per_sample if state.prediction is not None else None
    memory_fits = _fits_with_slope(state, slope)
    too_large = state.too_large
    if (
        too_large is not None
        and len(state.probes_that_fit) == 1
        and all(fit.surely_fits(too_large) for fit in memory_fits)
    ):
        # The prediction was wrong: by its slope the size that ran out would fit.
        memory_fits = _fits_with_slope(state, None)
    return memory_fits


def _fits_with_slope(state: BatchState, slope: float | None) -> tuple[MemoryFit, ...]:
    memory_fits = []
    for rank in range(state.world_size):
        peaks = _counted_peaks(state, rank).by_size
        limit_bytes = _limit_bytes(state, rank)
        if peaks and limit_bytes is not None:
            fit = fit_lines(peaks, state.device, slope)
            memory_fits.append(MemoryFit(rank=rank, limit_bytes=limit_bytes, **msgspec.structs.asdict(fit)))
    return tuple(memory_fits)


def tightest(memory_fits: Sequence[MemoryFit], batch_size: int) -> MemoryFit:
    """Return the fit that leaves the least at this batch size."""
    return min(memory_fits, key=lambda fit: fit.limit_bytes - fit.need_bytes(batch_size))


def uncounted_bytes(state: BatchState, rank: int) -> int:
    """Return the bytes the rank's limit counts beyond its peak, at the largest size where both were measured."""
    return _counted_peaks(state, rank).uncounted_bytes


class _CountedPeaks(NamedTuple):
    """A rank's peaks as its limit counts them, by batch size and phase, and the part that the phases do not show."""

    by_size: dict[int, dict[str, int]]
    uncounted_bytes: int


def _counted_peaks(state: BatchState, rank: int) -> _CountedPeaks:
    by_size: dict[int, dict[str, int]] = {}
    uncounted_bytes = 0
    for probe in state.probes_that_fit:
        for peaks in probe.ranks:
            if peaks.rank == rank and peaks.phase_peaks:
                if peaks.limit_peak_bytes is not None:
                    uncounted_bytes = max(0, peaks.limit_peak_bytes - max(peaks.phase_peaks.values()))
                by_size[probe.batch_size] = {phase: peak + uncounted_bytes for phase, peak in peaks.phase_peaks.items()}
    return _CountedPeaks(by_size, uncounted_bytes)


def _limit_bytes(state: BatchState, rank: int) -> int | None:
    """The rank's limit in bytes, or its last reported available memory if that is less; None if neither is known."""
    available_bytes = [
        peaks.available_bytes
        for probe in state.probes
        for peaks in probe.ranks
        if peaks.rank == rank and peaks.available_bytes is not None
    ]
    limit_bytes = limit_of_rank(state.limits_bytes, rank)
    return min([*([] if limit_bytes is None else [limit_bytes]), *available_bytes[-1:]], default=None)
