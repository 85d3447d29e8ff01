"""Samples of text, which depend on their index alone: packed ones of one length, and whole texts of their own length.

All packed samples have the same length, so the first batch takes as much memory as any. JPEG files are samples of
their own: loader processes decode, crop, flip and scale them with Pillow.
"""

import colorsys
import io
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..invalid import InvalidInput
from ..model.model_config import image_shape
from .corpus import make_once

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


DRAWING_VERSION = 2
"""The version of the drawing, a part of the cache's folder name: images of another version are drawn again."""
IMAGE_COUNT, DRAWN_CLASSES = 512, 10
"""Chosen, not measured: the number of drawn images, and of their classes."""
IMAGE_SIZE, JPEG_QUALITY = (320, 240), 90
"""Chosen, not measured: pixels of a drawn image, and Pillow's quality of its JPEG file."""
DRAWING_SEED = 20_190_401
"""Any number: the images depend on it and on their index alone."""


def drawn_images(cache_dir: Path, on_make: Callable[[str], None]) -> tuple[list[Path], str]:
    """The files of the drawn images in the cache, and their source in words.

    Missing ones are drawn under a lock, after a call of `on_make` with the detail.
    """
    folder = cache_dir / "images" / f"drawn-{DRAWING_VERSION}-{IMAGE_COUNT}-{IMAGE_SIZE[0]}x{IMAGE_SIZE[1]}"
    names = [f"{index:04}.jpg" for index in range(IMAGE_COUNT)]
    files = f"{IMAGE_COUNT} JPEG files of {IMAGE_SIZE[0]}x{IMAGE_SIZE[1]}"

    def make(half_made: Path) -> None:
        on_make(f"drawing {files}, once")
        for index, name in enumerate(names):
            draw_image(index).save(half_made / name, quality=JPEG_QUALITY)

    make_once(folder, names[-1], make, on_make)
    return [folder / name for name in names], f"{files} drawn from a seed"


def draw_image(index: int) -> Any:
    """Draw image `index`, a Pillow image that depends on nothing else: its class's colour under noise like texture."""
    from PIL import Image

    random = np.random.default_rng((DRAWING_SEED, index))
    width, height = IMAGE_SIZE
    hue = (index % DRAWN_CLASSES + random.uniform(-0.25, 0.25)) / DRAWN_CLASSES
    colour = colorsys.hsv_to_rgb(hue % 1, 0.5, random.uniform(0.4, 0.9))
    pixels = np.full((height, width, 3), colour) * 255 + random.normal(0, 6, (height, width, 3))
    for cells, strength in ((8, 60), (40, 30), (160, 15)):
        coarse = random.integers(0, 256, (max(2, cells * height // width), cells, 3), dtype=np.uint8)
        texture = Image.fromarray(coarse).resize(IMAGE_SIZE, Image.Resampling.BICUBIC)
        pixels += (np.asarray(texture, dtype=np.float64) - 128) / 128 * strength
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


CROP_AREA = (0.08, 1.0)
"""Least and greatest area of a crop, as a share of the image's."""
CROP_RATIO = (3 / 4, 4 / 3)
"""Least and greatest width of a crop over its height."""
CROP_TRIES = 10
"""Random crops that are tried before the whole image is taken."""
PIXEL_MEAN, PIXEL_DEVIATION = 0.5, 0.5
"""Subtracted from values between 0 and 1, and divided by, to lie between -1 and 1."""


@dataclass(eq=False)
class ImageSamples(Dataset[Batch]):
    """Random crops of JPEG files, scaled to `size` x `size`: the usual recipe for ImageNet models.

    A crop has 8 to 100 % of the area and an aspect ratio of 3/4 to 4/3 (Szegedy et al. 2014, section 6), and is
    mirrored half of the time. It depends on (seed, index, epoch) alone, so every rank, strategy and number of workers
    sees the same.
    """

    paths: list[Path]
    classes: NDArray[np.int64]
    """The class of each file."""
    source: str
    synthetic: bool
    size: int
    channels: int
    seed: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, numbers: list[int]) -> Batch | InvalidInput:
        """A whole batch: `pixel_values` of (batch, channels, size, size) in -1 to 1, `labels` of (batch,).

        `numbers` are as in `GlobalOrder`. The error of an unreadable file is returned, and raised by `batches_of`: a
        loader's process would raise it without its fields.
        """
        try:
            pixels = np.stack([self._pixels(number % len(self), number // len(self)) for number in numbers])
        except InvalidInput as error:
            return error
        labels = self.classes[np.asarray(numbers) % len(self)]
        return {"pixel_values": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}

    def _pixels(self, index: int, epoch: int) -> NDArray[np.float32]:
        from PIL import Image

        random = np.random.default_rng((self.seed, index, epoch))
        path = self.paths[index]
        mode = "L" if self.channels == 1 else "RGB"
        try:
            with Image.open(io.BytesIO(path.read_bytes())) as file:
                box = crop_box(file.size, random)
                image = file.convert(mode).resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror or error}", key="data.paths") from error
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        values = (np.asarray(image, dtype=np.float32) / 255 - PIXEL_MEAN) / PIXEL_DEVIATION
        planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
        return np.ascontiguousarray(planes)


def crop_box(size: tuple[int, int], random: np.random.Generator) -> tuple[int, int, int, int]:
    """A random crop of an image of (width, height) as left, top, right, bottom; the whole image if none fits."""
    width, height = size
    for _ in range(CROP_TRIES):
        area = width * height * random.uniform(*CROP_AREA)
        ratio = math.exp(random.uniform(math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(random.integers(width - crop_width + 1))
            top = int(random.integers(height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    return 0, 0, width, height


def image_samples(
    paths: list[str], config: Any, seed: int, cache_dir: Path, on_make: Callable[[str], None]
) -> ImageSamples:
    """Samples of the user's files, or without `paths` of images that are drawn once into the cache.

    Raises InvalidInput for a model whose head has fewer classes than there are folders.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            f"data.kind = 'jpeg' needs the package pillow: {sys.executable} -m pip install pillow", key="data.kind"
        ) from error
    channels, size = image_shape(config)
    labels = int(config.num_labels)
    if not paths:
        files, source = drawn_images(cache_dir, on_make)
        # Drawn images fit a head with any number of classes.
        classes = np.arange(len(files), dtype=np.int64) % DRAWN_CLASSES % labels
        return ImageSamples(files, classes, source, True, size, channels, seed)
    files = [Path(path) for path in paths]
    # The class of a file is its folder, numbered in the order of the folders' names.
    folders = {folder: number for number, folder in enumerate(sorted({file.parent for file in files}))}
    if len(folders) > labels:
        raise InvalidInput(
            f"the files are in {len(folders)} folders, one a class, and the model has {labels} classes",
            key="model.num_labels",
            allowed=[f"{len(folders)} or more"],
            nearest=str(len(folders)),
        )
    classes = np.array([folders[file.parent] for file in files], dtype=np.int64)
    source = f"{len(files)} JPEG files of {len(folders)} folders"
    return ImageSamples(files, classes, source, False, size, channels, seed)
