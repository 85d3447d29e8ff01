"""A report as blocks of plain text, before it takes a form. No block holds markup: each form escapes every text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainfast_tui.text.format import without_empty_columns


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; `level` 1 is the title of the document."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; every row is as long as the header, in which a `FigureHeading` marks a column of figures."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as an SVG file, and as lines of text."""

    title: str
    description: str
    """The picture in words, for readers who cannot see it."""
    draw: Callable[[], str]
    """Returns the SVG file; needs matplotlib, and takes a second at the first call."""
    lines: tuple[str, ...] = ()
    """Empty for a picture whose figures stand in a table."""


@dataclass(frozen=True, slots=True)
class Code:
    """Text to copy as it is, under a title."""

    title: str
    text: str


Block = Heading | Prose | Listing | Grid | Picture | Code


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report."""

    title: str
    blocks: tuple[Block, ...]


def filled_grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Grid:
    """Return a table without its empty columns; the first column stays."""
    filled_header, filled_rows = without_empty_columns(header, rows)
    return Grid(tuple(filled_header), tuple(map(tuple, filled_rows)))


def as_blocks(picture: Picture | None) -> tuple[Picture, ...]:
    """Return the picture to unpack among blocks; nothing if there is none."""
    return () if picture is None else (picture,)


def pairs_grid(label: str, rows: Iterable[tuple[str, str]]) -> Grid:
    """Return a table of `label` and value; a row without a label belongs to the row above."""
    return Grid((label, ""), tuple(rows))


def left_out_words(picture: Picture) -> str:
    """Return the sentence in place of a picture that the form does not show."""
    return f"Picture left out: {picture.title}. Its figures are in the tables."
