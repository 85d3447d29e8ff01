"""Predictions of several runs as a table that prints each row once it is known."""

from __future__ import annotations

from collections.abc import Mapping

from trainfast_runner.memory.headroom import PredictedRow, RunToPredict, published_bytes
from trainfast_tui.cli.printing.output import GrowingTable, print_line
from trainfast_tui.text.format import ABSENT, count, delta, size
from trainfast_tui.text.memory_words import CATEGORY_WORDS, PHASE_WORDS, phase_words, short_category
from trainfast_tui.text.tables import FigureHeading, figure_headings

SIZE_CELLS, DIFFERENCE_CELLS, FITS_CELLS = len("1023 MiB"), len("+1023 MiB (+100.0 %)"), len("no, +1023 MiB")
"""The widest figures of their kind."""
PUBLISHED_COLUMNS = ("published", "difference")
"""The columns with published figures."""


class PredictionTable:
    """A row for each variant, in order, printed as soon as the rows before it are there."""

    def __init__(self, runs: list[RunToPredict]) -> None:
        self._names = [run.id for run in runs]
        self._left_out = () if any(run.published for run in runs) else PUBLISHED_COLUMNS
        self._printed = 0
        self._table: GrowingTable | None = None

    def is_next(self, index: int) -> bool:
        """True if the row at `index` is the next to print."""
        return index == self._printed

    def print_ready(self, rows: Mapping[int, PredictedRow]) -> None:
        """Print all rows that are ready."""
        table = self._table = self._table or self._new_table()
        while self._printed in rows:
            row = rows[self._printed]
            if row.error is not None:
                table.add_note(self._names[self._printed], row.error.line())
            else:
                table.add(_cells(row))
            self._printed += 1

    def _new_table(self) -> GrowingTable:
        parts = figure_headings(*map(short_category, CATEGORY_WORDS))
        header = ["variant", *figure_headings("predicted", "published", "difference"), *parts]
        header += ["peak in", "fits", FigureHeading("max batch")]
        name_cells, phase_cells = max(map(len, self._names)), max(map(len, PHASE_WORDS.values()))
        widths = [name_cells, *[SIZE_CELLS] * 2, DIFFERENCE_CELLS, *[SIZE_CELLS] * len(parts), phase_cells]
        widths += [FITS_CELLS, 0]
        return GrowingTable(header, widths, drop=(*reversed(parts), "peak in", "difference"), without=self._left_out)


def _cells(row: PredictedRow) -> list[str]:
    fit = row.fit
    assert fit is not None
    predicted = fit.predicted
    fits = ABSENT if fit.left_bytes is None else "yes" if fit.left_bytes >= 0 else f"no, +{size(-fit.left_bytes)}"
    published = published_bytes(row.run.published)
    return [
        row.run.id,
        size(predicted.total_bytes),
        ABSENT if published is None else size(published),
        delta(predicted.total_bytes, published, size) if published else ABSENT,
        *(size(value) if (value := predicted.category(name)) else ABSENT for name in CATEGORY_WORDS),
        phase_words(predicted.phase),
        "not here" if fit.refusal is not None else fits,
        ABSENT if fit.max_batch is None else count(fit.max_batch),
    ]


def print_notes(rows: list[PredictedRow]) -> None:
    """Print the runs that cannot run here, and the meaning of the published figures."""
    for row in rows:
        if row.fit is not None and row.fit.refusal is not None:
            print_line(f"{row.run.id} cannot run here: {row.fit.refusal.line()}")
    if unpublished := next((row.run.unpublished for row in rows if row.run.unpublished), ""):
        print_line(unpublished)
    if any("memory_mb" in row.run.published for row in rows):
        print_line("published memory_mb is NVML's figure for the device: it includes the CUDA context, kernels, memory")
        print_line("that the allocator keeps, and other processes; predicted is the peak of the tensors alone")
