"""A letter typed right after Esc: both are keys, and neither is lost."""

from __future__ import annotations

import pytest
from textual.events import Key

from trainfast_tui.terminal.textual_app import after_escape


@pytest.mark.parametrize(("name", "character"), [("alt+q", "q"), ("alt+shift+q", "Q"), ("alt+1", "1")])
def test_a_key_typed_after_escape_has_its_character(name: str, character: str) -> None:
    later = after_escape(Key(name, None))
    assert later is not None
    assert later.character == character


@pytest.mark.parametrize("name", ["alt+up", "alt+f1", "q", "ctrl+alt+q"])
def test_other_keys_are_one_key(name: str) -> None:
    assert after_escape(Key(name, None)) is None
