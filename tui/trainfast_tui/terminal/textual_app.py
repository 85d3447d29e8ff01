"""The app's base class and the functions that use private parts of Textual; `plain_output` uses none of them."""

from __future__ import annotations

import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.color import Color
from textual.dom import DOMNode
from textual.driver import Driver
from textual.events import Key
from textual.filter import LineFilter, Monochrome, NoColor
from textual.keys import KEY_NAME_REPLACEMENTS, _character_to_key
from textual.message import Message
from textual.reactive import Reactive
from textual.theme import BUILTIN_THEMES, Theme
from textual.widget import Widget

from trainfast_tui.terminal import cells
from trainfast_tui.text.format import to_ascii

LOST_KEY_S = 0.1
"""A key that has not come back by then was lost with a closing screen, and the next one follows."""
STYLES = Path(__file__).parent.parent / "style.tcss"
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


class KeyPassed(Message):
    """A key has passed every widget that could take it; follows it on its way up to the app."""

    def __init__(self, key: Key, *, is_second: bool) -> None:
        super().__init__()
        self.key = key
        self.is_second = is_second


class TerminalApp(App[int]):
    """A Textual app that sends little to the terminal and keeps every key; with `plain_output` Textual as it is.

    It takes in one key at a time: the next one waits until the effects of the one before are complete, so that keys
    that were typed ahead, or come in one piece over a slow link, go to the screen or dialog that they were meant for.
    """

    CSS_PATH = STYLES
    # From the start: a change of theme would parse the style sheet twice more before the first frame.
    theme: Reactive[str] = Reactive(lambda: _first_theme())

    def __init__(self, *, ascii: bool = False, plain_output: bool = False) -> None:
        # Textual's constructor asks for the driver class.
        self.plain_output = plain_output
        super().__init__()
        # Notices are on the status line: each screen would hold a widget for toasts and one for tooltips.
        self._disable_notifications = self._disable_tooltips = not plain_output
        self._registered_themes |= OWN_THEMES
        self.ascii = ascii or not (sys.stdout.encoding or "").lower().startswith("utf")
        self.no_color = bool(os.environ.get("NO_COLOR"))  # Textual takes an empty one too, against no-color.org
        self._own_filters = [*([NoHueFilter()] if self.no_color else []), *([AsciiFilter()] if self.ascii else [])]
        self._waiting_keys: deque[Key] = deque()
        self._present_key: Key | None = None
        """The key that is being handled; later ones wait."""
        cells.install(plain=plain_output)

    def get_theme(self, theme_name: str) -> Theme | None:
        """Return a theme; our own even before they are registered, for Textual's constructor."""
        return OWN_THEMES.get(theme_name) or super().get_theme(theme_name)

    def get_driver_class(self) -> type[Driver]:
        """Return Textual's driver with our key parser."""
        driver = super().get_driver_class()
        install(driver, plain=self.plain_output)
        return driver

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's filters with ours as the last; its own for NO_COLOR take the terminal for a black one."""
        filters = super().get_line_filters()
        return [*(each for each in filters if not isinstance(each, Monochrome | NoColor)), *self._own_filters]

    async def on_event(self, event: events.Event) -> None:
        """Take in keys one at a time, Esc and a key that arrived as one as two; other events as Textual does."""
        if not isinstance(event, Key):
            await super().on_event(event)
        elif event.is_forwarded:
            if not self.take_key(event):
                await super().on_event(event)
            self._follow(event, is_second=True)
        else:
            later = after_escape(event)
            self._waiting_keys += [event] if later is None else [Key("escape", ESC), later]
            if self._present_key is None:
                await self._next_key()
            else:
                self.set_timer(LOST_KEY_S, partial(self._end_key, self._present_key))

    def take_key(self, key: Key) -> bool:
        """Take in a key ahead of all bindings, after the focused widget; return True if the app took it."""
        return False

    async def _next_key(self) -> None:
        if self._waiting_keys:
            key = self._present_key = self._waiting_keys.popleft()
            target = self.focused or self.screen
            await super().on_event(key)
            if key.is_forwarded:
                target.post_message(KeyPassed(key, is_second=False))
            else:
                self._follow(key, is_second=True)

    def _follow(self, key: Key, *, is_second: bool) -> None:
        """Wait for the messages that the key's action has posted, and for the screen that it has opened."""
        if key is self._present_key:
            (self.focused or self.screen).post_message(KeyPassed(key, is_second=is_second))

    async def on_key_passed(self, message: KeyPassed) -> None:
        """Go on to the next key once the key and what it has caused were handled."""
        if message.is_second:
            await self._end_key(message.key)
        else:
            self._follow(message.key, is_second=True)

    async def _end_key(self, key: Key) -> None:
        if key is self._present_key:
            self._present_key = None
            await self._next_key()

    def unwritten_texts(self) -> int:
        """Return the number of texts the terminal has not taken yet, up to three a frame; 0 when unknown."""
        if self.plain_output:
            return 0
        queue = getattr(getattr(self._driver, "_writer_thread", None), "_queue", None)
        return queue.qsize() if queue is not None else 0


