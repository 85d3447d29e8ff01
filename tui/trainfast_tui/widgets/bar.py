"""Horizontal bars: the filled share of a whole, the parts of a stacked bar, and the room that their panels need."""

from collections.abc import Sequence

from trainfast_tui.text.lines import Line, Tone

MEASURED_SIGN = "━"
"""The sign of a measurement below the bar of its prediction."""
LONG_FORM_COLUMNS, LONG_FORM_LINES = 40, 34
"""The least columns of a panel in its long form, with title and legend, and the least lines of the screen."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float | None, width: int, tone: Tone = "primary") -> Line:
    """Return a bar of `width` cells, filled to a share that is clamped to 0..1; None fills none."""
    full, eighths = divmod(round(min(max(share or 0.0, 0.0), 1.0) * width * 8), 8)
    filled_cells = "█" * full + (_EIGHTHS[eighths] if eighths else "")
    return [(filled_cells, tone), ("·" * (width - len(filled_cells)), "muted")]


def stacked_cells(values: Sequence[float], width: int) -> list[int]:
    """Return the cells of each part of a stacked bar, `width` in sum.

    Every value above zero gets at least a cell while there is room; values that are all zero get none.
    """
    total = sum(values)
    if not total:
        return [0] * len(values)
    exact_cells = [value / total * width for value in values]
    cells = [max(1, int(part)) if part > 0 else 0 for part in exact_cells]
    by_rest = sorted(range(len(values)), key=lambda i: exact_cells[i] - cells[i], reverse=True)
    while sum(cells) < width:
        for index in by_rest:
            if exact_cells[index] > 0 and sum(cells) < width:
                cells[index] += 1
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    return cells


def has_long_form(width: int, screen_height: int) -> bool:
    """True if a panel of this width has room for its long form."""
    return width >= LONG_FORM_COLUMNS and screen_height >= LONG_FORM_LINES
