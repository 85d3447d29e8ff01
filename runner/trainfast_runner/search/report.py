"""What `search max-batch --json` prints: the answer with every size that was tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.records import SCHEMA
from trainfast_runner.search.journal import Asked, Ended, Predicted, Probe, Proof, read_journal

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
PROOF_FIELDS = ("batch_size", "state", "peak_allocated_bytes", "samples_per_s", "seconds", "reason", "run_id")


def report(directory: Path) -> dict[str, Any]:
    """The whole search as one object; figures that there are none of are None."""
    lines = read_journal(directory)
    asked = next(line for line in lines if isinstance(line, Asked))
    ended = next((line for line in reversed(lines) if isinstance(line, Ended)), None)
    predicted = next((line for line in reversed(lines) if isinstance(line, Predicted)), None)
    answer = ended.answer if ended is not None else None
    probes = [msgspec.to_builtins(line) for line in lines if isinstance(line, Probe)]
    return {
        "schema": SCHEMA,
        "search_id": asked.search_id,
        "state": ended.state if ended is not None else None,
        "reason": ended.reason if ended is not None else "",
        "preset": asked.preset,
        "variant": asked.variant,
        "max_batch": answer.max_batch if answer else None,
        "samples_per_s": answer.samples_per_s if answer else None,
        "aligned_batch": answer.aligned_batch if answer else None,
        "recommended_batch": answer.recommended_batch if answer else None,
        "recommended_reason": answer.recommended_why if answer else None,
        "margins": answer.margins if answer else [],
        "fastest": {"batch_size": answer.fastest_batch, "samples_per_s": answer.fastest_samples_per_s}
        if answer and answer.fastest_batch is not None
        else None,
        "probes": [{name: probe[name] for name in PROBE_FIELDS} for probe in probes],
        "model": {
            "fixed_bytes": answer.fixed_bytes if answer else None,
            "bytes_per_sample": answer.bytes_per_sample if answer else None,
            "phase": answer.phase if answer else None,
        },
        "predicted": None
        if predicted is None
        else {
            "fixed_bytes": predicted.fixed_bytes,
            "bytes_per_sample": predicted.bytes_per_sample,
            "max_batch": predicted.max_batch,
            "basis": predicted.basis,
            "reason": predicted.reason,
        },
        "limit": asked.limit_words,
        "limit_bytes": answer.limit_bytes if answer else min(asked.limits_bytes, default=None),
        "limits_bytes": asked.limits_bytes,
        "world_size": asked.world_size,
        "tightest_rank": answer.tightest_rank if answer else None,
        "proof_run_id": answer.proof_run_id if answer else None,
        "proofs": [{name: getattr(line, name) for name in PROOF_FIELDS} for line in lines if isinstance(line, Proof)],
        "headroom_bytes": answer.headroom_bytes if answer else None,
        "certainty": answer.certainty if answer else None,
        "missing_bytes": ended.missing_bytes if ended is not None else None,
        "changes": ended.changes if ended is not None else [],
        "seconds": ended.seconds if ended is not None else None,
    }
