"""What a change has to leave free beside its prediction to be called enough, after a run that ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass

from trainfast_runner.memory.fitting import margin_bytes
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.oom_advice import BATCH_PHASES, OPTIMIZER_PHASE
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.settings.spec import RunSpec

SPARE_SHARE = 0.03
"""Of the limit: a change that only just fits by the prediction may not fit in fact."""
PROGRAM = ("compile", "engine")
"""The knobs that change what the process holds besides what was traced of the step."""


@dataclass(frozen=True)
class OomMargin:
    """What is known from the end of `spec`, all of it in bytes.

    `beyond_bytes` is what the run held or asked for beyond its trace when memory ended, at the least; `untouched_bytes`
    what its limit counted beyond the memory held.
    """

    spec: RunSpec
    device: str
    limit_bytes: int
    untouched_bytes: int = 0
    beyond_bytes: int = 0

    def of(self, model: MemoryModel, spec: RunSpec, ranks: int, predicted: Prediction) -> int:
        """What has to stay free beside the prediction of another spec.

        What this run was seen to take beyond its trace another one takes as well, and a little more than was seen,
        unless it is another program.
        """
        besides = margin_bytes(model, spec, ranks, predicted) if self.device == "cpu" else 0
        besides = max(besides, self.untouched_bytes)
        if any(spec.knobs[name] != self.spec.knobs[name] for name in PROGRAM):
            return besides
        corrected = predicted.total_bytes - max(predicted.traced_bytes.values(), default=predicted.total_bytes)
        return max(besides, self.beyond_bytes - corrected) + int(SPARE_SHARE * self.limit_bytes)


def margin_of(
    spec: RunSpec,
    device: str,
    limit_bytes: int,
    predicted: Prediction | None,
    phase: str | None,
    untouched_bytes: int | None,
    in_first_step: bool,
) -> OomMargin:
    """What is learnt from a run that died in `phase` under a limit. Memory ended, so more than the limit was needed."""
    beyond = 0
    if predicted is not None and phase in (*BATCH_PHASES, OPTIMIZER_PHASE):
        beyond = max(0, limit_bytes - _expected(predicted, phase, in_first_step))
    return OomMargin(spec, device, limit_bytes, untouched_bytes or 0, beyond)


def _expected(predicted: Prediction, phase: str | None, in_first_step: bool) -> int:
    """The traced bytes at the most by then: before the first update there are no optimizer states."""
    if phase == OPTIMIZER_PHASE:
        return predicted.traced_bytes.get("optimizer", predicted.total_bytes)
    expected = predicted.traced_bytes.get("forward_backward", predicted.total_bytes)
    states = predicted.phases.get("forward_backward", {}).get("optimizer", 0) if in_first_step else 0
    return expected - states
