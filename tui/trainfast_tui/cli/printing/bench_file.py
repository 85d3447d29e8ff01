"""`bench -o FILE`: the table as Markdown, CSV, JSON or one HTML page, by the ending of the file's name."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import msgspec

from trainfast_runner.plain_text import escaped
from trainfast_runner.search.bench.table import Row, Table
from trainfast_runner.search.bench.variants import Bench
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_tui.cli.printing.bench_table import bench_columns, process_word, table_notes
from trainfast_tui.report.as_html import as_html
from trainfast_tui.report.as_markdown import as_markdown
from trainfast_tui.report.blocks import Block, Code, Document, Prose, filled_grid
from trainfast_tui.text.format import plain, with_sizes

CSV_FIGURES: dict[str, Callable[[Row], float | None]] = {
    "samples_per_s": lambda row: row.rate,
    "vs_baseline_percent": lambda row: row.vs_baseline_percent,
    "ci_low_percent": lambda row: row.interval_percent[0] if row.interval_percent is not None else None,
    "ci_high_percent": lambda row: row.interval_percent[1] if row.interval_percent is not None else None,
    "step_ms": lambda row: row.result.step_ms.p50 if row.result is not None else None,
    "peak_bytes": lambda row: row.peak_bytes,
    "published_samples_per_s": lambda row: row.published.get("samples_per_s"),
    "ratio": lambda row: row.ratio,
}
"""The figures of a row of the CSV, by the name of their column."""


def _csv(bench: Bench, table: Table, command: str) -> str:
    """Return the table as CSV: unrounded figures, empty if absent, and the knobs by which rows differ."""
    # A script's row has only the knobs that were asked for.
    knobs = [name for name in KNOBS_BY_NAME if len({row.knobs.get(name) for row in table.rows}) > 1]
    lines = io.StringIO()
    writer = csv.writer(lines)
    writer.writerow(["id", "baseline", "state", "reason", "run_id", "process", *CSV_FIGURES, *knobs])
    for row in table.rows:
        figures = ["" if (value := figure(row)) is None else value for figure in CSV_FIGURES.values()]
        knob_texts = [KNOBS_BY_NAME[name].text_of(row.knobs[name]) if name in row.knobs else "" for name in knobs]
        run_id = row.result.run_id if row.result is not None else ""
        is_baseline = int(row.id == table.baseline_id)
        words = [plain(row.id), is_baseline, row.state, plain(with_sizes(row.reason)), run_id, process_word(row)]
        writer.writerow([*words, *figures, *knob_texts])
    return lines.getvalue()


def _json(bench: Bench, table: Table, command: str) -> str:
    return escaped(msgspec.json.encode(table.fields()).decode()) + "\n"


def bench_markdown(bench: Bench, table: Table, command: str) -> str:
    """Return the table as Markdown, with the command that makes it again and notes for the reader."""
    return as_markdown(_document(bench, table, Code("The command of this table:", command)))


def _html(bench: Bench, table: Table, command: str) -> str:
    """Return the same as one HTML page, which loads nothing and runs no script."""
    return as_html(_document(bench, table, Prose(command)))


def _document(bench: Bench, table: Table, command: Block) -> Document:
    columns = bench_columns(bench, table)
    grid = filled_grid(list(columns), zip(*columns.values(), strict=True))
    return Document(bench.title, (command, grid, *map(Prose, table_notes(table))))


WRITERS: dict[str, Callable[[Bench, Table, str], str]] = {
    ".md": bench_markdown,
    ".csv": _csv,
    ".json": _json,
    ".html": _html,
}
"""The writer for each ending of a file name."""
