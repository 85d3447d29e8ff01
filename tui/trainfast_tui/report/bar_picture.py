"""Horizontal bars as a picture: parts stacked end to end, or a figure with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainfast_tui.charts.y_range import nice_ceiling
from trainfast_tui.report.blocks import Picture
from trainfast_tui.report.svg import (
    BOTTOM,
    LETTER_WIDTH,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    Scale,
    element,
    label,
    round_ticks,
    tooltip,
    with_legend,
)
from trainfast_tui.text.format import Formatter, truncate

ROW_HEIGHT, BAR_HEIGHT = 30, 20
BARS_LEFT = 210
"""The left margin: a label names a run and the meaning of the bar."""
LABEL_LETTERS = 29
"""The letters of a label that fit left of the bars."""


@dataclass(frozen=True, slots=True)
class StackedPart:
    """A part of a bar."""

    name: str
    value: float
    tone: str
    """The same in every bar for one name."""


@dataclass(frozen=True, slots=True)
class StackedBar:
    """A bar of parts."""

    label: str
    parts: tuple[StackedPart, ...]
    """Some of them may be zero."""
    words: str
    """The words at the end of the bar."""


@dataclass(frozen=True, slots=True)
class Whisker:
    """A figure with its interval."""

    label: str
    low: float
    """The lower end of the interval; the figure itself without one."""
    middle: float
    """The figure."""
    high: float
    """The upper end of the interval; the figure itself without one."""
    words: str
    tone: str = "primary"


def stacked_picture(
    title: str, x_title: str, bars: Sequence[StackedBar], format_value: Formatter, *, binary: bool = False
) -> Picture | None:
    """Return bars from zero to the sum of their parts as one picture; None if every bar is empty."""
    totals = [sum(part.value for part in bar.parts) for bar in bars]
    if not any(totals):
        return None
    # A fifth is left for the words at the end of the longest bar.
    right = nice_ceiling(1.25 * max(totals), binary=binary)
    x, axes = _axes(0.0, right, len(bars), x_title, format_value, binary=binary)
    body, sentences = [axes.markup()], []
    for row, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        top, begin = _top(row), 0.0
        body.append(_label(bar.label, top))
        for part in bar.parts:
            body.append(_part(part, x, begin, top, format_value) if part.value else "")
            begin += part.value
        body.append(label(bar.words, x.at(total) + 6, top + BAR_HEIGHT - 6))
        parts = ", ".join(f"{part.name} {format_value(part.value)}" for part in bar.parts if part.value)
        sentences.append(f"{bar.label}: {bar.words} ({parts}).")
    markup, legend_height = with_legend("".join(body), _swatches(bars))
    return Picture(title, " ".join(sentences), markup, WIDTH, _height(len(bars)) + legend_height)


def _swatches(bars: Sequence[StackedBar]) -> list[tuple[str, str]]:
    """Return the sign and name of each part that any bar has, in the order of the parts."""
    tones = {part.name: part.tone for bar in bars for part in bar.parts if part.value}
    names = dict.fromkeys(part.name for bar in bars for part in bar.parts if part.name in tones)
    return [(element("rect", x=0, y=-7, width=18, height=14, class_=f"fill {tones[name]}"), name) for name in names]


def _part(part: StackedPart, x: Scale, begin: float, top: float, format_value: Formatter) -> str:
    left, right = x.at(begin), x.at(begin + part.value)
    box = element(
        "rect",
        tooltip(f"{part.name} {format_value(part.value)}"),
        x=left,
        y=top,
        width=right - left,
        height=BAR_HEIGHT,
        class_=f"fill {part.tone}",
    )
    # The name stands inside where it fits: no part is known by its colour alone.
    fits = LETTER_WIDTH * len(part.name) + 6 <= right - left
    return box + (label(part.name, (left + right) / 2, top + BAR_HEIGHT - 6, "middle") if fits else "")


def whisker_picture(title: str, x_title: str, whiskers: Sequence[Whisker], format_value: Formatter) -> Picture | None:
    """Return a dot and an interval for each figure, on an axis that shows zero; None without any figure."""
    if not whiskers:
        return None
    low, high = min(0.0, *(whisker.low for whisker in whiskers)), max(0.0, *(whisker.high for whisker in whiskers))
    low, high = (-nice_ceiling(-1.05 * low) if low else 0.0), (nice_ceiling(1.25 * high) if high else 0.0)
    x, axes = _axes(low, high, len(whiskers), x_title, format_value)
    body = [axes.markup()]
    if low < 0 < high:
        body.append(element("line", x1=x.at(0), y1=TOP, x2=x.at(0), y2=axes.y.start, class_="axis"))
    for row, whisker in enumerate(whiskers):
        top = _top(row)
        middle = top + BAR_HEIGHT / 2
        body.append(_label(whisker.label, top))
        left, right = x.at(whisker.low), x.at(whisker.high)
        path = f"M{left:.1f} {middle - 5}V{middle + 5}M{left:.1f} {middle}H{right:.1f}"
        path += f"M{right:.1f} {middle - 5}V{middle + 5}"
        body.append(element("path", d=path, class_=f"line {whisker.tone}"))
        body.append(
            element(
                "circle",
                tooltip(f"{whisker.label}: {whisker.words}"),
                cx=x.at(whisker.middle),
                cy=middle,
                r=4,
                class_=f"dot {whisker.tone}",
            )
        )
        body.append(label(whisker.words, right + 8, middle + 4))
    words = " ".join(f"{whisker.label}: {whisker.words}." for whisker in whiskers)
    return Picture(title, words, "".join(body), WIDTH, _height(len(whiskers)))


def _axes(
    low: float, high: float, rows: int, x_title: str, format_value: Formatter, *, binary: bool = False
) -> tuple[Scale, Axes]:
    x = Scale(low, high, BARS_LEFT, WIDTH - RIGHT - 30)
    ticks = [(value, format_value(value)) for value in round_ticks(low, high, binary=binary)]
    return x, Axes(x, Scale(0, 1, _height(rows) - BOTTOM, TOP), ticks, [], x_title, "")


def _height(rows: int) -> int:
    return TOP + ROW_HEIGHT * rows + BOTTOM


def _top(row: int) -> float:
    return TOP + ROW_HEIGHT * row + (ROW_HEIGHT - BAR_HEIGHT) / 2


def _label(text: str, top: float) -> str:
    return label(truncate(text, LABEL_LETTERS), BARS_LEFT - 8, top + BAR_HEIGHT - 6, "end")
