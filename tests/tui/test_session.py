"""The session without an app: the next run's knobs, and the messages that it posts."""

from __future__ import annotations

from typing import Any

from recorded import a_run
from still import CPU, StillSession, a_snapshot

from trainfast_runner.records.home import Home
from trainfast_tui.control.messages import MachineSeen, NextRunChanged, NextRunRefused, Notified, SnapshotTaken

SECOND = "20261121-060000-tiny-llama-0001"


def a_session(home: Home, **options: Any) -> tuple[StillSession, list[object]]:
    """A session and the messages that it posts."""
    session, posted = StillSession(home, **options), list[object]()
    session.listener = posted.append
    return session, posted


def test_the_next_run_has_the_knobs_of_the_run_on_the_screen_until_some_are_chosen(home: Home) -> None:
    session, posted = a_session(home)
    session.receive(SnapshotTaken(a_snapshot(a_run(home, knobs={"batch_size": 32}))))
    assert session.next_run is not None
    assert session.next_run.spec.knobs["batch_size"] == 32
    assert posted == [NextRunChanged()]
    session.set_next_run(session.next_run.with_value("batch_size", "8"))
    session.receive(SnapshotTaken(a_snapshot(a_run(home, SECOND, knobs={"batch_size": 64}))))
    assert session.next_run.spec.knobs["batch_size"] == 8
    assert session.next_run.shown_run_knobs is not None
    assert session.next_run.shown_run_knobs["batch_size"] == 64, "it is compared with the run on the screen"


def test_settings_are_applied_together_or_not_at_all(home: Home) -> None:
    session, posted = a_session(home)
    before = session.next_run
    session.set_knobs([("batch_size", "16"), ("attention", "dense")])
    assert session.next_run is before
    assert [type(message) for message in posted] == [NextRunRefused]
    posted.clear()
    session.set_knobs([("batch_size", "16"), ("grad_accum", "2")])
    assert session.next_run is not None
    assert session.next_run.spec.overrides == ("batch_size", "grad_accum")
    assert posted == [NextRunChanged("batch_size"), Notified("batch_size = 16, grad_accum = 2; r runs it")]


def test_memory_is_predicted_once_for_the_same_settings(home: Home) -> None:
    session, _ = a_session(home)
    session.receive(MachineSeen(CPU))
    assert [request.may_trace for request in session.requests] == [True]
    session.update_background_work()
    assert len(session.requests) == 1
    session.set_next_run(session.next_run.with_value("batch_size", "16"))  # type: ignore[union-attr]
    assert [request.spec.knobs["batch_size"] for request in session.requests] == [8, 16]
