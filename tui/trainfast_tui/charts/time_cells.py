"""The time axis that all charts of a column share, in cells."""

from dataclasses import dataclass

from trainfast_tui.charts.braille import X_BITS


@dataclass(frozen=True, slots=True)
class TimeCells:
    """The time of each cell, for all widgets of one width and gutter."""

    gutter: int
    """Cells left of the axis; 0 if there is no room for it."""
    count: int
    start_ns: int
    cell_ns: int

    def at(self, t_ns: int) -> int:
        """Return the cell of a moment; outside 0 to `count` - 1 it is not on the axis."""
        return (t_ns - self.start_ns) // self.cell_ns


def time_cells(width: int, gutter: int, t_min_ns: int, t_max_ns: int) -> TimeCells:
    """Return the axis of a chart `width` cells wide; times are CLOCK_MONOTONIC."""
    gutter = gutter if width >= gutter + 10 else 0
    count = max(1, width - gutter)
    column_ns = max(1, -(-(t_max_ns - t_min_ns) // (count << X_BITS)))
    # Whole cells of absolute time: the picture then moves by characters and not by dots.
    cell_ns = column_ns << X_BITS
    return TimeCells(gutter, count, (t_max_ns // cell_ns - count + 1) * cell_ns, cell_ns)
