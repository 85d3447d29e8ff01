"""Turn the samples of a series into columns of time that keep their extremes; times are nanoseconds."""

import math
from bisect import bisect_left
from collections.abc import Sequence

ColumnRanges = list[tuple[float, float] | None]
"""The lowest and highest value of each dot column, oldest first; None is a gap."""


def time_columns(
    times_ns: Sequence[int],
    values: Sequence[float | None],
    start_ns: int,
    column_ns: int,
    count: int,
    gap_ns: int,
) -> ColumnRanges:
    """Return the extremes of `values` in each of `count` columns of `column_ns` from `start_ns` on.

    Columns between two neighbouring samples hold the straight line between them, unless a value between them
    is absent (None, NaN or infinite) or they lie more than `gap_ns` apart. `times_ns` must ascend.
    """
    columns: ColumnRanges = [None] * count
    end_ns = start_ns + count * column_ns
    # The sample before the window begins the line that enters it.
    first = max(0, bisect_left(times_ns, start_ns) - 1)
    last = bisect_left(times_ns, end_ns)
    isfinite = math.isfinite
    previous_column, previous_ns, previous_value = 0, 0, math.nan
    connected = False
    for time_ns, value in zip(times_ns[first:last], values[first:last], strict=False):
        if value is None or not isfinite(value):
            connected = False
            continue
        column = (time_ns - start_ns) // column_ns
        if column >= 0:
            bounds = columns[column]
            if bounds is None:
                columns[column] = (value, value)
            elif value < bounds[0]:
                columns[column] = (value, bounds[1])
            elif value > bounds[1]:
                columns[column] = (bounds[0], value)
        if connected and column > previous_column + 1 and time_ns - previous_ns <= gap_ns:
            slope = (value - previous_value) / (column - previous_column)
            for between in range(max(previous_column + 1, 0), column):
                level = previous_value + slope * (between - previous_column)
                columns[between] = (level, level)
        previous_column, previous_ns, previous_value = column, time_ns, value
        connected = True
    return columns


def extremes(columns: ColumnRanges) -> tuple[float, float] | None:
    """Return the lowest and highest value of all columns; None if all are gaps."""
    bounds = [column for column in columns if column is not None]
    return (min(low for low, _ in bounds), max(high for _, high in bounds)) if bounds else None
