"""Images to train on: the user's files, or JPEG files drawn from a seed once and cached.

Drawn images cost as much as photographs: gradients, soft noise and shapes with sharp edges make files of the same
size that take as long to decode. Shape and colour depend on the class, so that a model can learn it.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .corpus import make_once

DRAWING_VERSION = 1
"""The version of the drawing, a part of the cache's folder name: images of another version are drawn again."""
IMAGE_COUNT, DRAWN_CLASSES = 512, 10
"""Chosen, not measured: the number of drawn images, and of their classes."""
IMAGE_SIZE, JPEG_QUALITY = (320, 240), 90
"""Chosen, not measured: pixels of a drawn image, and Pillow's quality of its JPEG file."""
DRAWING_SEED = 20_190_401
"""Any number: the images depend on it and on their index alone."""


@dataclass(frozen=True)
class ImageFiles:
    """JPEG files and the class of each."""

    paths: list[Path]
    classes: NDArray[np.int64]
    source: str
    synthetic: bool


def user_images(paths: list[str]) -> ImageFiles:
    """The user's own files; the class of a file is its folder, numbered in the order of the folders' names."""
    files = [Path(path) for path in paths]
    folders = {folder: number for number, folder in enumerate(sorted({file.parent for file in files}))}
    classes = np.array([folders[file.parent] for file in files], dtype=np.int64)
    return ImageFiles(files, classes, f"{len(files)} JPEG files of {len(folders)} folders", synthetic=False)


def drawn_images(cache_dir: Path, on_make: Callable[[str], None]) -> ImageFiles:
    """The drawn images in the cache; missing ones are drawn under a lock, after a call of `on_make` with the detail."""
    folder = cache_dir / "images" / f"drawn-{DRAWING_VERSION}-{IMAGE_COUNT}-{IMAGE_SIZE[0]}x{IMAGE_SIZE[1]}"
    names = [f"{index:04}.jpg" for index in range(IMAGE_COUNT)]
    files = f"{IMAGE_COUNT} JPEG files of {IMAGE_SIZE[0]}x{IMAGE_SIZE[1]}"

    def make(half_made: Path) -> None:
        on_make(f"drawing {files}, once")
        for index, name in enumerate(names):
            draw_image(index).save(half_made / name, quality=JPEG_QUALITY)

    make_once(folder, names[-1], make, on_make)
    paths = [folder / name for name in names]
    source = f"{files} drawn from a seed"
    return ImageFiles(paths, np.arange(IMAGE_COUNT, dtype=np.int64) % DRAWN_CLASSES, source, synthetic=True)


def draw_image(index: int) -> Any:
    """Draw image `index`, a Pillow image that depends on nothing else."""
    from PIL import Image, ImageDraw

    random = np.random.default_rng((DRAWING_SEED, index))
    width, height = IMAGE_SIZE
    kind = index % DRAWN_CLASSES
    slopes = random.uniform(-1, 1, (3, 2))
    columns, rows = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
    ground = np.stack([a * columns + b * rows for a, b in slopes], axis=-1) * 50 + random.uniform(70, 180, 3)
    for cells, strength in ((8, 30), (40, 18), (160, 12)):
        # Noise at several scales, like texture.
        coarse = random.integers(0, 256, (max(2, cells * height // width), cells, 3), dtype=np.uint8)
        texture = Image.fromarray(coarse).resize(IMAGE_SIZE, Image.Resampling.BICUBIC)
        ground += (np.asarray(texture, dtype=np.float64) - 128) / 128 * strength
    ground += random.normal(0, 6, ground.shape)
    image = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(int(random.integers(4, 9))):
        x, y = random.uniform(0, width), random.uniform(0, height)
        reach = random.uniform(0.1, 0.3) * height
        hue = (kind + random.uniform(-0.25, 0.25)) / DRAWN_CLASSES
        colour = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1, 0.8, random.uniform(0.5, 1)))
        if kind % 2:
            pen.regular_polygon((x, y, reach), 3 + kind // 2, int(random.integers(360)), fill=colour)
        else:
            pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill=colour)
    return image
