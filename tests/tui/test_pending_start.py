"""A start until it is seen, and the end of a search that ended before it was."""

from __future__ import annotations

from pathlib import Path

from trainfast_tui.control.pending_start import PendingStart


def test_a_start_is_pending_until_it_is_seen_refused_or_gone(tmp_path: Path) -> None:
    pending = PendingStart()
    pending.begin()
    assert pending.is_pending
    pending.note_refused()
    assert not pending.is_pending
    pending.begin()
    pending.note_started(tmp_path)
    assert not pending.note_seen(None)
    assert pending.is_pending
    assert pending.note_seen(tmp_path)
    assert not pending.is_pending
    pending.note_started(tmp_path / "deleted")
    assert not pending.note_seen(None)
    assert not pending.is_pending
