"""A filter that translates every line of the screen for a terminal without Unicode."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from trainfast_tui.text.ascii import to_ascii


class AsciiFilter(LineFilter):
    """Replace signs outside ASCII by their likeness."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the same segments in ASCII."""
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]
