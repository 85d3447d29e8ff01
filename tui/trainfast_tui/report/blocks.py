"""A report as blocks of plain text, and its two forms. No block holds markup: each form escapes every text."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from trainfast_tui.report import pictures
from trainfast_tui.report.pictures import Picture
from trainfast_tui.text.format import FigureHeading, plain, without_empty_columns


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


def pairs_grid(rows: Iterable[tuple[str, str]]) -> Grid:
    """Return a table of labels and values; a row without a label belongs to the row above."""
    return Grid(("", ""), tuple(rows))


STYLE_SHEET = """
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; color: #1b1f24 }
h2 { margin-top: 2.2rem; border-bottom: 1px solid #d1d9e0 }
table, pre { display: block; overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid #d1d9e0 }
figcaption { font-weight: 600 }
img { width: 100% }
"""
SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The content security policy: a browser runs no script of the page and fetches nothing for it."""
NO_PICTURES = "Pictures need matplotlib: pip install 'trainfast-tui[report]'."


def as_html(document: Document) -> str:
    """Return the page: the Markdown of each block, rendered, and pictures inside the page; every text is escaped."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    title = escape(plain(document.title))
    body = "\n".join(
        _figure(block)
        if isinstance(block, Picture) and pictures.can_draw()
        else markdown.render(_markdown_block(block))
        for block in document.blocks
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(SECURITY_POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE_SHEET}</style>
</head>
<body>
<h1>{title}</h1>
{"" if pictures.can_draw() else f"<p>{escape(NO_PICTURES)}</p>"}
{body}
</body>
</html>
"""


def _figure(picture: Picture) -> str:
    """Return the picture inside the page, with its description for who cannot see it."""
    data = b64encode(pictures.as_svg(picture).encode()).decode()
    title, description = escape(plain(picture.title)), escape(plain(picture.description))
    image = f'<img alt="{description}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><figcaption>{title}</figcaption>{image}</figure>"


_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
"""Signs that begin a code span, emphasis, a link, an image, a cell or a formula; not the _ inside batch_size."""
_OPENING = re.compile(r"^([#+=-])|^(\d+)([.)])")
"""Signs that make a heading or a list of a line."""


def as_markdown(document: Document) -> str:
    """Return the text; markup in the names and outputs of runs is escaped."""
    blocks = [f"# {_cell(document.title)}", *map(_markdown_block, document.blocks)]
    return "\n\n".join(blocks) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_cell(block.text)}"
        case Prose():
            return _line(block.text)
        case Listing():
            return "\n".join(f"- {_line(item)}" for item in block.items)
        case Grid():
            rule = ["---:" if isinstance(heading, FigureHeading) else "---" for heading in block.header]
            rows = [map(_cell, block.header), rule, *(map(_cell, row) for row in block.rows)]
            return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
        case Picture():
            return f"**{_cell(block.title)}**: {_cell(block.description)}"
        case Code():
            lines = list(map(plain, block.text.splitlines()))
            # The fence is longer than any in the text.
            longest = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
            fence = "`" * max(3, longest + 1)
            return "\n".join([_line(block.title), "", f"{fence}text", *lines, fence])


def _cell(text: str) -> str:
    text = "".join(_ENTITIES.get(sign, sign) for sign in plain(text))
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", text)


def _line(text: str) -> str:
    """Return a line that begins neither a heading nor a list."""
    return _OPENING.sub(lambda match: f"\\{match[1]}" if match[1] else f"{match[2]}\\{match[3]}", _cell(text))
