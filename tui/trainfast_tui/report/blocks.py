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
.wide, pre { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid #d1d9e0 }
.figure { text-align: right; font-variant-numeric: tabular-nums }
td.figure { white-space: nowrap }
figcaption { font-weight: 600 }
img { width: 100% }
"""
SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The content security policy: a browser runs no script of the page and fetches nothing for it."""
NO_PICTURES = "Pictures need matplotlib: pip install 'trainfast-tui[report]'."


def as_html(document: Document) -> str:
    """Return the page; every text in it is escaped."""
    notice = "" if pictures.can_draw() else f"<p>{_text(NO_PICTURES)}</p>"
    body = "\n".join(map(_html_block, document.blocks))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(SECURITY_POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(document.title)}</title>
<style>{STYLE_SHEET}</style>
</head>
<body>
<h1>{_text(document.title)}</h1>
{notice}
{body}
</body>
</html>
"""


def _html_block(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{_text(block.text)}</h{block.level}>"
        case Prose():
            return f"<p>{_text(block.text)}</p>"
        case Listing():
            return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
        case Grid():
            return _html_grid(block)
        case Picture():
            return _html_picture(block)
        case Code():
            text = "\n".join(map(plain, block.text.splitlines()))
            return f"<details><summary>{_text(block.title)}</summary><pre>{escape(text)}</pre></details>"


def _html_grid(block: Grid) -> str:
    marks = [' class="figure"' if isinstance(heading, FigureHeading) else "" for heading in block.header]

    def row(tag: str, cells: Sequence[str]) -> str:
        marked = zip(marks, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{mark}>{_text(cell)}</{tag}>" for mark, cell in marked) + "</tr>"

    rows = "\n".join(row("td", cells) for cells in block.rows)
    table = f"<table><thead>{row('th', block.header)}</thead>\n<tbody>{rows}</tbody></table>"
    # A wide table scrolls in its own box, by keyboard too.
    return f'<div class="wide" tabindex="0" role="region" aria-label="table">{table}</div>'


def _html_picture(block: Picture) -> str:
    """Return the picture inside the page, or without matplotlib its description."""
    shown = f"<p>{_text(block.description)}</p>"
    if pictures.can_draw():
        data = b64encode(pictures.as_svg(block).encode()).decode()
        shown = f'<img alt="{_text(block.description)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><figcaption>{_text(block.title)}</figcaption>{shown}</figure>"


def _text(text: str) -> str:
    return escape(plain(text))


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
