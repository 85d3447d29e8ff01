"""Make the record of a probe from its ranks' replies, and of a confirmation run from its result."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.run_records import read_records
from trainfast_runner.records.worker_lines import ProbeLine, ScriptLine
from trainfast_runner.search.batch.decide import BatchState, memory_fits_by_rank, tightest
from trainfast_runner.search.batch_journal import ConfirmationRun, Probe, RankPeaks
from trainfast_runner.search.conductor import end_text
from trainfast_runner.search.fitted_memory import SCRIPT_PHASE


def probe_of(
    state: BatchState,
    batch_size: int,
    run_id: str,
    seconds: float,
    replies: dict[int, ProbeLine],
    void_reason: str | None,
) -> Probe:
    """Return the record of one size from its ranks' replies.

    `void_reason` is the reason that the probe does not count, None if it does.
    """
    oom_line = next((line for line in replies.values() if line.outcome == "oom"), None)
    ranks = [_rank_peaks(rank, reply) for rank, reply in sorted(replies.items())]
    if oom_line is not None or void_reason is not None:
        line = oom_line or next(iter(replies.values()))
        return Probe(
            batch_size=batch_size,
            outcome="oom" if void_reason is None else "void",
            run_id=run_id,
            seconds=seconds,
            reason=void_reason or line.message or "",
            rank=next(rank for rank, reply in replies.items() if reply is line),
            phase=line.phase,
            phase_peaks=line.phase_peaks,
            peak_allocated_bytes=line.peak_allocated_bytes,
            peak_reserved_bytes=line.peak_reserved_bytes,
            ranks=ranks,
        )
    slowest_ms = max(reply.step_ms[-1] for reply in replies.values())
    samples = sum(reply.samples or 0 for reply in replies.values())
    probe = Probe(
        batch_size=batch_size,
        outcome="fits",
        run_id=run_id,
        seconds=seconds,
        step_ms=slowest_ms,
        samples_per_s=1000 * samples / slowest_ms if slowest_ms > 0 else None,
        alloc_retries=sum(reply.alloc_retries or 0 for reply in replies.values()),
        ranks=ranks,
    )
    memory_fits = memory_fits_by_rank(dataclasses.replace(state, probes=(*state.probes, probe)))
    tightest_rank = tightest(memory_fits, batch_size).rank if memory_fits else 0
    return _with_peaks(probe, next(peaks for peaks in ranks if peaks.rank == tightest_rank))


def probe_of_ended_run(batch_size: int, result: Result, seconds: float, phase: str | None = None) -> Probe:
    """Return the record of a size that ran out of memory before its ranks answered; `phase` if the run names none."""
    error = result.error
    return Probe(
        batch_size=batch_size,
        outcome="oom",
        run_id=result.run_id,
        seconds=seconds,
        reason=result.reason,
        rank=error.rank if error else None,
        phase=(error.phase if error else None) or phase,
    )


def _with_peaks(probe: Probe, peaks: RankPeaks) -> Probe:
    """Return the probe with the phase and the peaks of the rank that was nearest to its limit."""
    return msgspec.structs.replace(
        probe,
        rank=peaks.rank,
        phase=max(peaks.phase_peaks, key=lambda phase: peaks.phase_peaks[phase]),
        phase_peaks=peaks.phase_peaks,
        peak_allocated_bytes=peaks.peak_allocated_bytes,
        peak_reserved_bytes=peaks.peak_reserved_bytes,
    )


def _rank_peaks(rank: int, line: ProbeLine) -> RankPeaks:
    bytes_before, bytes_after = line.available_bytes, line.available_after_bytes
    return RankPeaks(
        rank=rank,
        phase_peaks=line.phase_peaks,
        peak_allocated_bytes=line.peak_allocated_bytes,
        peak_reserved_bytes=line.peak_reserved_bytes,
        limit_peak_bytes=line.limit_peak_bytes,
        available_bytes=bytes_before if bytes_after is None else bytes_after,
        alloc_retries=line.alloc_retries,
        step_ms=line.step_ms[-1] if line.step_ms else None,
    )


def confirmation_record(
    state: BatchState, ranks: list[RankPeaks], result: Result, batch_size: int, seconds: float
) -> ConfirmationRun:
    """Return the record of a confirmation run; `batch_size` and `seconds` stand in where its result has none."""
    recorded_size = result.knobs.get("batch_size")
    confirmed_size = recorded_size if isinstance(recorded_size, int) else batch_size
    warm_sizes = [probe.batch_size for probe in state.probes_that_fit if probe.batch_size >= confirmed_size]
    return ConfirmationRun(
        batch_size=confirmed_size,
        run_id=result.run_id,
        state=result.state,
        reason=result.reason,
        peak_allocated_bytes=result.memory.peak_allocated_bytes,
        ranks=ranks,
        samples_per_s=result.throughput.samples_per_s.typical,
        step_ms=result.step_ms.p50,
        seconds=result.seconds if result.seconds is not None else seconds,
        refutes=warm_sizes if result.state == "oom" else [],
    )


def peaks_of_run(directory: Path) -> list[RankPeaks]:
    """Return the highest peaks of each rank of a run that took a step."""
    return [highest_peaks(rank, steps) for rank, steps in sorted(read_records(directory).steps.items()) if steps]


def highest_peaks(rank: int, steps: list[Step]) -> RankPeaks:
    """Return the highest peaks over a rank's steps, at least one; allocator retries and time are the last step's."""
    phases = {phase for step in steps for phase in step.phase_peaks or ()}
    return RankPeaks(
        rank=rank,
        phase_peaks={phase: max((step.phase_peaks or {}).get(phase, 0) for step in steps) for phase in sorted(phases)},
        peak_allocated_bytes=highest(step.peak_allocated_bytes for step in steps),
        peak_reserved_bytes=highest(step.peak_reserved_bytes for step in steps),
        alloc_retries=steps[-1].alloc_retries,
        step_ms=steps[-1].step_ms,
    )


def size_that_data_fills(result: Result, asked_size: int, largest_fitted: int) -> int | None:
    """Return the batch that ran if the script's data fills no batch of `asked_size`; None if that size ran.

    A script that ran a size as asked (`largest_fitted`, 0 before any) does not ignore the batch size.
    """
    for override in result.script.overridden if result.script is not None else ():
        if (
            override.knob == "batch_size"
            and isinstance(override.ran, int)
            and 0 < largest_fitted <= override.ran < asked_size
        ):
            return override.ran
    return None


def unusable_reason(result: Result) -> str | None:
    """Return why a probe has no figures for its size (it failed, or took no step); None if it has them."""
    if result.state != "finished":
        return end_text(result)
    if result.steps.measured == 0:
        return f"{result.run_id}: {result.reason}"
    if result.memory.peak_allocated_bytes is None:
        return f"the memory of {result.run_id} is not known"
    return None


def fitting_probe(
    directory: Path, result: Result, batch_size: int, seconds: float, available_bytes: int | None
) -> Probe:
    """Return the record of a size that fitted, from the records of its run."""
    ranks = script_peaks(directory, available_bytes)
    probe = Probe(
        batch_size=batch_size,
        outcome="fits",
        run_id=result.run_id,
        seconds=seconds,
        step_ms=result.step_ms.p50,
        samples_per_s=result.throughput.samples_per_s.typical,
        alloc_retries=sum(peaks.alloc_retries or 0 for peaks in ranks),
        ranks=ranks,
    )
    return _with_peaks(probe, max(ranks, key=lambda peaks: peaks.limit_peak_bytes or peaks.peak_allocated_bytes or 0))


def script_peaks(directory: Path, available_bytes: int | None) -> list[RankPeaks]:
    """Return the peaks of each rank that took a step, as its limit counts them."""
    lines_by_rank = read_records(directory).worker_lines
    ranks = []
    for peaks in peaks_of_run(directory):
        allocated_bytes = peaks.peak_allocated_bytes or 0
        lines = [line for line in lines_by_rank.get(peaks.rank, []) if isinstance(line, ScriptLine)]
        # malloc keeps freed blocks, so the limit counts a little more than the resident memory.
        counted_bytes = highest(line.limit_peak_bytes for line in lines)
        ranks.append(
            msgspec.structs.replace(
                peaks,
                phase_peaks={SCRIPT_PHASE: counted_bytes or allocated_bytes},
                peak_allocated_bytes=allocated_bytes,
                peak_reserved_bytes=peaks.peak_reserved_bytes or 0,
                limit_peak_bytes=counted_bytes,
                available_bytes=available_bytes,
                widths=lines[-1].widths if lines else None,
            )
        )
    return ranks
