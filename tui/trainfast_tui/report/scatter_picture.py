"""Points of two figures as a picture, with lines through or beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainfast_tui.charts.y_range import nice_ceiling
from trainfast_tui.report.blocks import Picture
from trainfast_tui.report.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    Scale,
    element,
    round_ticks,
    tooltip,
    with_legend,
)
from trainfast_tui.text.format import Formatter, number

PICTURE_HEIGHT = 340
SIGN_PATHS = {
    "dot": "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1 -4 0Z",
    "ring": "M-6 0A6 6 0 1 1 6 0A6 6 0 1 1 -6 0Z",
    "cross": "M-4 -4L4 4M-4 4L4 -4",
    "square": "M-4 -4H4V4H-4Z",
    "triangle": "M0 -5L5 4H-5Z",
}
"""Points of one kind have one sign: no kind is known by its colour alone."""
OPEN_SIGNS = ("ring", "cross")


@dataclass(frozen=True, slots=True)
class PointKind:
    """A kind of points."""

    words: str
    """The meaning of a point of this kind."""
    sign: str
    """A key of `SIGN_PATHS`."""
    tone: str


ON_FRONT = PointKind("on the front", "dot", "primary")
BEHIND_FRONT = PointKind("behind the front", "ring", "muted")


@dataclass(frozen=True, slots=True)
class PicturePoint:
    """A point of two figures."""

    x: float
    y: float
    kind: PointKind
    words: str
    """Name the point under the pointer and in the description."""


@dataclass(frozen=True, slots=True)
class ScatterLine:
    """A line through points, or a limit along an axis."""

    points: tuple[tuple[float, float], ...]
    words: str
    """The words of the legend."""
    class_: str
    """The classes of the style sheet that give tone and dashes."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from zero."""

    title: str
    """The title with the unit."""
    format_value: Formatter = number
    """Formats the ticks."""
    binary: bool = False
    """Put the ticks at multiples of a power of two, for bytes."""


def scatter_picture(
    title: str, points: Sequence[PicturePoint], lines: Sequence[ScatterLine], x_axis: Axis, y_axis: Axis
) -> Picture | None:
    """Return the picture; None without a point."""
    if not points:
        return None
    ends = [(point.x, point.y) for point in points] + [end for line in lines for end in line.points]
    right = nice_ceiling(1.05 * max(max(x for x, _ in ends), 1e-9), binary=x_axis.binary)
    top = nice_ceiling(1.05 * max(max(y for _, y in ends), 1e-9), binary=y_axis.binary)
    x, y = Scale(0, right, LEFT, WIDTH - RIGHT - 24), Scale(0, top, PICTURE_HEIGHT - BOTTOM, TOP)
    axes = Axes(
        x,
        y,
        [(value, x_axis.format_value(value)) for value in round_ticks(0, right, binary=x_axis.binary)],
        [(value, y_axis.format_value(value)) for value in round_ticks(0, top, binary=y_axis.binary)],
        x_axis.title,
        y_axis.title,
    )
    body = [axes.markup()]
    for line in lines:
        path = "M" + "L".join(f"{x.at(x_value):.1f} {y.at(y_value):.1f}" for x_value, y_value in line.points)
        body.append(element("path", tooltip(line.words), d=path, class_=f"line {line.class_}"))
    body += [_sign(point.kind, point.words, x.at(point.x), y.at(point.y)) for point in points]
    kinds = dict.fromkeys(point.kind for point in points)
    entries = [(_sign(kind, kind.words, 9, 0), kind.words) for kind in kinds]
    entries += [(element("path", d="M0 0H18", class_=f"line {line.class_}"), line.words) for line in lines]
    words = " ".join(f"{point.words}." for point in points)
    markup, legend_height = with_legend("".join(body), entries)
    return Picture(title, words, markup, WIDTH, PICTURE_HEIGHT + legend_height)


def _sign(kind: PointKind, words: str, x: float, y: float) -> str:
    class_ = f"{'ring' if kind.sign in OPEN_SIGNS else 'dot'} {kind.tone}"
    position = f"translate({x:.1f} {y:.1f})"
    return element("path", tooltip(words), d=SIGN_PATHS[kind.sign], class_=class_, transform=position)
