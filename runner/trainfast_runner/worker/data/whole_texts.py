"""Training samples that are whole texts of varying length (documents or lines), padded to the longest in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from .samples import IGNORED_LABEL, Batch, Masking

SHORTEST_TOKENS = 2
"""Tokens of the shortest sample: a causal model cannot learn from one token alone."""


@dataclass(frozen=True)
class Pieces:
    """First token of each sample in an array of ids, and the sample's length in tokens."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def pieces_of(text_lengths: NDArray[np.int64], seq_len: int) -> Pieces:
    """Cut texts of these lengths, laid end to end, into samples of at most `seq_len` tokens."""
    ends = np.cumsum(text_lengths)
    pieces_per_text = -(-text_lengths // seq_len)
    text_of_piece = np.repeat(np.arange(len(text_lengths)), pieces_per_text)
    pieces_before_text = np.cumsum(pieces_per_text) - pieces_per_text
    number_in_text = np.arange(len(text_of_piece)) - pieces_before_text[text_of_piece]
    starts = (ends - text_lengths)[text_of_piece] + number_in_text * seq_len
    lengths = np.minimum(seq_len, ends[text_of_piece] - starts)
    long_enough = lengths >= SHORTEST_TOKENS
    return Pieces(starts[long_enough], lengths[long_enough])


@dataclass(eq=False)
class WholeTexts(Dataset[Batch]):
    """Samples that are whole texts. Labels are `classes`, else those of `masking`, else the ids themselves.

    A batch is padded on the right to its longest sample, or to `width` if shapes must not change.
    """

    ids: NDArray[np.unsignedinteger]
    pieces: Pieces
    pad_id: int
    width: int | None = None
    masking: Masking | None = None
    classes: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.pieces.lengths)

    def __getitems__(self, numbers: list[int]) -> Batch:
        """A whole batch: `input_ids`, `attention_mask` and `labels` of (batch, longest); `classes` are of (batch,).

        Padding has a mask of 0 and labels that do not count. `numbers` are as in `GlobalOrder`.
        """
        indices = np.asarray(numbers) % len(self)
        lengths = self.pieces.lengths[indices]
        shape = len(indices), self.width or int(lengths.max())
        inputs = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            start, length = self.pieces.starts[index], self.pieces.lengths[index]
            ids = self.ids[start : start + length].astype(np.int64)
            inputs[row, :length], labels[row, :length] = self.masking(ids, index) if self.masking else (ids, ids)
        mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
        if self.classes is not None:
            labels = self.classes[indices]
        parts = {"input_ids": inputs, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(part) for name, part in parts.items()}


class CountedBatches:
    """Micro-batches, with a count of their tokens without padding."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._tokens = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        # Still on the host: nothing waits for a device.
        self._tokens += int(batch["attention_mask"].sum())
        return batch

    def take_tokens(self) -> int:
        """Return the tokens counted since the last call."""
        tokens, self._tokens = self._tokens, 0
        return tokens
