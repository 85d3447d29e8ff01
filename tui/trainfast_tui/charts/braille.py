"""Draw columns of values as braille dots; a cell of the plot is a byte, one bit a dot."""

from trainfast_tui.charts.time_columns import ColumnRanges

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
        cell = cell_top * width + (x >> x_bits)
        if cell_top == cell_bottom:
            cells[cell] |= by_row[drawn_top & y_mask][drawn_bottom & y_mask]
            continue
        cells[cell] |= by_row[drawn_top & y_mask][y_mask]
        for _ in range(cell_top + 1, cell_bottom):
            cell += width
            cells[cell] |= by_row[0][y_mask]
        cells[cell + width] |= by_row[0][drawn_bottom & y_mask]