def part_style(widget: Widget, name: str) -> Style:
    """Return the style sheet's complete style for a part of `widget` with the class `name`."""
    is_plain = isinstance(widget.app, TerminalApp) and widget.app.plain_output
    if is_plain or widget.app.no_color:
        return widget.rich_style + Style.parse(PLAIN_STYLES.get(name.rpartition("--")[2], ""))
    part = DOMNode(classes=name)
    part._attach(widget)
    widget.app.stylesheet.apply(part, animate=False)
    return part.rich_style


ESC = "\x1b"
# Enter and printable ASCII without letters and without the characters of control sequences: [ \ ] ^ _
_KEY = "[\r -@`{-~]"
_ESC_AND_KEY = re.compile(f"{ESC}({_KEY})")
_CHARACTERS = {
    KEY_NAME_REPLACEMENTS.get(name, name): character
    for character in map(chr, range(ord(" "), ord("~") + 1))
    for name in (character if character.isalnum() else _character_to_key(character),)
}
"""Printable ASCII by Textual's names of the keys."""


class KeyReader(XTermParser):
    """Textual's parser of terminal input; Esc and a key are given to it in kitty's spelling of Alt."""

    _ends_with_esc = False
    """True if the last read ended with Esc."""

    def feed(self, data: str) -> Iterable[Message]:
        """Yield the events in `data`."""
        # Until its delay is over, Textual takes the next read as part of the sequence.
        continues = self._ends_with_esc and self._timeout_time is not None and re.match(_KEY, data)
        typed = _ESC_AND_KEY.sub(lambda key: f"{ESC}[{ord(key[1])};3u", ESC + data if continues else data)
        self._ends_with_esc = data.endswith(ESC)
        return super().feed(typed[1:] if continues else typed)


def install(driver: type[Driver], *, plain: bool = False) -> None:
    """Make the driver read keys with `KeyReader`, or with `plain` as Textual does, which has no such setting."""
    module = sys.modules[driver.__module__]
    if hasattr(module, "XTermParser"):
        module.XTermParser = XTermParser if plain else KeyReader  # type: ignore[attr-defined]


def after_escape(event: Key) -> Key | None:
    """Return the key typed right after Esc if the two arrived as one `alt+` key; the app binds no such key itself."""
    alt, _, name = event.key.partition("alt+")
    name, shifted = name.removeprefix("shift+"), name.startswith("shift+")
    if alt or not name:
        return None
    name = name.upper() if shifted else name
    character = "\r" if name == "enter" else _CHARACTERS.get(name)
    return Key(name, character) if character is not None else None


GRACE_S = 3.0
"""Seconds that the app has to leave by itself once its terminal is gone."""
EXIT_STATUS = 129
"""128 + SIGHUP, as `EXIT_HUNG_UP` of the command line, which imports this package."""


def watch_for_hangup(fd: int, on_lost: Callable[[], object]) -> None:
    """Call `on_lost` from a thread when the terminal behind `fd` hangs up, then end the process."""
    if os.isatty(fd):
        threading.Thread(target=_wait, args=(fd, on_lost), name="terminal-watch", daemon=True).start()


def _wait(fd: int, on_lost: Callable[[], object]) -> None:
    poll = select.poll()
    # No input events: only a hang-up or an error ends the wait.
    poll.register(fd, 0)
    poll.poll()
    on_lost()
    # The last output goes to a terminal that no longer reads it.
    threading.Event().wait(GRACE_S)
    os._exit(EXIT_STATUS)


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


OWN_THEMES = {name: _terminal(name, dark=name == TERMINAL_DARK) for name in THEME_ORDER[:2]}


def _first_theme() -> str:
    """Return our theme for a light background if COLORFGBG (`foreground;background`) names one: 7 or 9 to 15."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    is_light = background.isdecimal() and (int(background) == 7 or 9 <= int(background) <= 15)
    return TERMINAL_LIGHT if is_light else TERMINAL_DARK


def next_theme(app: App[Any]) -> str:
    """Switch to the next theme and return its name; NO_COLOR leaves the terminal's own colours alone."""
    if app.no_color:
        return "NO_COLOR is set"
    at = THEME_ORDER.index(app.theme) if app.theme in THEME_ORDER else -1
    app.theme = THEME_ORDER[(at + 1) % len(THEME_ORDER)]
    return app.theme
