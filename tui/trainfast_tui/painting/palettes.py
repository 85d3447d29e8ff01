"""The styles of tones, computed once for all widgets that share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args
from weakref import WeakKeyDictionary

from rich.style import Style
from textual.app import App
from textual.widget import Widget

from trainfast_tui.terminal.textual_app import part_style
from trainfast_tui.text.lines import Tone

TONES: tuple[Tone, ...] = get_args(Tone)
"""Every tone."""
FILLED_TONES: tuple[Tone, ...] = ("cursor", "badge", "alarm")
"""Tones with a background of their own."""
Palette = Mapping[str, Style]
"""The style of every tone, by name."""
_PALETTES: WeakKeyDictionary[App[Any], dict[tuple[object, ...], Palette]] = WeakKeyDictionary()


def tone_styles(widget: Widget) -> Palette:
    """Return the styles of the classes `tone--NAME` on `widget`, in its present theme.

    COMPONENT_CLASSES would apply the style sheet to every tone of every widget before the first frame.
    """
    app = widget.app
    styles = _PALETTES.setdefault(app, {})
    key = app.theme, app.native_ansi_color, widget.rich_style
    if key not in styles:
        # Whole styles: a partial one leaves a muted colour unblended, which is white on a light theme.
        whole_styles = {tone: part_style(widget, f"tone--{tone}") for tone in TONES}
        filled = {
            tone: Style(bgcolor=whole_styles[tone].bgcolor, reverse=whole_styles[tone].reverse) for tone in FILLED_TONES
        }
        styles[key] = {
            tone: _without_background(style) + filled.get(tone, Style.null()) for tone, style in whole_styles.items()
        }
    return styles[key]


def forget_palettes(widget: Widget) -> None:
    """Forget the styles: the theme has changed."""
    _PALETTES.pop(widget.app, None)


def _without_background(style: Style) -> Style:
    """Return the style without background, underline and reverse."""
    return Style(color=style.color, bold=style.bold, dim=style.dim, italic=style.italic)
