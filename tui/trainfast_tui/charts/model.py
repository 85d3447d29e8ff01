"""What a chart shows: series over time, throttled time, limits. Nothing here draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.style import Style

from trainfast_tui.text.format import Formatter, number

Tone = Literal["primary", "secondary", "accent", "success", "warning", "error"]
"""The theme colour of a series."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. The first of a chart is drawn solid and in front, the later ones dotted."""

    name: str
    times_ns: Sequence[int]
    """Ascending, on the clock of the chart's window. A list, tuple or array: it is sliced and bisected."""
    values: Sequence[float | None]
    """One for each time; None, NaN and infinities are absent readings."""
    tone: Tone = "primary"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of throttled time, drawn shaded and marked by the first letter of its kind."""

    start_ns: int
    end_ns: int | None
    """None while it lasts."""
    kind: str
    """For example `thermal` (T) or `power` (P)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line at `value`, in the unit of the series."""

    value: float
    label: str
    stretch: bool = True
    """Whether the y range reaches up to it; otherwise it shows only when the data comes near."""


@dataclass(frozen=True, slots=True)
class ChartData:
    """All that one frame of a chart shows."""

    title: str
    series: tuple[Series, ...]
    t_min_ns: int
    t_max_ns: int
    gap_ns: int
    """Two samples further apart than this are not joined."""
    unit: Formatter = number
    spans: tuple[Span, ...] = ()
    limits: tuple[Limit, ...] = ()
    y_min: float | None = 0.0
    """Where the y axis starts while the data stays above; None follows the data."""
    y_max: float | None = None
    """Where the y axis ends while the data stays below; None follows the data."""
    binary: bool = False
    """Round the ends of the y axis to powers of two, for bytes."""
    empty: str = "No samples yet."
    """The sentence shown while no series has a value in the window."""
    now_label: str = "now"
    """What the right end of the time axis is called."""
    cursor_ns: int | None = None
    """A moment that is marked by a vertical line."""


TONES: tuple[Tone, ...] = ("primary", "secondary", "accent", "success", "warning", "error")
PARTS = ("title", "axis", "limit", "empty", "mark")
Palette = Mapping[str, Style]
"""The style of every tone, part and shade, by name."""
