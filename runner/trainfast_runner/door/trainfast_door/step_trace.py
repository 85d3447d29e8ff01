"""The trace of a trial's step: its memory at any batch size. Made after the last step, when measuring is over."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
from typing import TYPE_CHECKING, Any

from .notes import never_raises

if TYPE_CHECKING:
    from .memory_limit import MemoryLimit
    from .rank_files import RankFiles

TRACED_TORCH = "2.13."
"""Beginning of the versions of torch that traces of scripts are tested with."""
WORKER_FOLDER = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir, "worker")
"""The folder of the worker, which traces the step."""
REASON_CHARACTERS = 200
"""Chosen, not measured: the most that a reason quotes of the error of a trace."""


class TraceState:
    """The step that is traced at the end of a trial, and then its trace or the reason for a missing one."""

    def __init__(self, is_asked: bool, files: RankFiles, memory_limit: MemoryLimit) -> None:
        self.is_asked = is_asked
        self.watched_step: Any = None
        """The `WatchedStep` to trace, set by `watch_step`; None without one."""
        self.untraced_reason: str | None = "no optimizer of torch.optim steps a model"
        """The reason for a missing trace; set by `watch_step`, the optimizer's hook and `trace_memory`."""
        self.traced_memory: dict[str, Any] | None = None
        """The trace, set by `trace_memory`."""
        self._files = files
        self._memory_limit = memory_limit

    def unknown(self) -> dict[str, str]:
        """The reason for a missing trace by the name of its field; empty without one, and in a run not asked for it."""
        if not self.is_asked or self.untraced_reason is None:
            return {}
        return {"traced_memory": self.untraced_reason}

    @never_raises
    def trace_memory(self) -> None:
        """Trace the watched step once, in a trial that is asked for a trace; without a trace note the reason."""
        watched_step = self.watched_step
        if not self.is_asked or self.traced_memory is not None or not self._files.are_ours or self._files.rank:
            return
        self._memory_limit.lift()
        version = str(sys.modules["torch"].__version__)
        if not version.startswith(TRACED_TORCH):
            self.untraced_reason = f"the script's torch is {version}, and steps are traced with {TRACED_TORCH}x"
        if watched_step is None or self.untraced_reason is not None:
            return
        watched_step.remove()
        reason = watched_step.untraceable_reason
        if reason is None:
            try:
                self.traced_memory = _traced(watched_step)
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:REASON_CHARACTERS]}"
        self.untraced_reason = reason


def _traced(watched_step: Any) -> dict[str, Any]:
    """The lines of the step's peak, for each row of the batch, and the rows that the trial had."""
    begun_ns = time.monotonic_ns()
    model = watched_step.model()
    runpy.run_path(os.path.join(WORKER_FOLDER, "bootstrap.py"))
    tracer = importlib.import_module("trainfast_worker.memory_trace.script_step")
    step = tracer.ScriptStep(
        arguments=watched_step.arguments,
        keywords=watched_step.keywords,
        rows=watched_step.rows,
        used=watched_step.used,
        kept=watched_step.kept,
        loss_bytes=watched_step.loss_bytes,
        holds_gradients=watched_step.holds_gradients,
        autocast=watched_step.autocast,
    )
    unwrapped = model.module if type(model).__name__ == "DistributedDataParallel" else model
    lines = tracer.trace_peaks(unwrapped, watched_step.optimizer(), step)
    return {"rows": watched_step.rows, "lines": lines, "seconds": (time.monotonic_ns() - begun_ns) / 1e9}
