"""The drawing of throttled time: each cause has a letter, a texture, a colour and words."""

from __future__ import annotations

import msgspec

from trainfast_tui.text.lines import Tone


class Shade(msgspec.Struct, frozen=True):
    """The drawing of one cause of throttling."""

    cause: str
    letter: str
    """Stands below the chart, a letter for each throttled cell."""
    glyph: str
    """Fills the free cells of the chart."""
    words: str
    """The words of the legend."""
    tone: Tone
    """The colour of the glyph."""


SHADES: tuple[Shade, ...] = (
    Shade("thermal", "T", "░", "throttled by heat", "error"),
    Shade("brake", "B", "▒", "power brake", "error"),
    Shade("hardware", "H", "╱", "hardware slowdown", "error"),
    Shade("power", "P", "·", "at the power limit", "warning"),
    Shade("sync_boost", "S", "┊", "sync boost", "secondary"),
)
"""The worst first: of two causes at once the worse is drawn."""

_BY_CAUSE = {shade.cause: shade for shade in SHADES}


def shade_of(cause: str) -> Shade:
    """Return the shade of a cause that `throttle.causes_of` names."""
    return _BY_CAUSE[cause]


def severity_rank(shade: Shade) -> int:
    """Return the rank of the shade, 0 for the worst."""
    return SHADES.index(shade)
