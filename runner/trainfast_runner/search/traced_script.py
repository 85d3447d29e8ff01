"""Predict the memory of a script's batch sizes from the trace of one trial, set by the peak that it measured."""

from __future__ import annotations

import msgspec

from trainfast_runner.records.script_run import ScriptFigures, TracedMemory
from trainfast_runner.search.fit_memory import PREDICTED_SHARE

TRACED_SHARE = {"cpu": 0.5, "cuda": PREDICTED_SHARE}
"""Error of the traced growth of a peak, as a share: malloc keeps blocks below 32 MiB, so the measured growth of small
tensors was 0.6 to 1.4 of the traced one."""
SCRIPT_PHASE = "step"
"""The phase of a script's peak: its hooks see no phases of memory."""
TRACED_MEMORY_FIELD = "traced_memory"
"""The field of `script.unknown` that says why a run has no trace."""


class TracedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The traced memory of a trial, and its measured peak, which has libraries and what malloc keeps as well."""

    traced: TracedMemory
    batch_size: int
    measured_bytes: int

    def need_bytes(self, batch_size: int) -> float:
        """Bytes at the peak with another batch: the measured ones, and by how much the traced ones differ."""
        return self.measured_bytes + self.traced.at(batch_size / self.batch_size) - self.traced.at(1.0)


def why_untraced(script: ScriptFigures | None) -> str:
    """Return the reason a run that was asked for a trace has none."""
    unknown = {} if script is None else script.unknown
    return unknown.get(TRACED_MEMORY_FIELD, "the run recorded none")
