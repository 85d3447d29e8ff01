"""Predict the largest batch by the memory model before the first size is tried."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainfast_runner.bisection import largest_fitting
from trainfast_runner.errors import UserError
from trainfast_runner.machine.worker_programs import ProgramCancelled
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.memory.tracing import TraceProgress, cached_model, trace_model
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.journal.batch import Predicted
from trainfast_runner.worker.shared.lock_files import print_holder

BATCH_PHASE = "forward_backward"
"""The phase that grows with the batch."""
BEND_BYTES = 4 << 20
"""A peak up to this far off the line is on the line: measured peaks scatter as much."""


@dataclass(frozen=True)
class SizePrediction:
    """The memory model of a search's training; None, with the reason, if there is none."""

    model: MemoryModel | None
    reason: str = ""

    def against(self, plan: RunPlan, limit_bytes: int) -> Predicted:
        """Predict the largest batch under a limit of bytes per rank."""
        if self.model is None:
            return Predicted(reason=f"no prediction ({self.reason}); sizes are found by trying them")
        max_batch = self.model.max_batch(plan.spec, plan.world_size, limit_bytes)
        # The growth below the maximum: a correction by an earlier run bends at that run's size.
        prediction_below = self._predict_at(plan, max(1, max_batch - 1))
        return Predicted(
            fixed_bytes=prediction_below.fixed_bytes,
            bytes_per_sample=prediction_below.bytes_per_sample,
            max_batch=max_batch,
            linear_from=linear_from(
                lambda size: self._predict_at(plan, size).traced_bytes[BATCH_PHASE], max(1, max_batch)
            ),
            basis=prediction_below.basis,
        )

    def _predict_at(self, plan: RunPlan, batch_size: int) -> Prediction:
        assert self.model is not None
        knobs = {**plan.spec.knobs, "batch_size": batch_size}
        return self.model.predict(replace(plan.spec, knobs=knobs), plan.world_size)


def linear_from(traced_peak: Callable[[int], float], max_batch: int) -> int:
    """Return the smallest batch whose traced peak is on the line through that of `max_batch`.

    A traced peak is convex in the batch, so the sizes off the line are the smallest ones.
    """
    highest_peak = traced_peak(max_batch)
    bytes_per_sample = traced_peak(max_batch + 1) - traced_peak(max_batch)

    def is_bent(size: int) -> bool:
        return traced_peak(size) > highest_peak - (max_batch - size) * bytes_per_sample + BEND_BYTES

    return min(largest_fitting(is_bent, max_batch) + 1, max_batch)


def predict_size(plan: RunPlan, cancelled: threading.Event) -> SizePrediction:
    """Read the plan's memory model from the cache, or trace it now, which takes seconds; `cancelled` ends the trace."""
    reason = "the trace took too long"

    def note(tracing: TraceProgress) -> None:
        nonlocal reason
        if tracing.waits_for:
            reason = f"waited for {tracing.waits_for}"
            print_holder(tracing.waits_for)

    try:
        model = cached_model(plan.spec, plan.device, plan.python)
        if model is None:
            model = trace_model(plan.spec, plan.device, plan.python, cancelled, plan.device_uuids, note)
        return SizePrediction(model.corrected_for(next(iter(plan.device_names), None)))
    except ProgramCancelled:
        return SizePrediction(None, reason)
    except UserError as error:
        return SizePrediction(None, error.message)
