"""A report as blocks of Markdown, and the page that is made of them. A block escapes every text: no markup of a run."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from trainfast_tui.report import pictures
from trainfast_tui.report.pictures import Picture
from trainfast_tui.text.format import FigureHeading, plain, without_empty_columns

Block = str | Picture
"""Markdown, whose texts are escaped; or a picture, of which Markdown has the description."""


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report."""

    title: str
    blocks: tuple[Block, ...]


def heading(text: str, level: int = 2) -> str:
    """Return a heading; level 1 is the title of the document."""
    return f"{'#' * level} {_cell(text)}"


def prose(text: str) -> str:
    """Return a paragraph, which begins neither a heading nor a list."""
    return _OPENING.sub(lambda match: f"\\{match[1]}" if match[1] else f"{match[2]}\\{match[3]}", _cell(text))


def listing(items: Iterable[str]) -> str:
    """Return a list of sentences."""
    return "\n".join(f"- {prose(item)}" for item in items)


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table without its empty columns; a `FigureHeading` marks a column of figures."""
    header, filled_rows = without_empty_columns(header, rows)
    rule = ["---:" if isinstance(name, FigureHeading) else "---" for name in header]
    lines = [map(_cell, header), rule, *(map(_cell, row) for row in filled_rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def pairs_grid(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of labels and values; a row without a label belongs to the row above."""
    return grid(("", ""), rows)


def code(title: str, text: str) -> str:
    """Return text to copy as it is, under a title."""
    lines = list(map(plain, text.splitlines()))
    # The fence is longer than any in the text.
    longest = max((len(ticks) for line in lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([prose(title), "", f"{fence}text", *lines, fence])


_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
"""Signs that begin a code span, emphasis, a link, an image, a cell or a formula; not the _ inside batch_size."""
_OPENING = re.compile(r"^([#+=-])|^(\d+)([.)])")
"""Signs that make a heading or a list of a line."""


def _cell(text: str) -> str:
    text = "".join(_ENTITIES.get(sign, sign) for sign in plain(text))
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", text)


def as_markdown(document: Document) -> str:
    """Return the text."""
    blocks = [heading(document.title, 1), *map(_markdown_of, document.blocks)]
    return "\n\n".join(blocks) + "\n"


def _markdown_of(block: Block) -> str:
    return block if isinstance(block, str) else f"**{_cell(block.data.title)}**: {_cell(block.description)}"


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
    """Return the page: the Markdown of each block, rendered, and pictures inside the page."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    title = escape(plain(document.title))
    body = "\n".join(
        _figure(block) if isinstance(block, Picture) and pictures.can_draw() else markdown.render(_markdown_of(block))
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
    title, description = escape(plain(picture.data.title)), escape(plain(picture.description))
    image = f'<img alt="{description}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><figcaption>{title}</figcaption>{image}</figure>"
