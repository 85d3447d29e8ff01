"""Batches handed to the script by DataLoaders: the wait for each, its samples, and in a batch search which come first.

The trials of a batch search take the longest samples first: their memory is that of the widest batches. Where the data
set tells no lengths, the widths of the model's inputs are noted for the search's answer.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from time import monotonic_ns
from typing import Any

from torch import Generator, Tensor, is_grad_enabled, randperm
from torch.utils.data import BatchSampler, dataloader

from .notes import hook_modules, never_raises
from .script_run import ScriptRun
from .step_hooks import leading_size
from .turns import Turn

ACCELERATE_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher")
"""Classes of `accelerate.data_loader` that draw one batch ahead of the one that they hand on."""


def install(run: ScriptRun) -> None:
    """Follow the draws of batches, each where the script gets the batch.

    `__next__` of the loaders' iterators is the class's method, so that no object changes its type.
    """
    _set_defaults(dataloader.DataLoader.__init__, run.settings.loader_defaults)
    iterator_class = dataloader._BaseDataLoaderIter
    next_batch = iterator_class.__next__
    draws = _Draws(run)

    @functools.wraps(next_batch)
    def followed(self: Any) -> Any:
        draws.knobs = self._num_workers, self._pin_memory
        return draws.draw(next_batch, self, self._index_sampler)

    def follow_accelerate(module: Any) -> None:
        for name in ACCELERATE_LOADERS:
            loader_class = getattr(module, name)
            loader_class.__iter__ = draws.followed(loader_class.__iter__)

    iterator_class.__next__ = followed  # type: ignore[method-assign]
    hook_modules({"accelerate.data_loader": follow_accelerate})
    if run.settings.longest_first:
        take_longest_first(run)


class _Draws:
    """The draws of batches; one within another is of a batch that the script does not get yet."""

    def __init__(self, run: ScriptRun) -> None:
        self._begin = never_raises(run.begin_draw)
        self._turns = run.turns
        self.knobs: tuple[int, bool] | None = None
        """Workers and pinned memory of the DataLoader that gave the newest batch."""
        self._is_inner = False

    def followed(self, iterate: Callable[[Any], Any]) -> Any:
        """Return an `__iter__` that follows the batches of `iterate`."""

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
        except StopIteration:  # any other error is not the loader's end
            self._end(turn, begun_ns, None)
            raise
        finally:
            self._is_inner = False
        self._end(turn, begun_ns, batch)
        return batch

    @never_raises
    def _end(self, turn: Turn | None, begun_ns: int, batch: Any) -> None:
        if turn is None:
            return
        size = None if batch is None else leading_size(batch) or 0
        self._turns.end_draw(turn, begun_ns, size, self.knobs)


@never_raises
def _set_defaults(init: Any, new_defaults: Mapping[str, Any]) -> None:
    """Change the defaults of the arguments of `DataLoader.__init__`; an argument that the script gives wins."""
    names = init.__code__.co_varnames[: init.__code__.co_argcount][-len(init.__defaults__) :]
    init.__defaults__ = tuple(map(new_defaults.get, names, init.__defaults__))


LOOK_NS = 2_000_000_000
"""Chosen, not measured: the most time for the look at a data set's lengths."""
DRAWN_SAMPLES = 100_000
"""Chosen, not measured: the most indices that are drawn ahead from a sampler of the script's own."""
WHOLE_SAMPLERS = ("SequentialSampler", "RandomSampler", "DistributedSampler", "SeedableRandomSampler")
"""Samplers of torch and accelerate that may put any sample of the data set into any batch."""
LENGTH_NAMES = ("length", "lengths", "sizes")
"""Names of the attribute with a data set's own lengths."""
LONGEST = "_trainfast_longest"
"""The attribute of a loader's iterator with the batch that it takes first; None where no lengths differ."""


