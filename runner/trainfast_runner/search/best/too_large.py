"""The excess of a candidate that is too large: by its prediction, else by the allocation that failed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from trainfast_runner.memory.oom.explain import asked_and_free
from trainfast_runner.records.result import Result
from trainfast_runner.search.journal.best import Attempt, Candidate, CandidateVerdict
from trainfast_runner.units import mebibytes

TOO_LARGE: Final = "too_large"
"""The `VerdictWord` on a candidate whose memory exceeds its limit."""


@dataclass(frozen=True)
class Failure:
    """The reason a candidate did not run; `missing_bytes` is the least memory that was missing, None if unknown."""

    reason: str
    missing_bytes: int | None = None


def failure_in(message: str) -> Failure:
    """Return the failure in an allocator's message; the first line of a message without a size."""
    asked_bytes, free_bytes = asked_and_free(message)
    if asked_bytes is None:
        return Failure(message.partition("\n")[0])
    reason = f"an allocation of {mebibytes(asked_bytes)} failed"
    if free_bytes is None or free_bytes >= asked_bytes:  # under a limit the free memory does not matter
        return Failure(reason)
    return Failure(f"{reason} with {mebibytes(free_bytes)} free", asked_bytes - free_bytes)


def oom_failure(result: Result) -> Failure:
    """Return the failure of a run that ran out of memory, by its explanation."""
    failure, oom = failure_in(result.reason), result.oom
    if oom is None:
        return failure
    reason = failure.reason
    if oom.asked_bytes is not None and oom.held_bytes is not None and oom.limit_bytes is not None:
        held_of_limit = f"{mebibytes(oom.held_bytes)} of {mebibytes(oom.limit_bytes)} held"
        reason = f"an allocation of {mebibytes(oom.asked_bytes)} failed with {held_of_limit}"
    return Failure(reason, failure.missing_bytes if oom.missing_bytes is None else oom.missing_bytes)


def verdict_of(line: Attempt, candidate: Candidate) -> CandidateVerdict:
    """Return the verdict on a candidate that ran out of memory: its excess by the prediction, else as measured."""
    reason = line.reason or "ran out of memory"
    excess_bytes = candidate.excess_bytes
    predicted_bytes = candidate.predicted_bytes
    if excess_bytes is not None and predicted_bytes is not None:
        reason = f"{excess_text(predicted_bytes, predicted_bytes - excess_bytes)}; {reason}"
    else:
        excess_bytes = line.missing_bytes
        reason += "" if excess_bytes is None else f", at least {mebibytes(excess_bytes)} too large"
        reason += "" if predicted_bytes is None else f"; predicted {mebibytes(predicted_bytes)}"
    return CandidateVerdict(
        candidate_number=line.candidate_number, verdict=TOO_LARGE, reason=reason, excess_bytes=excess_bytes
    )


def excess_text(needed_bytes: int, limit_bytes: int) -> str:
    """Return the text of a prediction beyond the limit: `needs 60 MiB of 48 MiB: 12 MiB too large`."""
    excess = mebibytes(needed_bytes - limit_bytes)
    return f"needs {mebibytes(needed_bytes)} of {mebibytes(limit_bytes)}: {excess} too large"


def closest_to_fit(verdicts: Iterable[CandidateVerdict]) -> CandidateVerdict:
    """Return the verdict of the smallest excess, or any verdict if none has a figure; there must be a verdict."""
    return min(verdicts, key=lambda verdict: math.inf if verdict.excess_bytes is None else verdict.excess_bytes)
