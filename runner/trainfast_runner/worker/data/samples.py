"""Samples of text, which depend on their index alone: packed ones of one length, and whole texts of their own length.

All packed samples have the same length, so the first batch takes as much memory as any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..invalid import InvalidInput
from .corpus import Corpus

IGNORED_LABEL = -100
"""cross_entropy's default ignore_index."""
MASKED_FRACTION = 0.15
"""Share of the tokens that masked-lm predicts (Devlin et al. 2018, 3.1)."""
MASKED_BELOW, REPLACED_BELOW = 0.8, 0.9
"""A predicted token with a draw below the first becomes the mask, one below the second a random token."""
RANDOM_SAMPLES = 512
"""Number of random samples in Hugging Face's single-GPU guide (presets/guide-single-gpu.toml)."""
RANDOM_IDS = (100, 30_000)
"""Range of random ids in Hugging Face's single-GPU guide (presets/guide-single-gpu.toml)."""
BERT_MASK_ID = 103
"""[MASK] in the vocabulary of bert-base-uncased."""

Batch = dict[str, Tensor]
"""The tensors of a micro-batch, by the names of the model's arguments."""


@dataclass(frozen=True)
class Masking:
    """BERT's masked-LM recipe (Devlin et al. 2018, 3.1): of 15 % chosen, 80 % masked, 10 % random, 10 % kept."""

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    seed: int

    def __call__(self, ids: NDArray[np.int64], index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and labels of sample `index`, drawn from (seed, index) alone."""
        random = np.random.default_rng((self.seed, index))
        is_predicted = (random.random(ids.shape) < MASKED_FRACTION) & ~np.isin(ids, self.special_ids)
        replacement_draw = random.random(ids.shape)
        inputs = np.where(is_predicted & (replacement_draw < MASKED_BELOW), self.mask_id, ids)
        is_replaced = is_predicted & (replacement_draw >= MASKED_BELOW) & (replacement_draw < REPLACED_BELOW)
        inputs = np.where(is_replaced, random.integers(0, self.vocab_size, ids.shape), inputs)
        return inputs, np.where(is_predicted, ids, IGNORED_LABEL)


@dataclass(frozen=True)
class EncoderDecoderSplit:
    """Sequence to sequence from plain text: the encoder reads `encoder_tokens` ids, the decoder writes the rest.

    The decoder's input is its labels, moved one place on after `start_id`.
    """

    encoder_tokens: int
    start_id: int

    def __call__(self, rows: NDArray[np.int64]) -> Batch:
        """The batch of these rows: `input_ids`, `decoder_input_ids`, `labels`."""
        labels = rows[:, self.encoder_tokens :]
        decoder_ids = np.concatenate([np.full_like(labels[:, :1], self.start_id), labels[:, :-1]], axis=1)
        parts = {"input_ids": rows[:, : self.encoder_tokens], "decoder_input_ids": decoder_ids, "labels": labels}
        return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def collate_whole_batch(batch: Any) -> Any:
    """Collate the batches of a dataset that returns whole ones."""
    return batch


def corpus_ids(corpus: Corpus) -> NDArray[np.unsignedinteger]:
    """The token ids of a corpus, one text after the other."""
    ids = np.memmap(corpus.folder / "ids.bin", dtype=corpus.dtype, mode="r")
    # Reading every page now keeps the page cache out of the training's memory figures.
    if len(ids):
        ids.max()
    return ids


def corpus_masking(corpus: Corpus, seed: int) -> Masking:
    """Masking for a corpus. Raises InvalidInput if its tokenizer has no mask token."""
    if corpus.mask_id is None:
        raise InvalidInput("this tokenizer has no mask token, which masked-lm needs", key="data.tokenizer")
    return Masking(corpus.mask_id, corpus.vocab_size, tuple(corpus.special_ids), seed)


def corpus_texts(corpus: Corpus, name: str) -> NDArray[np.int64]:
    """The `lengths` or the `labels` of a corpus's texts, one for each."""
    return np.fromfile(corpus.folder / f"{name}.bin", dtype="<i8")


def corpus_classes(corpus: Corpus, starts: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Labels, below `classes`, of the samples that start at these tokens: each has the label of its text."""
    texts = np.searchsorted(np.cumsum(corpus_texts(corpus, "lengths")), starts, side="right")
    labels: NDArray[np.int64] = corpus_texts(corpus, "labels")[texts] % classes
    return labels


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


def packed_pieces(tokens: int, seq_len: int) -> Pieces:
    """Cut so many tokens into samples of exactly `seq_len` tokens; a rest is left out."""
    count = tokens // seq_len
    return Pieces(np.arange(count) * seq_len, np.full(count, seq_len))


@dataclass(eq=False)
class TextSamples(Dataset[Batch]):
    """Samples of token ids, packed or whole texts. Labels are `classes`, else those of `masking`, else the ids.

    A batch of whole texts is padded on the right with `pad_id` to its longest sample, or to `width` if shapes must not
    change. Packed samples have no `pad_id`, and may be divided by `split`.
    """

    ids: NDArray[np.unsignedinteger]
    pieces: Pieces
    pad_id: int | None = None
    width: int | None = None
    masking: Masking | None = None
    classes: NDArray[np.int64] | None = None
    split: EncoderDecoderSplit | None = None
    source: str = "seeded random token ids"
    synthetic: bool = True

    def __len__(self) -> int:
        return len(self.pieces.lengths)

    def __getitems__(self, numbers: list[int]) -> Batch:
        """A whole batch: `input_ids` and `labels` of (batch, longest); `classes` are of (batch,).

        Whole texts have an `attention_mask` too: padding has a mask of 0 and labels that do not count. `numbers` are as
        in `GlobalOrder`; a sample is the same in every epoch.
        """
        indices = np.asarray(numbers) % len(self)
        lengths = self.pieces.lengths[indices]
        shape = len(indices), self.width or int(lengths.max())
        inputs = np.full(shape, self.pad_id or 0, dtype=np.int64)
        # The ids of packed samples are their own labels.
        is_same = self.pad_id is None and self.masking is None
        labels = inputs if is_same else np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            start, length = self.pieces.starts[index], self.pieces.lengths[index]
            ids = self.ids[start : start + length].astype(np.int64)
            inputs[row, :length], labels[row, :length] = self.masking(ids, index) if self.masking else (ids, ids)
        if self.split is not None:
            return self.split(inputs)
        parts = {"input_ids": inputs, "labels": labels if self.classes is None else self.classes[indices]}
        if self.pad_id is not None:
            parts["attention_mask"] = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
        return {name: torch.from_numpy(part) for name, part in parts.items()}


def random_samples(
    vocab_size: int,
    objective: str,
    seq_len: int,
    seed: int,
    split: EncoderDecoderSplit | None = None,
    count: int = RANDOM_SAMPLES,
) -> TextSamples:
    """Samples of seeded random ids, for measuring speed and memory: a model learns nothing from them."""
    high = min(RANDOM_IDS[1], vocab_size)
    low = min(RANDOM_IDS[0], high - 1)
    ids = np.random.default_rng(seed).integers(low, high, count * seq_len, dtype=np.uint32)
    masking = Masking(min(BERT_MASK_ID, vocab_size - 1), high, (), seed) if objective == "masked-lm" else None
    classes = np.zeros(count, dtype=np.int64) if objective == "sequence-classification" else None
    return TextSamples(ids, packed_pieces(len(ids), seq_len), masking=masking, classes=classes, split=split)


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
