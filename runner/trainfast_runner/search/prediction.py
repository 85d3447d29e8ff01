"""What the memory model says before the first size is tried, or why it says nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from trainfast_runner.launch import RunPlan
from trainfast_runner.memory_model import MemoryModel, cached_model, trace_model
from trainfast_runner.problem import Problem
from trainfast_runner.search.journal import Predicted
from trainfast_runner.training_python import GivenUp


@dataclass(frozen=True)
class Foresight:
    """The memory model of a search's training; None, with the reason, where there is none."""

    model: MemoryModel | None
    reason: str = ""

    def against(self, plan: RunPlan, limit_bytes: int) -> Predicted:
        """What it says of the largest batch under a limit of bytes a rank."""
        if self.model is None:
            return Predicted(reason=f"no prediction, the sizes are found by trying: {self.reason}")
        most = self.model.max_batch(plan.spec, plan.world_size, limit_bytes)
        knobs = {**plan.spec.knobs, "batch_size": most or 1}
        there = self.model.predict(replace(plan.spec, knobs=knobs), plan.world_size)
        return Predicted(
            fixed_bytes=there.fixed_bytes,
            bytes_per_sample=there.bytes_per_sample,
            max_batch=most or 0,
            basis=there.basis,
        )


def predict(plan: RunPlan, given_up: threading.Event) -> Foresight:
    """The memory model of this plan: remembered, or traced now, which takes seconds; setting `given_up` ends that."""
    try:
        found = cached_model(plan.spec, plan.device, plan.python)
        if found is None:
            found = trace_model(plan.spec, plan.device, plan.python, given_up)
        return Foresight(found.on(next(iter(plan.device_names), None)))
    except GivenUp:
        return Foresight(None, "the trace took too long")
    except Problem as problem:
        return Foresight(None, problem.message)
