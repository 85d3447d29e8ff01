"""The longest samples first, in the trials of a batch search: their memory is that of the widest batches.

Where the data set tells no lengths, the widths of the model's inputs are noted for the search's answer.
"""

from __future__ import annotations

import functools
import heapq
import importlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, is_grad_enabled
from torch.utils.data import BatchSampler, dataloader

from .notes import never_raises

if TYPE_CHECKING:
    from .script_run import ScriptRun

LOOK_NS = 2_000_000_000
"""Chosen, not measured: the most time for the look at a data set's lengths."""
DRAWN_SAMPLES = 100_000
"""Chosen, not measured: the most indices that are drawn ahead from a sampler of the script's own."""
ROWS_AT_ONCE = 1000
"""Rows of a column that are read in one call."""
WHOLE_SAMPLERS = ("SequentialSampler", "RandomSampler", "DistributedSampler", "SeedableRandomSampler")
"""Samplers of torch and accelerate that may put any sample of the data set into any batch."""
LENGTH_NAMES = ("length", "lengths", "sizes")
"""Names of a data set's own lengths, an attribute or a column."""
LOOK = "_trainfast_look"
"""The attribute of a loader's iterator with its `_Look`."""


class _Look(NamedTuple):
    """The batch to take first: the longest samples, or None where lengths are equal or unknown."""

    batch: list[int] | None
    looked_at: int
    """Samples whose length was seen."""
    samples: int


def install(run: ScriptRun) -> None:
    """Give the batches of the untimed steps the longest samples; does nothing outside a batch search."""
    if not run.settings.longest_first:
        return
    iterator_class = dataloader._BaseDataLoaderIter
    next_index = iterator_class._next_index

    @functools.wraps(next_index)
    def longest_first(self: Any) -> Any:
        index = next_index(self)  # type: ignore[no-untyped-call]
        if run.steps.taken >= run.settings.timing_warmup or not is_grad_enabled():
            return index
        longer = longer_batch(self, index)
        return index if longer is None else longer

    @never_raises
    def longer_batch(iterator: Any, index: Any) -> Any:
        batch = index if isinstance(index, list) else [index]
        if not batch or not all(isinstance(number, int) for number in batch):
            return None  # an iterable data set, or keys
        if not hasattr(iterator, LOOK):
            setattr(iterator, LOOK, _Look(None, 0, 0))
            look = _look(iterator, batch)
            setattr(iterator, LOOK, look)
            run.widths.update(longest_first=look.batch is not None, looked_at=look.looked_at, samples=look.samples)
        longest = getattr(iterator, LOOK).batch
        if longest is None:
            return None
        return longest if isinstance(index, list) else longest[0]

    iterator_class._next_index = longest_first  # type: ignore[method-assign]


@never_raises
def note_width(run: ScriptRun, module: Any, args: Any, kwargs: Any) -> None:
    """Note the width of a forward pass's input: the values of one sample in its first batched tensor."""
    width = _width((args, kwargs)) if is_grad_enabled() else None
    if width is None:
        return
    narrowest, widest = run.widths.get("narrowest", width), run.widths.get("widest", width)
    if width > widest and run.steps.taken >= run.settings.timing_warmup:
        run.widths["longest_first"] = False  # the samples' sizes are not what decides the width
    run.widths.update(narrowest=min(width, narrowest), widest=max(width, widest))


def _width(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.numel() // len(value) if value.dim() > 1 and len(value) else None
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((width for width in map(_width, values) if width is not None), None)


def _look(iterator: Any, first_batch: list[int]) -> _Look:
    """Look for the batch that needs most: the longest samples, or the widest of a script's own batches."""
    dataset, sampler, deadline_ns = iterator._dataset, iterator._index_sampler, monotonic_ns() + LOOK_NS
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler  # accelerate's share of a rank
    makes_batches = type(sampler) is not BatchSampler and len(first_batch) > 1
    candidates: Sequence[int] = range(len(dataset))
    batches: list[list[int]] = []
    if type(getattr(sampler, "sampler", sampler)).__name__ not in WHOLE_SAMPLERS or makes_batches:
        drawn = list(_within(iterator._sampler_iter, DRAWN_SAMPLES // len(first_batch), deadline_ns))
        iterator._sampler_iter = chain(drawn, iterator._sampler_iter)
        batches = [first_batch, *(index if isinstance(index, list) else [index] for index in drawn)]
        candidates = list(dict.fromkeys(chain.from_iterable(batches)))
    seen = 0
    shortest = longest = 0

    def seen_lengths() -> Iterator[tuple[int, int]]:
        nonlocal seen, shortest, longest
        for index, length in _within(_lengths(dataset, candidates), len(candidates), deadline_ns):
            shortest, longest = (min(shortest, length), max(longest, length)) if seen else (length, length)
            seen += 1
            yield length, index

    if makes_batches:
        length_of = {index: length for length, index in seen_lengths()}
        batch = max(batches, key=lambda batch: len(batch) * max(length_of.get(index, 0) for index in batch))
    else:
        batch = [index for _, index in heapq.nlargest(len(first_batch), seen_lengths())]
    is_full = len(batch) == len(first_batch) or makes_batches
    return _Look(batch if shortest < longest and is_full else None, seen, len(candidates))


def _within(items: Iterable[Any], count: int, deadline_ns: int) -> Iterator[Any]:
    """Yield the first `count` items, fewer after the deadline; take no item that is not yielded."""
    iterator = iter(items)
    for _ in range(count):
        if monotonic_ns() > deadline_ns:
            return
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def _lengths(dataset: Any, candidates: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield indices and lengths, those of any prefix spread over the data set."""
    own = next((value for name in LENGTH_NAMES if _counts(value := getattr(dataset, name, None), dataset)), None)
    columns = getattr(dataset, "column_names", None) if hasattr(dataset, "with_format") else None
    column = next((name for name in (*LENGTH_NAMES, "input_ids") if name in (columns or ())), None)
    rows_at_once = ROWS_AT_ONCE if own is None and column is not None else 1
    for block in _spread(math.ceil(len(candidates) / rows_at_once)):
        indices = candidates[block * rows_at_once : (block + 1) * rows_at_once]
        if own is not None:
            yield indices[0], int(own[indices[0]])
        elif column is not None:
            yield from zip(indices, _column_lengths(dataset, column, list(indices)))  # noqa: B905 (Python 3.8)
        else:
            yield indices[0], _size(dataset[indices[0]])


def _counts(lengths: Any, dataset: Any) -> bool:
    """True for a sequence with one number for each sample."""
    return hasattr(lengths, "__getitem__") and hasattr(lengths, "__len__") and len(lengths) == len(dataset) > 0


def _column_lengths(dataset: Any, column: str, indices: list[int]) -> list[int]:
    """The lengths in these rows of a data set of Hugging Face, which its format or transform does not change."""
    values = dataset.with_format("arrow")[indices].column(column)
    if column in LENGTH_NAMES:
        return [int(value) for value in values.to_pylist()]
    compute = importlib.import_module("pyarrow.compute")  # the data set's own library has it
    return [int(length or 0) for length in compute.list_value_length(values).to_pylist()]


def _spread(count: int) -> Iterator[int]:
    """Yield 0 to count - 1 in steps of about the golden section, so that any prefix is spread evenly."""
    step = max(1, round(0.618 * count))
    while math.gcd(step, count) > 1:
        step += 1
    return (number * step % count for number in range(count))


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
