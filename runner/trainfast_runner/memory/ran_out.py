"""What a run that ran out of memory under a limit of a CPU says of the next, and what such a limit counts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainfast_runner.memory.predicted_run import predicted
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import PROBE, RunFile
from trainfast_runner.records.run_records import RunRecords, rank_files
from trainfast_runner.settings.spec import of_record

PHASES = ("forward", "backward", "optimizer", "train")
"""Where memory ends by the training, and not by what it starts with; an engine that cannot split a step says train."""
MOST_KEPT = 8


class RanOut(msgspec.Struct, frozen=True, kw_only=True):
    """`run_id` needed more than `limit_bytes`, where `traced_bytes` are its traced peak."""

    run_id: str
    limit_bytes: int
    traced_bytes: int

    def beyond_bytes(self, traced_bytes: int, is_whole: bool) -> float:
        """What a step of this traced peak then takes beyond it, at the least.

        A smaller one takes less, unless it `is_whole`: what does not grow with the batch.
        """
        beyond = self.limit_bytes - self.traced_bytes + 1
        share = 1.0 if is_whole or beyond < 0 else min(1.0, traced_bytes / max(1, self.traced_bytes))
        return share * beyond

    def says_all_of(self, other: RanOut) -> bool:
        """Whether the other, of a larger step or under less, had to run out by this one alone."""
        return other.traced_bytes >= self.traced_bytes and other.limit_bytes <= self.limit_bytes

    def is_refuted_by(self, limit_bytes: int, traced_bytes: int) -> bool:
        """Whether a run finished that by this should have run out."""
        return traced_bytes >= self.traced_bytes and limit_bytes <= self.limit_bytes


def ran_out(records: RunRecords, result: Result) -> RanOut | None:
    """What is learnt of a run that ran out of memory; None of any other, and of one that was not traced."""
    run, error = records.run, result.error
    if run is None or result.state != "oom" or error is None or error.phase not in PHASES:
        return None
    limit, traced = limit_of(run, error.rank or 0), _traced(records)
    if limit is None or traced is None:
        return None
    return RanOut(run_id=run.run_id, limit_bytes=limit, traced_bytes=traced)


def limit_of(run: RunFile, rank: int = 0) -> int | None:
    """The limit of address space that a rank of the run had; None on a GPU, and without a limit."""
    if run.device != "cpu" or not run.memory_limit_bytes:
        return None
    return run.memory_limit_bytes[min(rank, len(run.memory_limit_bytes) - 1)]


def kept(before: list[RanOut], new: RanOut) -> list[RanOut]:
    """With one more, as far as it says more than those before, and without those that it says all of."""
    if any(one.says_all_of(new) for one in before):
        return before
    return [*(one for one in before if not new.says_all_of(one)), new][-MOST_KEPT:]


def _traced(records: RunRecords) -> int | None:
    """The traced peak of the batch it ran with; of a search's probe that is the one it was told last."""
    run = records.run
    assert run is not None
    prediction = run.predicted
    if run.role == PROBE:
        if not records.tried:
            return None
        spec = of_record(run).turned(batch_size=records.tried[-1])
        prediction = predicted(spec, run.device, run.python or None, run.world_size, run.device_names)
    traced = (prediction or {}).get("traced_bytes")
    return max(traced.values(), default=None) if isinstance(traced, dict) else None


class _Probed(msgspec.Struct, frozen=True):
    """Of a probe's line what its limit counted, and the peaks beside it."""

    kind: str
    limit_peak_bytes: int | None = None
    phase_peaks: dict[str, int] = {}


def counted_bytes(directory: Path, run: RunFile) -> int | None:
    """What the limit counted beyond the peak, at most, in the sizes that a probe tried; None where none says so."""
    if run.role != PROBE or run.device != "cpu":
        return None
    found = [
        line.limit_peak_bytes - max(line.phase_peaks.values())
        for file in rank_files(directory, "worker").values()
        for line in read_all(file, _Probed)[0]
        if line.kind == "probe" and line.limit_peak_bytes is not None and line.phase_peaks
    ]
    return max(0, *found) if found else None
