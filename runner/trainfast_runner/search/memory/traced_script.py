"""Predict the memory of a script's batch sizes from the trace of one trial, scaled to its measured peak."""

from __future__ import annotations

import msgspec

from trainfast_runner.records.script_run import ScriptFigures, TracedMemory
from trainfast_runner.search.memory.fit_lines import PREDICTED_SHARE

TRACED_SHARE = {"cpu": 0.5, "cuda": PREDICTED_SHARE}
"""Error of the traced growth of a peak, as a share: malloc keeps blocks below 32 MiB, so the measured growth of small
tensors was 0.6 to 1.4 of the traced one."""
SCRIPT_PHASE = "step"
"""The phase of a script's peak: its hooks see no phases of memory."""
TRACED_MEMORY_FIELD = "traced_memory"
"""The field of `script.unknown` with the reason that a run has no trace."""


class TracedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The traced memory of a trial, and its measured peak, which includes libraries and blocks that malloc keeps."""

    traced: TracedMemory
    batch_size: int
    measured_bytes: int

    def need_bytes(self, batch_size: int) -> float:
        """Return the bytes at the peak with another batch: the measured peak plus the difference of traced peaks."""
        return self.measured_bytes + self.traced.at(batch_size / self.batch_size) - self.traced.at(1.0)


def untraced_reason(script: ScriptFigures | None) -> str:
    """Return the reason that a run has no trace although it was asked for one."""
    reasons = {} if script is None else script.unknown
    return reasons.get(TRACED_MEMORY_FIELD, "the run recorded none")
