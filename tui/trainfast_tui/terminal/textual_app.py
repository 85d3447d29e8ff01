"""The app's base class and the functions that use private parts of Textual; `plain_output` uses none of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from rich.style import Style
from textual import events
from textual.app import App
from textual.dom import DOMNode
from textual.driver import Driver
from textual.filter import LineFilter, Monochrome, NoColor
from textual.widget import Widget

from trainfast_tui.terminal import escape_key, frame_output, themes
from trainfast_tui.terminal.line_filters import AsciiFilter, NoHueFilter

AFTER_ESCAPE_S = 0.05
"""Time for Esc to leave a screen before the key typed right after it goes to the screen below."""
PLAIN_STYLES = {
    "title": "bold",
    "muted": "dim",
    "key": "bold",
    "warning": "bold",
    "error": "bold",
    "cursor": "reverse",
    "badge": "reverse",
    "alarm": "reverse bold",
}
"""Styles of `plain_output` and `NO_COLOR` by the last word of a class name; others are those of their widget."""


class TerminalApp(App[int]):
    """A Textual app that sends little to the terminal and keeps every key; with `plain_output` Textual as it is."""

    CSS = "OptionList:nocolor { scrollbar-background: ansi_default; }"

    def __init__(self, *, ascii: bool = False, plain_output: bool = False) -> None:
        # Textual's constructor asks for the driver class.
        self.plain_output = plain_output
        super().__init__()
        self.ascii = ascii or not (sys.stdout.encoding or "").lower().startswith("utf")
        self.no_color = bool(os.environ.get("NO_COLOR"))  # Textual takes an empty one too, against no-color.org
        self._own_filters = [*([NoHueFilter()] if self.no_color else []), *([AsciiFilter()] if self.ascii else [])]
        themes.register(self)
        frame_output.install(plain=plain_output)

    def get_driver_class(self) -> type[Driver]:
        """Return Textual's driver with our key parser."""
        driver = super().get_driver_class()
        escape_key.install(driver, plain=self.plain_output)
        return driver

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's filters with ours as the last; its own for NO_COLOR take the terminal for a black one."""
        filters = super().get_line_filters()
        return [*(each for each in filters if not isinstance(each, Monochrome | NoColor)), *self._own_filters]

    async def on_event(self, event: events.Event) -> None:
        """Split Esc and a key that arrived as one, then pass the event on."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            later = escape_key.after_escape(event)
            if later is not None:
                self.set_timer(AFTER_ESCAPE_S, partial(self.post_message, later))
                event = events.Key("escape", "\x1b")
        await self.handle_event(event)

    async def handle_event(self, event: events.Event) -> None:
        """Handle an event as Textual does; an app overrides this instead of `on_event`."""
        await super().on_event(event)

    def unwritten_texts(self) -> int:
        """Return the number of texts the terminal has not taken yet, up to three a frame; 0 when unknown."""
        if self.plain_output:
            return 0
        queue = getattr(getattr(self._driver, "_writer_thread", None), "_queue", None)
        return queue.qsize() if queue is not None else 0


def _is_plain(widget: Widget) -> bool:
    return isinstance(widget.app, TerminalApp) and widget.app.plain_output


def forward_key(widget: Widget, key: events.Key) -> None:
    """Give `widget` a key ahead of keys that still wait; with `plain_output` after them."""
    if _is_plain(widget):
        widget.app.post_message(key)
    else:
        widget._forward_event(key)


def part_style(widget: Widget, name: str) -> Style:
    """Return the style sheet's complete style for a part of `widget` with the class `name`."""
    if _is_plain(widget) or widget.app.no_color:
        return widget.rich_style + Style.parse(PLAIN_STYLES.get(name.rpartition("--")[2], ""))
    part = DOMNode(classes=name)
    part._attach(widget)
    widget.app.stylesheet.apply(part, animate=False)
    return part.rich_style
