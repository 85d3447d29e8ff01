"""The order of a training's samples, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler


@dataclass(eq=False)
class GlobalOrder(Sampler[list[int]]):
    """The micro-batches of one data-parallel rank; step t's global batch is the same for any data-parallel degree.

    Step t takes samples t*G ... (t+1)*G of a stream of seeded permutations, one an epoch, where G = batch_size *
    grad_accum * dp_degree. Micro-batch m of data-parallel rank r is the slice at (m * dp_degree + r) * batch_size of
    it. A sample's number is its index plus `samples` for each epoch before, so that augmentation can differ from epoch
    to epoch.

    With `lengths` the first step takes the G longest samples instead, with one of the very longest in every
    micro-batch, so that the run's peak memory comes in its first step.
    """

    samples: int
    batch_size: int
    grad_accum: int
    dp_rank: int
    dp_degree: int
    steps: int
    seed: int
    lengths: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self.steps * self.grad_accum

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, np.empty(0, dtype=np.int64)
        slices = self.grad_accum * self.dp_degree
        longest = [] if self.lengths is None else longest_indices(self.lengths, slices * self.batch_size)
        for micro in range(len(self)):
            if self.lengths is not None and micro < self.grad_accum:
                yield longest[micro * self.dp_degree + self.dp_rank :: slices]
                continue
            start = (micro * self.dp_degree + self.dp_rank) * self.batch_size
            numbers: list[int] = []
            for position in range(start, start + self.batch_size):
                if position // self.samples != epoch:
                    epoch = position // self.samples
                    order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
                numbers.append(epoch * self.samples + int(order[position % self.samples]))
            yield numbers


def longest_indices(lengths: NDArray[np.int64], count: int) -> list[int]:
    """Indices of the `count` longest samples, the longest first; repeated if there are fewer."""
    order = np.argsort(-lengths, kind="stable")
    return [int(index) for index in np.resize(order, count)]