def take_longest_first(run: ScriptRun) -> None:
    """Give the batches of the untimed steps the longest samples."""
    iterator_class = dataloader._BaseDataLoaderIter
    next_index = iterator_class._next_index

    @functools.wraps(next_index)
    def longest_first(self: Any) -> Any:
        index = next_index(self)  # type: ignore[no-untyped-call]
        if run.taken >= run.settings.timing_warmup or not is_grad_enabled():
            return index
        longest = longest_batch(self, _batch(index))
        return index if longest is None else longest if isinstance(index, list) else longest[0]

    @never_raises
    def longest_batch(iterator: Any, batch: list[Any]) -> Any:
        if not batch or not all(isinstance(number, int) for number in batch):
            return None  # an iterable data set, or keys
        if not hasattr(iterator, LONGEST):
            setattr(iterator, LONGEST, None)
            longest, looked_at, samples = _look(iterator, batch)
            setattr(iterator, LONGEST, longest)
            run.widths.update(longest_first=longest is not None, looked_at=looked_at, samples=samples)
        return getattr(iterator, LONGEST)

    iterator_class._next_index = longest_first  # type: ignore[method-assign]


def _batch(index: Any) -> list[Any]:
    """The indices that a sampler gives for one batch; without automatic batching it gives one alone."""
    return index if isinstance(index, list) else [index]


def _look(iterator: Any, first_batch: list[int]) -> tuple[list[int] | None, int, int]:
    """Look for the batch that needs most: the longest samples, or the widest of a script's own batches.

    Return it, None where lengths are equal or unknown; the samples whose length was seen; and all samples.
    """
    dataset, sampler, deadline_ns = iterator._dataset, iterator._index_sampler, monotonic_ns() + LOOK_NS
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler  # accelerate's share of a rank
    makes_batches = type(sampler) is not BatchSampler and len(first_batch) > 1
    candidates: Sequence[int] = range(len(dataset))
    batches: list[list[int]] = []
    if type(getattr(sampler, "sampler", sampler)).__name__ not in WHOLE_SAMPLERS or makes_batches:
        drawn = list(_within(iterator._sampler_iter, DRAWN_SAMPLES // len(first_batch), deadline_ns))
        iterator._sampler_iter = chain(drawn, iterator._sampler_iter)
        batches = [first_batch, *map(_batch, drawn)]
        candidates = list(dict.fromkeys(chain.from_iterable(batches)))
    length_of = dict(takewhile(lambda _: monotonic_ns() < deadline_ns, _lengths(dataset, candidates)))
    if makes_batches:
        longest = max(batches, key=lambda batch: len(batch) * max(length_of.get(index, 0) for index in batch))
    else:
        longest = heapq.nlargest(len(first_batch), length_of, key=lambda index: (length_of[index], index))
    is_full = makes_batches or len(longest) == len(first_batch)
    differ = len(set(length_of.values())) > 1
    return longest if is_full and differ else None, len(length_of), len(candidates)


def _within(items: Iterable[Any], count: int, deadline_ns: int) -> Iterator[Any]:
    """Yield the first `count` items, fewer after the deadline; take no item that is not yielded."""
    for item in islice(items, count):
        yield item
        if monotonic_ns() > deadline_ns:
            return


def _lengths(dataset: Any, candidates: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield indices and lengths."""
    named: Iterator[Any] = (getattr(dataset, name, None) for name in LENGTH_NAMES)
    sequences = (found for found in named if hasattr(found, "__getitem__") and hasattr(found, "__len__"))
    own = next((lengths for lengths in sequences if len(lengths) == len(dataset) > 0), None)
    # In a random order, so that a look cut short has seen all parts of the data set.
    for place in randperm(len(candidates), generator=Generator().manual_seed(0)).tolist():
        index = candidates[place]
        yield index, _size(dataset[index]) if own is None else int(own[index])


def _size(value: Any) -> int:
    """The values in a sample: elements of tensors and arrays, characters of texts, items of lists."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, (tuple, list)):
        is_plain = isinstance(value, list) and value and isinstance(value[0], (int, float))
        return len(value) if is_plain else sum(map(_size, value))
    size = getattr(value, "size", None)
    if isinstance(size, int):
        return size  # an array of numpy
    return len(value) if hasattr(value, "__len__") else 0
