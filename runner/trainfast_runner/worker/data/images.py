"""JPEG files as training samples: loader processes decode, crop, flip and scale them with Pillow."""

from __future__ import annotations

import colorsys
import io
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ..invalid import InvalidInput
from ..model.model_config import image_shape
from .corpus import make_once
from .samples import Batch

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
