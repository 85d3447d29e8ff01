"""Proofs of exports: `exports.jsonl` in the directory of a run, one line for each run of its settings as exported."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from trainfast_runner.records.json_lines import Appender, Tail, remaining_records
from trainfast_runner.records.run_lines import Count

PROOFS_FILE = "exports.jsonl"


class ExportProof(msgspec.Struct, frozen=True, kw_only=True):
    """A run that took the settings of an export and ran them; rates are medians of its measured steps."""

    wall_ns: Count
    to: str
    """The form of the export."""
    run_id: str
    """The run that took the settings."""
    text_sha256: str
    """The hash of the exported text."""
    steps_per_s: float
    samples_per_s: float | None = None
    compared_with: float | None = None
    """The exported run's samples/s; None when `not_compared` has the reason."""
    not_compared: str | None = None

    def line(self) -> str:
        """The proof in a sentence without a full stop."""
        date = time.strftime("%Y-%m-%d", time.localtime(self.wall_ns / 1e9))
        rate = f"{self.steps_per_s:.4g} steps/s"
        if self.samples_per_s is not None:
            rate = f"{self.samples_per_s:.4g} samples/s"
        if self.compared_with is not None:
            return f"ran as exported on {date}: {rate}; the exported run: {self.compared_with:.4g}"
        return f"ran as exported on {date}: {rate}; not compared: {self.not_compared}"


def append_proof(directory: Path, proof: ExportProof) -> None:
    """Add a proof to the run in `directory`. A full disk raises OSError."""
    appender = Appender(directory / PROOFS_FILE)
    try:
        appender.write(proof)
    finally:
        appender.close()


def read_last_proof(directory: Path, to: str, text_sha256: str) -> ExportProof | None:
    """The newest proof of this text of the form `to`; None if this text was never run."""
    try:
        proofs = list(remaining_records(Tail(directory / PROOFS_FILE, ExportProof)))
    except OSError:
        return None
    return next((proof for proof in reversed(proofs) if (proof.to, proof.text_sha256) == (to, text_sha256)), None)
