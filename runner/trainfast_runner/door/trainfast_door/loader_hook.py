"""Batches handed to the script by DataLoaders: the wait for each, and its samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader

from .frameworks import set_loader_defaults
from .import_hooks import hook_modules
from .model_hook import leading_size
from .notes import never_raises

if TYPE_CHECKING:
    from .script_run import ScriptRun
    from .turns import Turn

ACCELERATE_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher")
"""Classes of `accelerate.data_loader` that draw one batch ahead of the one that they hand on."""


def install(run: ScriptRun) -> None:
    """Time `__next__` of the loaders' iterators: the class's method, so that no object changes its type."""
    set_loader_defaults(dataloader.DataLoader, run)
    iterator_class = dataloader._BaseDataLoaderIter
    next_batch = iterator_class.__next__
    draws = _Draws(run)

    @functools.wraps(next_batch)
    def timed(self: Any) -> Any:
        draws.knobs = self._num_workers, self._pin_memory
        return draws.draw(next_batch, self, self._index_sampler)

    iterator_class.__next__ = timed  # type: ignore[method-assign]
    hook_modules({"accelerate.data_loader": draws.follow_accelerate})


class _Draws:
    """Follows the draws of batches, each where the script gets the batch."""

    def __init__(self, run: ScriptRun) -> None:
        self._steps = run.steps
        self.knobs: tuple[int, bool] | None = None
        """Workers and pinned memory of the DataLoader that gave the newest batch."""
        self._is_inner = False
        """True during a draw: one within it is of a batch that the script does not get yet."""

    def follow_accelerate(self, module: Any) -> None:
        """Follow the batches that the loaders of `accelerate.data_loader` hand on."""
        for name in ACCELERATE_LOADERS:
            loader_class = getattr(module, name)
            loader_class.__iter__ = self._followed(loader_class.__iter__)

    def _followed(self, iterate: Any) -> Any:
        @functools.wraps(iterate)
        def followed(loader: Any) -> Any:
            batches = iterate(loader)
            while True:
                try:
                    batch = self.draw(next, batches, loader)
                except StopIteration:
                    return
                yield batch

        return followed

    def draw(self, next_batch: Callable[[Any], Any], iterator: Any, loader: Any) -> Any:
        """Return the iterator's next batch, and note it; `loader` is the same for all iterators of a DataLoader."""
        if self._is_inner:
            return next_batch(iterator)
        begun_ns = monotonic_ns()
        turn = self._begin(iterator, loader, begun_ns)
        self._is_inner = True
        try:
            batch = next_batch(iterator)
        except StopIteration:
            self._end(turn, begun_ns, None)
            raise
        finally:
            self._is_inner = False
        self._end(turn, begun_ns, batch)
        return batch

    @never_raises
    def _begin(self, iterator: Any, loader: Any, begun_ns: int) -> Turn:
        return self._steps.begin_draw(iterator, loader, begun_ns)

    @never_raises
    def _end(self, turn: Turn | None, begun_ns: int, batch: Any) -> None:
        if turn is not None:
            size = None if batch is None else leading_size(batch) or 0
            self._steps.turns.end_draw(turn, begun_ns, size, self.knobs)
