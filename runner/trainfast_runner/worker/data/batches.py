"""The samples that `[data]` describes, and this rank's micro-batches of them."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Generator
from torch.utils.data import DataLoader, Sampler

from ..catalog import STRATEGIES
from ..invalid import InvalidInput
from ..model.model_config import text_part, tokens_per_sample, vocab_size
from ..shared.words import split_tokens
from ..spec import Knobs, RankSpec
from .corpus import Corpus, CorpusRequest, open_corpus
from .samples import (
    Batch,
    EncoderDecoderSplit,
    ImageSamples,
    Masking,
    TextSamples,
    collate_whole_batch,
    image_samples,
    packed_pieces,
    pieces_of,
    random_samples,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of which a directory with a tokenizer has one."""
Samples = TextSamples | ImageSamples
"""The samples of a training, by the kind of its data."""


def is_padded(samples: Samples) -> TypeGuard[TextSamples]:
    """True for whole texts, whose lengths vary."""
    return isinstance(samples, TextSamples) and samples.pad_id is not None


def batches_of(
    samples: Samples, knobs: Knobs, dp_rank: int, dp_degree: int, worker_init_fn: Callable[[int], None] | None = None
) -> Iterator[Batch]:
    """Start the loader's processes, and return this rank's micro-batches for `knobs.steps` steps.

    Each loader process first calls `worker_init_fn` with its number. The iterator raises InvalidInput for a file that
    cannot be read.
    """
    lengths = samples.pieces.lengths if is_padded(samples) else None
    order = GlobalOrder(
        samples=len(samples),
        batch_size=knobs.batch_size,
        grad_accum=knobs.grad_accum,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        steps=knobs.steps,
        seed=knobs.seed,
        lengths=lengths,
        grouped=knobs.samples == "grouped",
    )
    loader: DataLoader[Batch | InvalidInput] = DataLoader(
        samples,
        batch_sampler=order,
        collate_fn=collate_whole_batch,
        num_workers=knobs.workers,
        prefetch_factor=knobs.prefetch if knobs.workers else None,
        persistent_workers=knobs.workers > 0,
        worker_init_fn=worker_init_fn,
        pin_memory=knobs.pin_memory == "on",
        # A loader draws a seed for its processes: not from the generator that dropout uses.
        generator=Generator(),
    )
    return map(_readable, iter(loader))


def _readable(batch: Batch | InvalidInput) -> Batch:
    """Return the batch; raise it if it is the error of its samples."""
    if isinstance(batch, InvalidInput):
        raise batch
    return batch


def open_samples(spec: RankSpec, config: Any, on_make: Callable[[str], None], write: Callable[..., None]) -> Samples:
    """Open the samples that `[data]` describes, and `write` the `data` record.

    Samples that are not cached are made first, after a call of `on_make` with the detail.
    """
    samples: Samples
    if spec.data.kind == "jpeg":
        samples = image_samples(spec.data.paths, config, spec.knobs.seed, spec.cache_dir, on_make)
    else:
        samples = _token_samples(spec, config, on_make)
    write(
        "data",
        data_kind=spec.data.kind,
        synthetic=samples.synthetic,
        source=samples.source,
        samples=len(samples),
        tokens=round(len(samples) * mean_tokens(samples, config, spec)),
    )
    return samples


def mean_tokens(samples: Samples, config: Any, spec: RankSpec) -> float:
    """Tokens of a sample without padding: the mean if lengths vary."""
    if is_padded(samples):
        return float(samples.pieces.lengths.mean())
    return tokens_per_sample(config, spec.data.objective, spec.knobs.seq_len)


def _token_samples(spec: RankSpec, config: Any, on_make: Callable[[str], None]) -> TextSamples:
    data, knobs = spec.data, spec.knobs
    split = _encoder_decoder_split(config, knobs.seq_len) if data.objective == "seq2seq" else None
    vocab = vocab_size(config)
    if data.kind == "random":
        return random_samples(vocab, data.objective, knobs.seq_len, knobs.seed, split)
    tokenizer = data.tokenizer or _model_tokenizer(spec.model)
    request = CorpusRequest(data.kind, data.paths, vocab, tokenizer, data.name, data.split, data.texts == "lines")
    return _corpus_samples(open_corpus(request, spec.cache_dir, on_make), spec, config, split)


def _corpus_samples(corpus: Corpus, spec: RankSpec, config: Any, split: EncoderDecoderSplit | None) -> TextSamples:
    """The samples of a corpus: packed, or its texts as they are. Raises InvalidInput if it has too few tokens."""
    data, knobs = spec.data, spec.knobs
    ids, seq_len = _corpus_ids(corpus), knobs.seq_len
    pad_id = width = None
    if knobs.samples == "packed":
        pieces = packed_pieces(len(ids), seq_len)
        if not len(pieces.starts):
            raise InvalidInput(
                f"{corpus.source}: {len(ids)} tokens, fewer than one sample of seq_len={seq_len}",
                key="seq_len",
                allowed=[f"1 to {len(ids)}"],
                nearest=str(max(len(ids), 1)),
            )
    else:
        pieces = pieces_of(_corpus_texts(corpus, "lengths"), seq_len)
        if not len(pieces.starts):
            raise InvalidInput(f"{corpus.source}: no text of two tokens in it", key="data.paths")
        pad = getattr(text_part(config), "pad_token_id", None)
        pad_id = pad if isinstance(pad, int) and 0 <= pad < vocab_size(config) else 0
        # A schedule's buffers and a compiled graph are made for one shape.
        width = seq_len if STRATEGIES[knobs.strategy].is_pipeline or knobs.compile != "off" else None
    masking = classes = None
    if data.objective == "masked-lm":
        if corpus.mask_id is None:
            raise InvalidInput("this tokenizer has no mask token, which masked-lm needs", key="data.tokenizer")
        masking = Masking(corpus.mask_id, corpus.vocab_size, tuple(corpus.special_ids), knobs.seed)
    elif data.objective == "sequence-classification":
        # Each sample has the label of its text.
        texts = np.searchsorted(np.cumsum(_corpus_texts(corpus, "lengths")), pieces.starts, side="right")
        classes = _corpus_texts(corpus, "labels")[texts] % getattr(config, "num_labels", 2)
    return TextSamples(ids, pieces, pad_id, width, masking, classes, split, corpus.source, synthetic=False)


