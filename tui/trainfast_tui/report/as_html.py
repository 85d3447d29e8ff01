"""A report as one HTML page: it runs no script and loads nothing."""

from __future__ import annotations

from base64 import b64encode
from html import escape

from trainfast_tui.report.blocks import Block, Code, Document, Grid, Heading, Listing, Picture, Prose, left_out_words
from trainfast_tui.report.page_style import STYLE_SHEET
from trainfast_tui.report.pictures import can_draw
from trainfast_tui.text.format import plain
from trainfast_tui.text.tables import FigureHeading

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The content security policy: a browser runs no script of the page and fetches nothing for it."""

NO_PICTURES = "Pictures need matplotlib: pip install 'trainfast-tui[report]'."


def as_html(document: Document) -> str:
    """Return the page; every text in it is escaped."""
    body = "\n".join(map(_block, document.blocks))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(SECURITY_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(document.title)}</title>",
            f"<style>{STYLE_SHEET}</style>",
            "</head>",
            "<body>",
            f"<h1>{_text(document.title)}</h1>",
            *([] if can_draw() else [f"<p>{_text(NO_PICTURES)}</p>"]),
            body,
            "</body>",
            "</html>",
            "",
        ]
    )


def _block(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{_text(block.text)}</h{block.level}>"
        case Prose():
            return f"<p>{_text(block.text)}</p>"
        case Listing():
            return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
        case Grid():
            return _grid(block)
        case Picture():
            return _picture(block)
        case Code():
            text = "\n".join(plain(line) for line in block.text.splitlines())
            return f"<details><summary>{_text(block.title)}</summary><pre>{escape(text)}</pre></details>"


def _grid(block: Grid) -> str:
    marks = [' class="figure"' if isinstance(heading, FigureHeading) else "" for heading in block.header]
    head = "".join(
        f'<th scope="col"{mark}>{_text(heading)}</th>' for mark, heading in zip(marks, block.header, strict=True)
    )
    rows = "\n".join(
        "<tr>" + "".join(f"<td{mark}>{_text(cell)}</td>" for mark, cell in zip(marks, row, strict=True)) + "</tr>"
        for row in block.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"
    # A wide table scrolls in its own box, by keyboard too.
    return f'<div class="wide" tabindex="0" role="region" aria-label="table">{table}</div>'


def _picture(block: Picture) -> str:
    """Return a figure: the picture inside the page, or without matplotlib its lines of text."""
    if can_draw():
        data = b64encode(block.draw().encode()).decode()
        shown = f'<img alt="{_text(block.description)}" src="data:image/svg+xml;base64,{data}">'
    elif block.lines:
        shown = f"<pre>{escape(chr(10).join(map(plain, block.lines)))}</pre>"
    else:
        return f"<p>{_text(left_out_words(block))}</p>"
    return f"<figure><figcaption>{_text(block.title)}</figcaption>{shown}</figure>"


def _text(text: str) -> str:
    return escape(plain(text))
