"""Time spent waiting for a DataLoader's batches, and their samples."""

from __future__ import annotations

import functools
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torch import is_grad_enabled
from torch.utils.data import dataloader

from .knobs_without_flag import set_loader_defaults
from .model_hook import leading_size
from .notes import note_error

if TYPE_CHECKING:
    from .script_run import ScriptRun


def install(run: ScriptRun) -> None:
    """Time `__next__` of the loaders' iterators: the class's method, so that no object changes its type."""
    set_loader_defaults(dataloader.DataLoader, run)
    iterator_class = dataloader._BaseDataLoaderIter
    next_batch = iterator_class.__next__
    steps = run.steps

    @functools.wraps(next_batch)
    def timed(self: Any) -> Any:
        begun_ns = monotonic_ns()
        batch = next_batch(self)
        # A batch that is drawn without gradients is for an evaluation.
        if is_grad_enabled():
            try:
                add(self, batch, begun_ns)
            except Exception as error:
                note_error("DataLoader", error)
        return batch

    def add(iterator: Any, batch: Any, begun_ns: int) -> None:
        size = leading_size(batch) or 0
        if steps.taken == 0 and steps.data_ns is None:
            steps.begun_ns = begun_ns
            run.ran.setdefault("workers", iterator._num_workers)
            run.ran.setdefault("pin_memory", "on" if iterator._pin_memory else "off")
            if size:
                run.ran.setdefault("batch_size", size)
        steps.add_batch(size, monotonic_ns() - begun_ns)

    iterator_class.__next__ = timed  # type: ignore[method-assign]
