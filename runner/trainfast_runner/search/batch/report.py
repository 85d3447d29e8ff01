"""The object that `search max-batch --json` prints: the answer with every size that was tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.result import STRICT_SPEED, Doubt
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.results.doubts import doubts
from trainfast_runner.search.journal.batch import (
    BatchAnswer,
    BatchEnded,
    BatchJournal,
    BatchQuestion,
    ConfirmationRun,
    Probe,
    read_batch_journal,
    refuted_by,
)
from trainfast_runner.search.journal.report_fields import fields_of, first_fields

PROBE_FIELDS = (
    "batch_size",
    "outcome",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "phase_peaks",
    "samples_per_s",
    "step_ms",
    "seconds",
    "phase",
    "rank",
    "reason",
    "run_id",
)
"""Fields of a `Probe` in the report."""
CONFIRMATION_FIELDS = (
    "batch_size",
    "state",
    "peak_allocated_bytes",
    "samples_per_s",
    "step_ms",
    "seconds",
    "reason",
    "run_id",
    "refutes",
)
"""Fields of a `ConfirmationRun` in the report."""
PREDICTED_FIELDS = ("fixed_bytes", "bytes_per_sample", "max_batch", "basis", "reason")
"""Fields of a `Predicted` line in the report."""


def batch_report(directory: Path) -> dict[str, Any]:
    """Return the whole search as one object; absent figures are None."""
    journal = BatchJournal(tuple(read_batch_journal(directory)))
    question, prediction, end = journal.question, journal.prediction, newest(journal.lines, BatchEnded)
    assert question is not None, "a journal begins with its question"
    answer = end.answer if end is not None else None
    return {
        **first_fields(question, end),
        **fields_of(answer, "max_batch", "samples_per_s", "aligned_batch", "recommended_batch"),
        "measured_under": measured_under(question),
        "doubts": _doubts(directory, question, answer),
        "recommended_reason": answer.recommended_why if answer else None,
        "margins": answer.margins if answer else [],
        "fastest": _fastest(answer),
        "probes": [_probe(probe, journal.confirmations) for probe in journal.probes],
        "model": fields_of(answer, "fixed_bytes", "bytes_per_sample", "phase"),
        "predicted": None if prediction is None else fields_of(prediction, *PREDICTED_FIELDS),
        "limit": question.limit_words,
        "limit_bytes": answer.limit_bytes if answer else question.lowest_limit_bytes,
        "limits_bytes": question.limits_bytes,
        "world_size": question.world_size,
        **fields_of(answer, "tightest_rank"),
        "proof_run_id": answer.confirmation_run_id if answer else None,
        "proofs": [fields_of(confirmation, *CONFIRMATION_FIELDS) for confirmation in journal.confirmations],
        **fields_of(answer, "headroom_bytes", "certainty", "too_large"),
        "widths": _widths(answer),
        "changes": end.changes if end is not None else [],
        **fields_of(end, "missing_bytes", "seconds"),
    }


def measured_under(question: BatchQuestion) -> str | None:
    """Return the condition under which the search measures speed; None if the condition does not change speed."""
    return STRICT_SPEED if question.device == "cpu" else None


def _doubts(directory: Path, question: BatchQuestion, answer: BatchAnswer | None) -> list[Doubt]:
    """The doubts about the speeds: the condition of all of them, then those of the confirmation run."""
    run_id = None if answer is None else answer.confirmation_run_id
    result = None if run_id is None else read_result(directory.parent.parent / "runs" / run_id)
    found = {doubt.kind: doubt for doubt in (doubts(result) if result is not None else ())}
    if (condition := measured_under(question)) is not None:
        found["strict_malloc"] = Doubt(kind="strict_malloc", text=f"speeds were measured under {condition}")
    return [*found.values()]


def _probe(probe: Probe, confirmations: Sequence[ConfirmationRun]) -> dict[str, Any]:
    """One probe; `refuted_by` is the confirmation run that ran out of memory although this size had fitted."""
    refuting_run = refuted_by(probe, confirmations)
    return {**fields_of(probe, *PROBE_FIELDS), "refuted_by": None if refuting_run is None else refuting_run.run_id}


def _widths(answer: BatchAnswer | None) -> dict[str, Any] | None:
    """Return the widths of a script's batches that the answer holds for; None if none was seen."""
    if answer is None or answer.widths is None:
        return None
    return {**msgspec.structs.asdict(answer.widths), "note": answer.widths_note or None}


def _fastest(answer: BatchAnswer | None) -> dict[str, Any] | None:
    if answer is None or answer.fastest_batch is None:
        return None
    return {"batch_size": answer.fastest_batch, "samples_per_s": answer.fastest_samples_per_s}
