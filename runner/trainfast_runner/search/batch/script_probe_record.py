"""The records of a script's probes, from the records of their runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainfast_runner.known_values import highest
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.run_records import read_records
from trainfast_runner.records.worker_lines import ScriptLine, WorkerLine
from trainfast_runner.search.batch.probe_record import highest_peaks
from trainfast_runner.search.conducting.run_ends import end_text
from trainfast_runner.search.journal.batch import Probe, RankPeaks
from trainfast_runner.search.memory.fit_lines import SCRIPT_PHASE


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
    fullest = max(ranks, key=lambda peaks: peaks.limit_peak_bytes or peaks.peak_allocated_bytes or 0)
    return Probe(
        batch_size=batch_size,
        outcome="fits",
        run_id=result.run_id,
        seconds=seconds,
        step_ms=result.step_ms.p50,
        samples_per_s=result.throughput.samples_per_s.typical,
        alloc_retries=sum(peaks.alloc_retries or 0 for peaks in ranks),
        ranks=ranks,
        rank=fullest.rank,
        phase=SCRIPT_PHASE,
        phase_peaks=fullest.phase_peaks,
        peak_allocated_bytes=fullest.peak_allocated_bytes,
        peak_reserved_bytes=fullest.peak_reserved_bytes,
    )


def script_peaks(directory: Path, available_bytes: int | None) -> list[RankPeaks]:
    """Return the peaks of each rank that took a step."""
    records = read_records(directory)
    return [
        _script_rank_peaks(rank, steps, records.worker_lines.get(rank, []), available_bytes)
        for rank, steps in sorted(records.steps.items())
        if steps
    ]


def _script_rank_peaks(rank: int, steps: list[Step], lines: list[WorkerLine], available_bytes: int | None) -> RankPeaks:
    peaks = highest_peaks(rank, steps)
    allocated_bytes = peaks.peak_allocated_bytes or 0
    script_lines = [line for line in lines if isinstance(line, ScriptLine)]
    # malloc keeps freed blocks, so the limit counts a little more than the resident memory.
    counted_bytes = highest(line.limit_peak_bytes for line in script_lines)
    return msgspec.structs.replace(
        peaks,
        phase_peaks={SCRIPT_PHASE: counted_bytes or allocated_bytes},
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=peaks.peak_reserved_bytes or 0,
        limit_peak_bytes=counted_bytes,
        available_bytes=available_bytes,
        widths=script_lines[-1].widths if script_lines else None,
    )
