"""A plot of signs in a frame, as lines of text: y labels at the left, the axes, and a line of x labels."""

from __future__ import annotations

from collections.abc import Mapping

from trainfast_tui.charts.braille import GLYPHS
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Piece, Tone, join_pieces

FRAME_COLUMNS, FRAME_ROWS = 2, 2
"""Cells of the frame beside the y labels, and lines of the frame with the x labels."""


class FramedPlot:
    """Signs of one cell each, put over the dots of a curve."""

    def __init__(self, dots: bytearray, width: int) -> None:
        """`dots` is drawn by `braille.draw`, in rows of `width` cells."""
        glyphs = [GLYPHS[mask] for mask in dots]
        self._signs = [glyphs[start : start + width] for start in range(0, len(glyphs), width)]
        self._tones: list[list[Tone]] = [["primary" if sign != " " else "text" for sign in row] for row in self._signs]
        self._width = width

    def put(self, row: int, column: int, sign: str, tone: Tone) -> None:
        """Put a sign into a cell, over any other."""
        self._signs[row][column], self._tones[row][column] = sign, tone

    def put_in_free_cells(self, row: int, sign: str, tone: Tone) -> None:
        """Put a sign into each empty cell of a row."""
        for column in range(self._width):
            if self._signs[row][column] == " ":
                self.put(row, column, sign, tone)

    def lines(self, gutter: int, y_labels: Mapping[int, Piece], x_labels: Line) -> list[Line]:
        """Return the plot in its frame, with the y labels by row in `gutter` cells and `x_labels` as the last line."""
        lines: list[Line] = []
        for row, (signs, tones) in enumerate(zip(self._signs, self._tones, strict=True)):
            text, tone = y_labels.get(row, ("", "muted"))
            label = fmt.to_width(text, gutter, "right")
            lines.append([(label, tone), (" │", "muted"), *join_pieces(zip(signs, tones, strict=True))])
        lines.append([(" " * gutter + " └", "muted"), ("─" * self._width, "muted")])
        return [*lines, x_labels]


def cell_at(share: float, cells: int) -> int:
    """Return the cell at this share of an axis of `cells` cells, clamped to its ends."""
    return min(cells - 1, max(0, int(share * (cells - 1) + 0.5)))
