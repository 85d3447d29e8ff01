"""A report as Markdown: the same tables, charts over time as lines of block characters, other pictures left out."""

from __future__ import annotations

import re

from trainfast_tui.report.blocks import Block, Code, Document, Grid, Heading, Listing, Picture, Prose, left_out_words
from trainfast_tui.text.format import plain
from trainfast_tui.text.tables import FigureHeading

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
"""Signs that begin a code span, emphasis, a link, an image, a cell or a formula; not the _ inside batch_size."""
_OPENING = re.compile(r"^([#+=-])|^(\d+)([.)])")
"""Signs that make a heading or a list of a line."""


def as_markdown(document: Document) -> str:
    """Return the text; markup in the names and outputs of runs is escaped."""
    blocks = [f"# {_text(document.title)}", *(_block(block) for block in document.blocks)]
    return "\n\n".join(blocks) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_text(block.text)}"
        case Prose():
            return _escape_opening(_text(block.text))
        case Listing():
            return "\n".join(f"- {_escape_opening(_text(item))}" for item in block.items)
        case Grid():
            return _grid(block)
        case Picture(lines=()):
            return f"*{_text(left_out_words(block))}*"
        case Picture():
            return f"{_escape_opening(_text(block.title))}\n\n{_fenced(list(block.lines))}"
        case Code():
            return f"{_escape_opening(_text(block.title))}\n\n{_fenced(block.text.splitlines())}"


def _grid(block: Grid) -> str:
    rule = ["---:" if isinstance(heading, FigureHeading) else "---" for heading in block.header]
    rows = [map(_text, block.header), rule, *(map(_text, row) for row in block.rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _fenced(lines: list[str]) -> str:
    """Return a code block whose fence is longer than any in the text."""
    plain_lines = [plain(line) for line in lines]
    longest = max((len(ticks) for line in plain_lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *plain_lines, fence])


def _text(text: str) -> str:
    text = "".join(_ENTITIES.get(sign, sign) for sign in plain(text))
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", text)


def _escape_opening(text: str) -> str:
    """Return a line that begins neither a heading nor a list."""
    return _OPENING.sub(lambda match: f"\\{match[1]}" if match[1] else f"{match[2]}\\{match[3]}", text)
