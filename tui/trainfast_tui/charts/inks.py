"""Styles of parts of widgets, computed once for all widgets that share them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from rich.style import Style
from textual.app import App
from textual.widget import Widget

from trainfast_tui.terminal.textual_app import part_style

Found = dict[tuple[object, ...], dict[str, Style]]
_FOUND: WeakKeyDictionary[App[Any], Found] = WeakKeyDictionary()


def inks(widget: Widget, prefix: str, names: Iterable[str]) -> dict[str, Style]:
    """Return the whole style of each part of `widget` with the class `PREFIX--NAME`, in its present theme.

    With COMPONENT_CLASSES Textual would apply the style sheet to every such part of every widget: to 850 parts
    before the first frame.
    """
    app = widget.app
    found = _FOUND.setdefault(app, {})
    key = prefix, app.theme, app.native_ansi_color, widget.rich_style
    if key not in found:
        found[key] = {name: part_style(widget, f"{prefix}--{name}") for name in names}
    return found[key]


def forget_inks(widget: Widget) -> None:
    """Forget the styles: the theme has changed."""
    _FOUND.pop(widget.app, None)
