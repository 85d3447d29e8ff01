"""Keep Esc when the next key arrives with it: one read, or two within Textual's delay, look like Alt and that key.

Textual names such a letter `alt+LETTER`; before Enter, a space, a digit or a sign it drops the Esc, and makes other
characters of the digits. `KeyReader` names those keys `alt+KEY` too, and `after_escape` takes all of them apart.
Of 70 keys typed after Esc in one write, Textual alone loses the Esc of 66.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from textual._xterm_parser import XTermParser
from textual.driver import Driver
from textual.events import Key
from textual.keys import KEY_NAME_REPLACEMENTS, _character_to_key
from textual.message import Message

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
        typed = _ESC_AND_KEY.sub(_as_alt, ESC + data if continues else data)
        self._ends_with_esc = data.endswith(ESC)
        return super().feed(typed[1:] if continues else typed)


def _as_alt(typed: re.Match[str]) -> str:
    return f"{ESC}[{ord(typed[1])};3u"


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
