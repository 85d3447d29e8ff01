"""The document of a report: of runs, or of one search with the runs that confirmed its answer."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import ascii_uppercase

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom import with_newer_explanation
from trainfast_runner.records.home import Home, is_conducted, search_directories
from trainfast_runner.running.settling import final_result
from trainfast_runner.search.batch_journal import BatchFollower
from trainfast_runner.search.best.answer import BestSoFar
from trainfast_runner.search.best_journal import read_best_journal
from trainfast_tui.report.blocks import Block, Code, Document, Grid, Heading, Listing, Picture, Prose, left_out_words
from trainfast_tui.report.pictures import STYLE_SHEET, can_draw
from trainfast_tui.report.run_blocks import ReportedRun, read_run, runs_report
from trainfast_tui.report.search_blocks import batch_search_report, best_search_report, confirming_run_ids
from trainfast_tui.text.format import FigureHeading, plain


def report_document(home: Home, references: Sequence[str]) -> tuple[Document, list[str]]:
    """Return the report of these runs, or of the one search, and the ids of the runs in it. Raises UserError."""
    searches = {directory.name: directory for directory in search_directories(home)}
    ids = list(dict.fromkeys(home.find(reference, list(searches)) for reference in references))
    search_ids = [listed_id for listed_id in ids if listed_id in searches]
    if search_ids and len(ids) > 1:
        raise UserError(
            "a report covers several runs or exactly one search", key=search_ids[0], advice=f"{search_ids[0]} alone"
        )
    if search_ids:
        return _search_document(home, searches[search_ids[0]])
    runs = _read_runs(home, ids)
    names = " and ".join(dict.fromkeys(run.result.name for run in runs))
    title = f"{names}: {ids[0]}" if len(runs) == 1 else f"{names}: {len(runs)} runs"
    return Document(title, tuple(runs_report(runs))), ids


def _search_document(home: Home, directory: Path) -> tuple[Document, list[str]]:
    """Return the report of a search of either kind, with the runs that confirmed its answer."""
    best, batch = BestSoFar(tuple(read_best_journal(directory))), BatchFollower(directory).poll()
    confirmed = confirming_run_ids(batch.answer if best.question is None else best.answer)
    run_ids = [run_id for run_id in confirmed if home.directory(run_id).is_dir()]
    runs = _read_runs(home, run_ids)
    if best.question is not None:
        kind, blocks = "Best-fit search", best_search_report(best, best.question, runs)
    elif batch.question is not None:
        kind, blocks = "Batch search", batch_search_report(batch, batch.question, runs)
    else:
        raise UserError(f"the journal of {directory.name} has no readable question", key=directory.name)
    if is_conducted(directory):
        blocks.insert(0, Prose("The search is still running: this is its journal so far."))
    return Document(f"{kind} {directory.name}", tuple(blocks)), run_ids


def _read_runs(home: Home, run_ids: Sequence[str]) -> list[ReportedRun]:
    """Return the runs with all their records, labelled A, B, C and so on; raises UserError if one is running."""
    runs = []
    for run_id, label in zip(run_ids, _labels(len(run_ids)), strict=True):
        directory = home.directory(run_id)
        result = with_newer_explanation(directory, final_result(home, run_id, "the report"))
        runs.append(read_run(label, directory, result))
    return runs


def _labels(count: int) -> list[str]:
    """Return A, B, C and so on, as in `runs compare`; numbers when there are more runs than letters."""
    return list(ascii_uppercase[:count]) if count <= len(ascii_uppercase) else [str(n) for n in range(1, count + 1)]


SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The content security policy: a browser runs no script of the page and fetches nothing for it."""

NO_PICTURES = "Pictures need matplotlib: pip install 'trainfast-tui[report]'."


def as_html(document: Document) -> str:
    """Return the page; every text in it is escaped."""
    body = "\n".join(map(_html_block, document.blocks))
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


def _html_block(block: Block) -> str:
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


_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
"""Signs that begin a code span, emphasis, a link, an image, a cell or a formula; not the _ inside batch_size."""
_OPENING = re.compile(r"^([#+=-])|^(\d+)([.)])")
"""Signs that make a heading or a list of a line."""


def as_markdown(document: Document) -> str:
    """Return the text; markup in the names and outputs of runs is escaped."""
    blocks = [f"# {_markdown_text(document.title)}", *(_markdown_block(block) for block in document.blocks)]
    return "\n\n".join(blocks) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_markdown_text(block.text)}"
        case Prose():
            return _escape_opening(_markdown_text(block.text))
        case Listing():
            return "\n".join(f"- {_escape_opening(_markdown_text(item))}" for item in block.items)
        case Grid():
            return _markdown_grid(block)
        case Picture(lines=()):
            return f"*{_markdown_text(left_out_words(block))}*"
        case Picture():
            return f"{_escape_opening(_markdown_text(block.title))}\n\n{_fenced(list(block.lines))}"
        case Code():
            return f"{_escape_opening(_markdown_text(block.title))}\n\n{_fenced(block.text.splitlines())}"


def _markdown_grid(block: Grid) -> str:
    rule = ["---:" if isinstance(heading, FigureHeading) else "---" for heading in block.header]
    rows = [map(_markdown_text, block.header), rule, *(map(_markdown_text, row) for row in block.rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _fenced(lines: list[str]) -> str:
    """Return a code block whose fence is longer than any in the text."""
    plain_lines = [plain(line) for line in lines]
    longest = max((len(ticks) for line in plain_lines for ticks in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *plain_lines, fence])


def _markdown_text(text: str) -> str:
    text = "".join(_ENTITIES.get(sign, sign) for sign in plain(text))
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", text)


def _escape_opening(text: str) -> str:
    """Return a line that begins neither a heading nor a list."""
    return _OPENING.sub(lambda match: f"\\{match[1]}" if match[1] else f"{match[2]}\\{match[3]}", text)
