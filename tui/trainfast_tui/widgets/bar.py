"""A horizontal bar of one line: memory or utilization, with its figure as text beside it."""

import math
from collections.abc import Sequence
from typing import Literal

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from trainfast_tui.charts.braille import ink
from trainfast_tui.text.format import fit, plain, to_ascii

BarTone = Literal["normal", "warning", "error"]
_EIGHTHS = " ▏▎▍▌▋▊▉"
_PARTS = ("normal", "warning", "error", "track", "marker", "label")


def bar_runs(
    fraction: float | None, width: int, marker: float | None = None, *, ascii: bool = False
) -> list[tuple[str, str]]:
    """The bar alone, `width` cells, as (text, part) runs; parts are `fill`, `track` and `marker`.

    `fraction` and `marker` are shares of the whole width, held to 0..1; None or NaN draws none.
    """
    if width <= 0:
        return []
    share = 0.0 if fraction is None or math.isnan(fraction) else min(max(fraction, 0.0), 1.0)
    if ascii:
        full, rest = round(share * width), 0
    else:
        full, rest = divmod(round(share * width * 8), 8)
    empty = "." if ascii else "·"
    cells = ("#" if ascii else "█") * full + (_EIGHTHS[rest] if rest else "")
    filled = len(cells)
    cells += empty * (width - filled)
    parts = ["fill"] * filled + ["track"] * (width - filled)
    if marker is not None and not math.isnan(marker):
        at = min(int(min(max(marker, 0.0), 1.0) * width), width - 1)
        cells = cells[:at] + ("|" if ascii else "┃") + cells[at + 1 :]
        parts[at] = "marker"
    runs: list[tuple[str, str]] = []
    start = 0
    for cell in range(1, width + 1):
        if cell == width or parts[cell] != parts[start]:
            runs.append((cells[start:cell], parts[start]))
            start = cell
    return runs


def shares(values: Sequence[float], width: int) -> list[int]:
    """Cells of each part of a stacked bar: their sum is `width`, and what is not zero gets at least one while there
    is room. Values that are all zero get none."""
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


class Bar(Widget):
    """A bar and, right of it, a label of `label_width` cells; the label carries the figure and its unit."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES = {f"bar--{part}" for part in _PARTS}
    DEFAULT_CSS = """
    Bar {
        height: 1; width: 1fr;
        .bar--normal { color: $text-primary; }
        .bar--warning { color: $text-warning; }
        .bar--error { color: $text-error; }
        .bar--track { color: $text-muted; }
        .bar--marker { color: $text-error; text-style: bold; }
    }
    """

    def __init__(
        self,
        *,
        label_width: int = 20,
        ascii: bool = False,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._label_width = label_width
        self._ascii = ascii
        self._shown: tuple[float | None, str, float | None, BarTone] = (None, "", None, "normal")
        self._palette: dict[str, Style] | None = None

    def show(
        self,
        fraction: float | None,
        label: str = "",
        *,
        marker: float | None = None,
        tone: BarTone = "normal",
    ) -> None:
        """Fill `fraction` (0..1, None when unknown) and mark `marker` (0..1), with the label at the right."""
        shown = (fraction, label, marker, tone)
        if shown != self._shown:
            self._shown = shown
            self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y or not width:
            return Strip.blank(width, Style.null())
        fraction, label, marker, tone = self._shown
        palette = self._styles()
        # On a narrow screen the figure is worth more than the picture.
        label_width = min(self._label_width, width)
        bar_width = max(0, width - label_width - 1)
        segments = [
            Segment(text, palette[tone if part == "fill" else part])
            for text, part in bar_runs(fraction, bar_width, marker, ascii=self._ascii)
        ]
        text = plain(label)
        text = fit(to_ascii(text) if self._ascii else text, label_width, "right")
        if self._ascii:
            text = to_ascii(text)
        segments.append(Segment(" " * (width - bar_width - label_width) + text, palette["label"]))
        return Strip(segments, width)

    def notify_style_update(self) -> None:
        """Forget the styles of the old theme."""
        self._palette = None
        super().notify_style_update()

    def _styles(self) -> dict[str, Style]:
        if self._palette is None:
            self._palette = {part: ink(self.get_component_rich_style(f"bar--{part}")) for part in _PARTS}
        return self._palette
