"""Filters of every line of the screen, for terminals without Unicode and for people without colours."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from trainfast_tui.text.ascii import to_ascii


class AsciiFilter(LineFilter):
    """Replace signs outside ASCII by their likeness."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the same segments in ASCII."""
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


class NoHueFilter(LineFilter):
    """Leave the terminal's own two colours; a background of its own becomes reverse."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the same segments without colours."""
        return [Segment(text, _without_hue(style), control) for text, style, control in segments]


@lru_cache(maxsize=1024)
def _without_hue(style: Style | None) -> Style | None:
    if style is None:
        return None
    is_filled = style.bgcolor is not None and not style.bgcolor.is_default
    return style.without_color + Style(reverse=bool(style.reverse) or is_filled)
