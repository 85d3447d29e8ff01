"""The record of a probe out of what its ranks said, and of a proof out of the run that it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import Step
from trainfast_runner.records.run_records import read_records
from trainfast_runner.search.decide import Known, fits_of, tightest
from trainfast_runner.search.journal import Probe, Proof, RankPeaks
from trainfast_runner.search.processes import ProbeLine


def probe_of(
    known: Known, batch_size: int, run_id: str, seconds: float, said: dict[int, ProbeLine], void: str | None
) -> Probe:
    """What the ranks said of one size, after all that was known before; `void` says why it counts for nothing."""
    out = next((line for line in said.values() if line.outcome == "oom"), None)
    ranks = [_rank_peaks(rank, one) for rank, one in sorted(said.items())]
    if out is not None or void is not None:
        line = out or next(iter(said.values()))
        return Probe(
            batch_size=batch_size,
            outcome="oom" if void is None else "void",
            run_id=run_id,
            seconds=seconds,
            reason=void or line.message or "",
            rank=next(rank for rank, one in said.items() if one is line),
            phase=line.phase,
            phase_peaks=line.phase_peaks,
            peak_allocated_bytes=line.peak_allocated_bytes,
            peak_reserved_bytes=line.peak_reserved_bytes,
            ranks=ranks,
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
        ranks=ranks,
    )
    return _at_the_tightest(known, probe)


def _at_the_tightest(known: Known, probe: Probe) -> Probe:
    """With the phase and the peaks of the rank that was nearest to its limit."""
    fits = fits_of(replace(known, probes=(*known.probes, probe)))
    rank = tightest(fits, probe.batch_size).rank if fits else 0
    peaks = next(one for one in probe.ranks if one.rank == rank)
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


def proof_of(known: Known, directory: Path, result: Result, batch_size: int, seconds: float) -> Proof:
    """What the proof's run came to; `batch_size` and `seconds` are for where its result does not tell."""
    said = result.knobs.get("batch_size")
    proved = said if isinstance(said, int) else batch_size
    warm = [probe.batch_size for probe in known.fitting if probe.batch_size >= proved]
    return Proof(
        batch_size=proved,
        run_id=result.run_id,
        state=result.state,
        reason=result.reason,
        peak_allocated_bytes=result.memory.peak_allocated_bytes,
        ranks=[_highest(rank, steps) for rank, steps in sorted(read_records(directory).steps.items()) if steps],
        samples_per_s=result.throughput.samples_per_s.median,
        seconds=result.seconds if result.seconds is not None else seconds,
        refutes=warm if result.state == "oom" else [],
    )


def _highest(rank: int, steps: list[Step]) -> RankPeaks:
    """The highest peaks of a rank's steps."""
    phases = {phase for step in steps for phase in step.phase_peaks or ()}
    return RankPeaks(
        rank=rank,
        phase_peaks={phase: max((step.phase_peaks or {}).get(phase, 0) for step in steps) for phase in sorted(phases)},
        peak_allocated_bytes=max(
            (one for step in steps if (one := step.peak_allocated_bytes) is not None), default=None
        ),
        peak_reserved_bytes=max((one for step in steps if (one := step.peak_reserved_bytes) is not None), default=None),
        alloc_retries=steps[-1].alloc_retries,
        step_ms=steps[-1].step_ms,
    )
