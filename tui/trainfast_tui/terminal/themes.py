"""The themes: the terminal's own colours by default, two of Textual's by choice."""

from __future__ import annotations

import os
from typing import Any

from textual.app import App
from textual.theme import BUILTIN_THEMES, Theme

TERMINAL_DARK, TERMINAL_LIGHT = "terminal-dark", "terminal-light"
THEME_ORDER = (TERMINAL_DARK, TERMINAL_LIGHT, "textual-dark", "textual-light")


def _terminal(name: str, *, dark: bool) -> Theme:
    base = BUILTIN_THEMES["ansi-dark" if dark else "ansi-light"]
    return Theme(
        name=name,
        ansi=True,
        dark=dark,
        # Plain blue is hard to read on black in many palettes.
        primary="ansi_bright_blue" if dark else "ansi_blue",
        secondary="ansi_magenta",
        success="ansi_green",
        accent="ansi_cyan",
        warning="ansi_yellow" if dark else "ansi_red",
        error="ansi_red",
        foreground="ansi_default",
        background="ansi_default",
        surface="ansi_default",
        panel="ansi_default",
        boost="ansi_default",
        variables={
            **base.variables,
            "block-cursor-foreground": "ansi_bright_white",
            "block-cursor-background": "ansi_blue",
        },
    )


def register(app: App[Any]) -> None:
    """Register our themes and select the one that fits the terminal."""
    app.register_theme(_terminal(TERMINAL_DARK, dark=True))
    app.register_theme(_terminal(TERMINAL_LIGHT, dark=False))
    app.theme = TERMINAL_LIGHT if is_light(os.environ.get("COLORFGBG", "")) else TERMINAL_DARK


def is_light(colorfgbg: str) -> bool:
    """True if COLORFGBG (`foreground;background`) names a light background: 7 or 9 to 15."""
    background = colorfgbg.rpartition(";")[2]
    return background.isdecimal() and (int(background) == 7 or 9 <= int(background) <= 15)


def next_theme(app: App[Any]) -> str:
    """Switch to the next theme and return its name; NO_COLOR leaves the terminal's own colours alone."""
    if app.no_color:
        return "NO_COLOR is set"
    at = THEME_ORDER.index(app.theme) if app.theme in THEME_ORDER else -1
    app.theme = THEME_ORDER[(at + 1) % len(THEME_ORDER)]
    return app.theme
