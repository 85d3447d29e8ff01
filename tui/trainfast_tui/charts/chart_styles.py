"""The styles of a chart's parts."""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style

from trainfast_tui.painting.palettes import Palette
from trainfast_tui.text.lines import Tone
from trainfast_tui.text.shades import Shade


class ChartStyles:
    """The styles of one frame, from those of the tones; axis, limits and shades are never bold."""

    def __init__(self, palette: Palette) -> None:
        self._palette = palette
        self.title = palette["title"]
        self.mark = palette["warning"]
        """The style of the throttle marks and of the cursor."""
        self.axis = _thin(palette["muted"])
        self.limit = _thin(palette["error"])

    def series(self, tone: Tone) -> Style:
        """Return the style of a series of this tone."""
        return self._palette[tone]

    def shade(self, shade: Shade) -> Style:
        """Return the style of throttled time."""
        return _thin(self._palette[shade.tone])

    def shade_letter(self, shade: Shade) -> Style:
        """Return the style of a shade's letter and sample in the legend."""
        return Style(color=self.shade(shade).color, bold=True)


@lru_cache(maxsize=64)
def _thin(style: Style) -> Style:
    return Style(color=style.color, dim=style.dim)
