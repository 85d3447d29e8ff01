"""Turn samples into dots: time columns that keep their extremes, a y range that does not flicker, rows of dots.

Nothing here knows Textual. Times are nanoseconds; a *dot column* is the narrowest slice of time drawn.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style

ColumnRanges = list[tuple[float, float] | None]
"""The lowest and highest value of each dot column, oldest first; None is a gap."""


X_BITS, Y_BITS = 1, 2
"""A cell is `2**X_BITS` dots wide and `2**Y_BITS` high."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of the left and of the right column (Unicode 16.0, chapter 21.1)."""
_MASKS = tuple(
    tuple(tuple(sum(column[top : bottom + 1]) for bottom in range(4)) for top in range(4)) for column in _DOTS
)
"""`_MASKS[x][top][bottom]`: the dots of column x of a cell from row `top` to row `bottom`."""
GLYPHS = (" ", *(chr(0x2800 + mask) for mask in range(1, 256)))
"""The character of every mask of dots."""


def time_columns(
    times_ns: Sequence[int],
    values: Sequence[float | None],
    start_ns: int,
    column_ns: int,
    count: int,
    gap_ns: int,
) -> ColumnRanges:
    """Return the extremes of `values` in each of `count` columns of `column_ns` from `start_ns` on.

    ColumnRanges between two neighbouring samples hold the straight line between them, unless a value between them
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
            held = columns[column]
            if held is None:
                columns[column] = (value, value)
            elif value < held[0]:
                columns[column] = (value, held[1])
            elif value > held[1]:
                columns[column] = (held[0], value)
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
    held = [column for column in columns if column is not None]
    return (min(low for low, _ in held), max(high for _, high in held)) if held else None


def draw(
    cells: bytearray,
    width: int,
    height: int,
    columns: ColumnRanges,
    y_range: tuple[float, float],
    *,
    first: int = 0,
    stride: int = 1,
) -> None:
    """Set the dots of one series in `cells` (row-major, `width` x `height` cells).

    Column i goes to dot column `first + i * stride`. Neighbouring columns are joined by a vertical line when
    `stride` is 1; a larger stride leaves a dotted line, so that two series differ without colour.
    Values outside `y_range` go to its edge.
    """
    low, high = y_range
    bottom_dot = (height << Y_BITS) - 1
    scale = bottom_dot / (high - low)
    x_mask, y_mask = (1 << X_BITS) - 1, (1 << Y_BITS) - 1
    x_bits, y_bits, masks = X_BITS, Y_BITS, _MASKS
    dot_width = width << x_bits
    before_top = before_bottom = -1
    for index, column in enumerate(columns):
        x = first + index * stride
        if column is None or not 0 <= x < dot_width:
            before_top = -1
            continue
        lowest, highest = column
        # Comparisons, not min() and max(): this loop is most of a chart's cost.
        dot = (highest - low) * scale + 0.5
        # NaN, which infinity makes in a chart of a single dot, goes to the bottom.
        top = bottom_dot - (int(dot) if 0 <= dot <= bottom_dot else bottom_dot if dot > bottom_dot else 0)
        bottom = top
        if lowest != highest:
            dot = (lowest - low) * scale + 0.5
            bottom = bottom_dot - (int(dot) if 0 <= dot <= bottom_dot else bottom_dot if dot > bottom_dot else 0)
        drawn_top, drawn_bottom = top, bottom
        if before_top >= 0 and stride == 1:
            if before_top - 1 > bottom:
                drawn_bottom = before_top - 1
            if before_bottom + 1 < top:
                drawn_top = before_bottom + 1
        before_top, before_bottom = top, bottom
        by_row = masks[x & x_mask]
        cell_top, cell_bottom = drawn_top >> y_bits, drawn_bottom >> y_bits
        at = cell_top * width + (x >> x_bits)
        if cell_top == cell_bottom:
            cells[at] |= by_row[drawn_top & y_mask][drawn_bottom & y_mask]
            continue
        cells[at] |= by_row[drawn_top & y_mask][y_mask]
        for _ in range(cell_top + 1, cell_bottom):
            at += width
            cells[at] |= by_row[0][y_mask]
        cells[at + width] |= by_row[0][drawn_bottom & y_mask]


LIMIT_HEADROOM = 1.06
"""End of an axis over the limit, so that a point above the limit shows."""
_DECIMAL_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_BINARY_STEPS = (1.0, 1.25, 1.5, 1.75, 2.0)


def nice_ceiling(value: float, *, binary: bool = False) -> float:
    """Return the least round number of at least `value` (> 0): a short decimal, or a short multiple of 2**n."""
    base = 2.0 if binary else 10.0
    unit = base ** math.floor(math.log(value, base))
    for step in _BINARY_STEPS if binary else _DECIMAL_STEPS:
        # Rounding may put a round value a hair above its own step.
        if step * unit >= value * (1 - 1e-12):
            return step * unit
    return base * unit


_LARGEST = 1e300


class YRange:
    """The range of a chart's y axis, in the data's unit; it grows at once and shrinks late.

    It shrinks only after the data used less than half of it for `shrink_after_ns` of the data's own time, so that
    the picture keeps its scale while values move.
    """

    def __init__(self, shrink_after_ns: int = 20_000_000_000) -> None:
        self.shrink_after_ns = shrink_after_ns
        self._range: tuple[float, float] | None = None
        self._roomy_since_ns: int | None = None

    def reset(self) -> None:
        """Forget the range; the next fit starts anew."""
        self._range = self._roomy_since_ns = None

    def fit(
        self,
        low: float,
        high: float,
        now_ns: int,
        *,
        y_min: float | None = 0.0,
        y_max: float | None = None,
        binary: bool = False,
    ) -> tuple[float, float]:
        """Return the range to draw data from `low` to `high` with, at the data's time `now_ns`.

        `y_min` and `y_max` are the ends of the range while the data stays inside; None follows the data.
        """
        low, high = max(-_LARGEST, min(low, _LARGEST)), max(-_LARGEST, min(high, _LARGEST))
        wanted, held = _round_range(low, high, y_min, y_max, binary), self._range
        if held is None or low < held[0] or high > held[1]:
            if held is not None:
                wanted = (min(wanted[0], held[0]), max(wanted[1], held[1]))
            self._roomy_since_ns, self._range = None, wanted
            return wanted
        length = held[1] - held[0]
        used = high - (low if y_min is None else min(low, y_min))
        if wanted[1] - wanted[0] >= length or used >= 0.5 * length:
            self._roomy_since_ns = None
        elif self._roomy_since_ns is None or now_ns < self._roomy_since_ns:
            self._roomy_since_ns = now_ns
        elif now_ns - self._roomy_since_ns >= self.shrink_after_ns:
            self._roomy_since_ns, self._range = None, wanted
            return wanted
        return held


def _round_range(
    low: float, high: float, y_min: float | None, y_max: float | None, binary: bool
) -> tuple[float, float]:
    """Return a range with round ends that holds the data and both fixed ends."""
    bottom = low if y_min is None else min(low, y_min)
    top = high if y_max is None else max(high, y_max)
    is_top_fixed = top == y_max and top > bottom
    if bottom == y_min and is_top_fixed:
        return bottom, top
    # A flat line needs a span, and one below the resolution of a float would divide by zero.
    span = top - bottom
    if span <= max(abs(top), abs(bottom)) * 1e-9 or span < 1e-250:
        span = abs(top) * 0.1 if abs(top) > 1e-200 else 1.0
    step = nice_ceiling(span, binary=binary)
    if bottom == y_min:
        return bottom, bottom + step
    grid = step / 8 if binary else step / 10
    bottom = math.floor(bottom / grid) * grid
    if is_top_fixed:
        return bottom, top
    top = math.ceil(top / grid) * grid
    return bottom, top if top > bottom else bottom + step


def styled_segments(text: list[str], keys: bytearray, styles: Sequence[Style | None]) -> list[Segment]:
    """Return one row in few segments; `styles[key]` is a cell's style, and key 0, a blank, takes its neighbour's."""
    segments: list[Segment] = []
    start, key = 0, keys[0]
    for cell in range(1, len(keys)):
        next_key = keys[cell]
        if next_key == key or not next_key:
            continue
        if not key:
            key = next_key
            continue
        segments.append(Segment("".join(text[start:cell]), styles[key]))
        start, key = cell, next_key
    segments.append(Segment("".join(text[start:]), styles[key]))
    return segments
