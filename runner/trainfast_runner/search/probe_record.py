"""One probe's record out of what its ranks said."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from trainfast_runner.search.decide import Known, fits_of, tightest
from trainfast_runner.search.journal import Probe, RankPeaks
from trainfast_runner.search.processes import ProbeLine


def probe_of(
    known: Known, batch_size: int, run_id: str, seconds: float, said: dict[int, ProbeLine], void: str | None
) -> Probe:
    """What the ranks said of one size, after all that was known before; `void` says why it counts for nothing."""
    out = next((line for line in said.values() if line.outcome == "oom"), None)
    if out is not None or void is not None:
        line = out or next(iter(said.values()))
        rank = next(rank for rank, one in said.items() if one is line)
        return Probe(
            batch_size=batch_size,
            outcome="oom" if void is None else "void",
            run_id=run_id,
            seconds=seconds,
            reason=void or line.message or "",
            rank=rank,
            phase=line.phase,
            phase_peaks=line.phase_peaks,
            peak_allocated_bytes=line.peak_allocated_bytes,
            peak_reserved_bytes=line.peak_reserved_bytes,
            ranks=[_rank_peaks(rank, one) for rank, one in sorted(said.items())],
        )
    slowest_ms = max(one.step_ms[-1] for one in said.values())
    samples = sum(one.samples or 0 for one in said.values())
    probe = Probe(
        batch_size=batch_size,
        outcome="fits",
        run_id=run_id,
        seconds=seconds,
        step_ms=slowest_ms,
        samples_per_s=1000 * samples / slowest_ms if slowest_ms > 0 else None,
        alloc_retries=sum(one.alloc_retries or 0 for one in said.values()),
        ranks=[_rank_peaks(rank, one) for rank, one in sorted(said.items())],
    )
    fits = fits_of(replace(known, probes=(*known.probes, probe)))
    rank = tightest(fits, batch_size).rank if fits else 0
    peaks = next(one for one in probe.ranks if one.rank == rank)
    # Those of the rank that was nearest to its limit.
    return msgspec.structs.replace(
        probe,
        rank=rank,
        phase=max(peaks.phase_peaks, key=lambda phase: peaks.phase_peaks[phase]),
        phase_peaks=peaks.phase_peaks,
        peak_allocated_bytes=peaks.peak_allocated_bytes,
        peak_reserved_bytes=peaks.peak_reserved_bytes,
    )


def _rank_peaks(rank: int, line: ProbeLine) -> RankPeaks:
    return RankPeaks(
        rank=rank,
        phase_peaks=line.phase_peaks,
        peak_allocated_bytes=line.peak_allocated_bytes,
        peak_reserved_bytes=line.peak_reserved_bytes,
        limit_peak_bytes=line.limit_peak_bytes,
        room_bytes=line.room_after_bytes or line.room_bytes,
        alloc_retries=line.alloc_retries,
        step_ms=line.step_ms[-1] if line.step_ms else None,
    )
