"""Elements of a picture, and the frame that its axes share. Lengths are in the units of the view box."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from trainfast_tui.text.format import plain

WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 92, 16, 30, 46
"""The margins around a plot: left for the labels of the y axis, top for the legend, bottom for those of the x axis."""
SIGN_WIDTH, LEGEND_ROW_HEIGHT = 23, 20
"""The width of a sign of the legend with its gap, and the height of a row of the legend."""
LETTER_WIDTH = 6.6
"""The mean width of a letter at 12 px."""


def element(name: str, content: str = "", **attributes: str | float) -> str:
    """Return an element with markup inside; `stroke_width` becomes `stroke-width`, `class_` `class`.

    An empty attribute is left out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute_text(value))}"'
        for key, value in attributes.items()
        if value != ""
    )
    return f"<{name}{shown}>{content}</{name}>"


def label(text: str, x: float, y: float, class_: str = "", **attributes: str | float) -> str:
    """Return a text element; the text is escaped."""
    return element("text", escape(plain(text)), x=x, y=y, class_=class_, **attributes)


def tooltip(text: str) -> str:
    """Return the title of an enclosing element, which a browser shows under the pointer."""
    return element("title", escape(plain(text)))


def _attribute_text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from `low` to `high` to positions from `start` to `end`; values outside go to the edge."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the position of a value."""
        fraction = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return self.start + min(1.0, max(0.0, fraction)) * (self.end - self.start)


def round_ticks(low: float, high: float, *, binary: bool = False) -> list[float]:
    """Return round values from `low` to `high`, at most six; of bytes they are multiples of a power of two."""
    min_step = max((high - low) / 5, sys.float_info.min)
    base = 2.0 if binary else 10.0
    unit = base ** math.floor(math.log(min_step, base))
    step = next(
        unit * factor for factor in ((1, 2) if binary else (1, 2, 5, 10)) if unit * factor >= min_step * (1 - 1e-9)
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Axes:
    """Both axes of a plot."""

    x: Scale
    y: Scale
    x_ticks: Sequence[tuple[float, str]]
    """Values with their labels, as in `y_ticks`."""
    y_ticks: Sequence[tuple[float, str]]
    x_title: str
    """The title with the unit, as `y_title`."""
    y_title: str

    def markup(self) -> str:
        """Return the lines, labels and titles."""
        bottom, left = self.y.start, self.x.start
        parts = [
            element("line", x1=left, y1=self.y.at(value), x2=self.x.end, y2=self.y.at(value), class_="tick")
            + label(text, left - 6, self.y.at(value) + 4, "end note")
            for value, text in self.y_ticks
        ]
        parts += [
            element("line", x1=self.x.at(value), y1=bottom, x2=self.x.at(value), y2=bottom + 4, class_="axis")
            + label(text, self.x.at(value), bottom + 17, "middle note")
            for value, text in self.x_ticks
        ]
        parts.append(element("path", d=f"M{left} {self.y.end}V{bottom}H{self.x.end}", class_="axis"))
        middle = (self.y.end + bottom) / 2
        parts.append(label(self.x_title, (left + self.x.end) / 2, bottom + 36, "middle"))
        parts.append(label(self.y_title, 14, middle, "middle", transform=f"rotate(-90 14 {middle:.1f})"))
        return "".join(parts)


def with_legend(body: str, entries: Iterable[tuple[str, str]]) -> tuple[str, int]:
    """Return the picture with a legend in its top margin, and the height that its further rows add.

    An entry is a sign (markup around 0 0, 18 wide) with its words.
    """
    parts, x, y = [], float(LEFT), 0
    for sign, words in entries:
        entry_width = SIGN_WIDTH + LETTER_WIDTH * len(words) + 18
        if x > LEFT and x + entry_width > WIDTH:
            x, y = float(LEFT), y + LEGEND_ROW_HEIGHT
        parts.append(
            element("g", sign, transform=f"translate({x:.1f} {y + 14})") + label(words, x + SIGN_WIDTH, y + 18)
        )
        x += entry_width
    return "".join(parts) + element("g", body, transform=f"translate(0 {y})"), y
