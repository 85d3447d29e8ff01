"""The trace of a trial's step after its last one, when nothing is measured any more: its memory at any batch size."""

from __future__ import annotations

import importlib
import os
import runpy
import time
from typing import TYPE_CHECKING, Any

import torch

from .notes import never_raises

if TYPE_CHECKING:
    from .script_run import ScriptRun

TRACED_TORCH = "2.13."
"""The versions of torch that traces of scripts are tested with begin so."""
WORKER = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir, "worker")


@never_raises
def trace_memory(run: ScriptRun) -> None:
    """Trace the step that was seen, once, in a trial that is asked for it; without a trace note the reason."""
    seen = run.watched_step
    if not run.settings.trace or run.traced_memory is not None or not run.files.are_ours or run.files.rank:
        return
    run.memory_limit.lift()
    if not torch.__version__.startswith(TRACED_TORCH):
        run.why_untraced = f"its torch is {torch.__version__}, and steps are traced with {TRACED_TORCH}x"
    if seen is None or run.why_untraced is not None:
        return
    seen.remove()
    reason = seen.untraceable
    if reason is None:
        try:
            run.traced_memory = _traced(seen)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    run.why_untraced = reason


def _traced(seen: Any) -> dict[str, Any]:
    """The lines of the step's peak, for each row of the batch, and the rows that the trial had."""
    begun_ns = time.monotonic_ns()
    model = seen.model()
    runpy.run_path(os.path.join(WORKER, "bootstrap.py"))
    tracer = importlib.import_module("trainfast_worker.memory_trace.script_step")
    step = tracer.ScriptStep(
        arguments=seen.arguments,
        keywords=seen.keywords,
        rows=seen.rows,
        used=seen.used,
        kept=seen.kept,
        loss_bytes=seen.loss_bytes,
        holds_gradients=seen.holds_gradients,
        autocast=seen.autocast,
    )
    inner = model.module if type(model).__name__ == "DistributedDataParallel" else model
    lines = tracer.trace_peaks(inner, seen.optimizer(), step)
    return {"rows": seen.rows, "lines": lines, "seconds": (time.monotonic_ns() - begun_ns) / 1e9}
