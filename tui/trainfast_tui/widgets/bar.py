"""The cells of horizontal bars: how much of a whole is filled, and the parts of a stacked bar."""

import math
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar_runs(fraction: float | None, width: int, marker: float | None = None) -> list[tuple[str, str]]:
    """Return the bar alone, `width` cells, as (text, part) runs; parts are `fill`, `track` and `marker`.

    `fraction` and `marker` are shares of the whole width, held to 0..1; None or NaN draws none.
    """
    if width <= 0:
        return []
    share = 0.0 if fraction is None or math.isnan(fraction) else min(max(fraction, 0.0), 1.0)
    full, rest = divmod(round(share * width * 8), 8)
    cells = "█" * full + (_EIGHTHS[rest] if rest else "")
    filled = len(cells)
    cells += "·" * (width - filled)
    parts = ["fill"] * filled + ["track"] * (width - filled)
    if marker is not None and not math.isnan(marker):
        at = min(int(min(max(marker, 0.0), 1.0) * width), width - 1)
        cells = cells[:at] + "┃" + cells[at + 1 :]
        parts[at] = "marker"
    runs: list[tuple[str, str]] = []
    start = 0
    for cell in range(1, width + 1):
        if cell == width or parts[cell] != parts[start]:
            runs.append((cells[start:cell], parts[start]))
            start = cell
    return runs


def shares(values: Sequence[float], width: int) -> list[int]:
    """Return the cells of each part of a stacked bar, `width` in sum.

    Every value above zero gets at least a cell while there is room; values that are all zero get none.
    """
    total = sum(values)
    if not total:
        return [0] * len(values)
    exact = [value / total * width for value in values]
    cells = [max(1, int(part)) if part > 0 else 0 for part in exact]
    by_rest = sorted(range(len(values)), key=lambda i: exact[i] - cells[i], reverse=True)
    while sum(cells) < width:
        for place in by_rest:
            if exact[place] > 0 and sum(cells) < width:
                cells[place] += 1
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    return cells
