"""Time spent waiting for a DataLoader's batches, and their samples."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import dataloader

from .asked_knobs import set_loader_defaults
from .model_hook import leading_size
from .notes import never_raises

if TYPE_CHECKING:
    from .script_run import ScriptRun


def install(run: ScriptRun) -> None:
    """Time `__next__` of the loaders' iterators: the class's method, so that no object changes its type."""
    set_loader_defaults(dataloader.DataLoader, run)
    iterator = dataloader._BaseDataLoaderIter
    next_batch = iterator.__next__

    @functools.wraps(next_batch)
    def timed(self: Any) -> Any:
        begun_ns = time.monotonic_ns()
        batch = next_batch(self)
        # A batch that is drawn without gradients is for an evaluation.
        if torch.is_grad_enabled():
            add(self, batch, begun_ns)
        return batch

    @never_raises
    def add(loader: Any, batch: Any, begun_ns: int) -> None:
        steps = run.steps
        if steps.data_ns is None:
            run.steps.fired("DataLoader")
            if steps.taken == 0:
                steps.begun_ns = begun_ns
                run.ran.setdefault("workers", loader._num_workers)
                run.ran.setdefault("pin_memory", "on" if loader._pin_memory else "off")
                run.ran.setdefault("batch_size", leading_size(batch))
        steps.data_ns = (steps.data_ns or 0) + time.monotonic_ns() - begun_ns
        size = leading_size(batch) or 0
        steps.loader_samples += size
        steps.largest_batch = max(steps.largest_batch, size)

    iterator.__next__ = timed  # type: ignore[method-assign]