def _corpus_ids(corpus: Corpus) -> NDArray[np.unsignedinteger]:
    """The token ids of a corpus, one text after the other."""
    ids = np.memmap(corpus.folder / "ids.bin", dtype=corpus.dtype, mode="r")
    # Reading every page now keeps the page cache out of the training's memory figures.
    if len(ids):
        ids.max()
    return ids


def _corpus_texts(corpus: Corpus, name: str) -> NDArray[np.int64]:
    """The `lengths` or the `labels` of a corpus's texts, one for each."""
    return np.fromfile(corpus.folder / f"{name}.bin", dtype="<i8")


def _encoder_decoder_split(config: Any, seq_len: int) -> EncoderDecoderSplit:
    """Tokens for the encoder, and the id that the decoder starts with; a T5 starts with its padding id."""
    starts = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    return EncoderDecoderSplit(split_tokens(seq_len)[0], next((start for start in starts if start is not None), 0))


def _model_tokenizer(model: dict[str, Any]) -> str | None:
    """The model's own tokenizer, from its directory or its Hub id; None when there is none or it cannot be loaded."""
    if "path" in model:
        directory = Path(model["path"])
        return str(directory) if any((directory / name).is_file() for name in _TOKENIZER_FILES) else None
    if "hub" in model:
        from huggingface_hub import hf_hub_download

        try:
            hf_hub_download(model["hub"], "tokenizer_config.json", token=os.environ.get("HF_TOKEN"))
        except Exception:  # offline, gated, no such file: a tokenizer is trained on the text, as the record tells
            return None
        return str(model["hub"])
    return None


GROUPED_STEPS = 50
"""Steps whose samples are sorted by their lengths together: the window of transformers' `group_by_length`."""
LONGEST_STEPS = 2
"""First steps that take the longest samples."""
FEWEST_WINDOWS = 4
"""Windows of an epoch at least, as there: fewer samples have narrower ones."""


@dataclass(eq=False)
class GlobalOrder(Sampler[list[int]]):
    """The micro-batches of one data-parallel rank; step t's global batch is the same for any data-parallel degree.

    Step t takes samples t*G ... (t+1)*G of a stream of seeded permutations, one an epoch, where G = batch_size *
    grad_accum * dp_degree. Micro-batch m of data-parallel rank r is the slice at (m * dp_degree + r) * batch_size of
    it. A sample's number is its index plus `samples` for each epoch before, so that augmentation can differ from epoch
    to epoch.

    With `lengths` the first two steps take the G longest samples instead, with one of the very longest in every
    micro-batch: there the run's peak memory comes, and in the second the optimizer has its states. `grouped` sorts each
    window of the stream by length, and takes its global batches in a random order: any few steps are a fair sample.
    """

    samples: int
    batch_size: int
    grad_accum: int
    dp_rank: int
    dp_degree: int
    steps: int
    seed: int
    lengths: NDArray[np.int64] | None = None
    grouped: bool = False

    def __len__(self) -> int:
        return self.steps * self.grad_accum

    def __iter__(self) -> Iterator[list[int]]:
        slices = self.grad_accum * self.dp_degree
        for step, numbers in zip(range(self.steps), self._global_batches(), strict=False):
            parts = numbers.reshape(slices, self.batch_size)
            if step < LONGEST_STEPS and self.lengths is not None:
                # The longest first; repeated if there are fewer samples.
                longest = np.resize(np.argsort(-self.lengths, kind="stable"), len(numbers))
                parts = longest.reshape(self.batch_size, slices).T
            for micro in range(self.grad_accum):
                yield parts[micro * self.dp_degree + self.dp_rank].tolist()

    def _global_batches(self) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of each step's samples, without end."""
        size, window = self.batch_size * self.grad_accum * self.dp_degree, 1
        if self.grouped:
            window = max(1, min(GROUPED_STEPS, self.samples // (FEWEST_WINDOWS * size)))
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for begin in itertools.count(step=window * size):
            numbers = np.arange(begin, begin + window * size)
            places, epochs = numbers % self.samples, numbers // self.samples
            for now in range(epochs[0], epochs[-1] + 1):
                if now != epoch:
                    epoch, order = now, np.random.default_rng((self.seed, now)).permutation(self.samples)
                numbers[epochs == now] = now * self.samples + order[places[epochs == now]]
            if self.grouped and self.lengths is not None:
                numbers = numbers[np.argsort(-self.lengths[numbers % self.samples], kind="stable")]
            batches = numbers.reshape(window, size)
            yield from np.random.default_rng((self.seed, begin, window)).permutation(batches) if window > 1 else batches
