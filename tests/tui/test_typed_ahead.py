"""Esc and the key after it in one read: both are keys, and neither is lost."""

import pytest
from textual.events import Key

from trainfast_tui.terminal.textual_app import KeyReader, after_escape


def keys_of(*reads):
    """The typed keys by name: an `alt+` key as the two it stands for."""
    reader = KeyReader()
    names = []
    for read in reads:
        for event in reader.feed(read):
            assert isinstance(event, Key)
            later = after_escape(event)
            names += [event.key] if later is None else ["escape", later.key]
    return names


@pytest.mark.parametrize(
    ("typed", "name"),
    [*zip("\r 1-=?/", ["enter", "space", "1", "minus", "equals_sign", "question_mark", "slash"], strict=True)],
)
def test_esc_is_kept_before_every_key(typed, name):
    assert keys_of(f"\x1b{typed}") == ["escape", name]
    assert keys_of("\x1b", typed) == ["escape", name], "in two reads of one moment"
    assert keys_of(f"j\x1b{typed}k") == ["j", "escape", name, "k"]


def test_a_key_typed_after_escape_has_its_character():
    for name, sign in (("alt+q", "q"), ("alt+shift+q", "Q"), ("alt+1", "1"), ("alt+space", " "), ("alt+slash", "/")):
        later = after_escape(Key(name, None))
        assert later.character == sign
    for name in ("alt+up", "alt+f1", "q", "ctrl+alt+q"):
        assert after_escape(Key(name, None)) is None


def test_sequences_of_the_terminal_stay_what_they_are():
    assert keys_of("\x1b[A", "\x1bOP", "\x1b[1;5C", "\x1b", "[B") == ["up", "f1", "ctrl+right", "down"]
    assert [type(event).__name__ for event in KeyReader().feed("\x1b[200~a b\x1b[201~x")] == ["Paste", "Key"]
