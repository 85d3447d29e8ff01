"""Esc and a key typed right after it reach the terminal's reader as one sequence, as Alt and that key do.

Textual keeps the Esc only before a letter, as `alt+` in the key's name; before Enter, a space, a digit or a sign it is
dropped. Here such a key keeps its `alt+` too, and `after_escape` says which key was typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from textual._xterm_parser import XTermParser
from textual.events import Key
from textual.keys import KEY_NAME_REPLACEMENTS, _character_to_key
from textual.message import Message

ESC = "\x1b"
# Enter and printable ASCII without letters, and without what opens or closes a sequence: [ \ ] ^ _
_KEY = "[\r -@`{-~]"
_TYPED = re.compile(f"{ESC}({_KEY})")
_CHARACTERS = {
    KEY_NAME_REPLACEMENTS.get(name, name): character
    for character in map(chr, range(ord(" "), ord("~") + 1))
    for name in (character if character.isalnum() else _character_to_key(character),)
}
"""Printable ASCII by Textual's names of the keys."""


class KeyReader(XTermParser):
    """Textual's parser of what the terminal sends, told of such keys in kitty's spelling of Alt, which it knows."""

    _is_open = False
    """Whether the last read ended with Esc."""

    def feed(self, data: str) -> Iterable[Message]:
        """The events in `data`."""
        # Until its delay is over, Textual too takes the next read as a part of the sequence.
        is_one = self._is_open and self._timeout_time is not None and re.match(_KEY, data)
        whole = _TYPED.sub(_spelled, ESC + data if is_one else data)
        self._is_open = data.endswith(ESC)
        return super().feed(whole[1:] if is_one else whole)


def _spelled(typed: re.Match[str]) -> str:
    return f"{ESC}[{ord(typed[1])};3u"


def after_escape(event: Key) -> Key | None:
    """The key typed right after Esc, where the two arrived as one."""
    alt, _, name = event.key.partition("alt+")
    name, shifted = name.removeprefix("shift+"), name.startswith("shift+")
    if alt or not name:
        return None
    name = name.upper() if shifted else name
    character = "\r" if name == "enter" else _CHARACTERS.get(name)
    return Key(name, character) if character is not None else None
