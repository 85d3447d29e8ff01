"""A report as one HTML page: it runs no script and loads nothing."""

from __future__ import annotations

from html import escape

from trainfast_tui.report.blocks import Block, Code, Document, Grid, Heading, Listing, Picture, Prose
from trainfast_tui.report.page_style import STYLE_SHEET
from trainfast_tui.text.format import plain
from trainfast_tui.text.tables import FigureHeading

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content security policy: a browser runs no script of the page and fetches nothing for it."""


def as_html(document: Document) -> str:
    """Return the page; every text in it is escaped."""
    body = "\n".join(_block(block, number) for number, block in enumerate(document.blocks))
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
            body,
            "</body>",
            "</html>",
            "",
        ]
    )


def _block(block: Block, number: int) -> str:
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
            return _picture(block, number)
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


def _picture(block: Picture, number: int) -> str:
    """Return a figure; `number` makes the ids of its texts unique on the page."""
    title, description = f"title-{number}", f"description-{number}"
    return (
        f"<figure><figcaption>{_text(block.title)}</figcaption>"
        f'<svg viewBox="0 0 {block.width} {block.height}" role="img" aria-labelledby="{title} {description}">'
        f'<title id="{title}">{_text(block.title)}</title>'
        f'<desc id="{description}">{_text(block.description)}</desc>{block.body}</svg></figure>'
    )


def _text(text: str) -> str:
    return escape(plain(text))
