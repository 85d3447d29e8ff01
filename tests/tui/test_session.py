"""The session without an app: the next run's knobs, and the messages that it posts."""

import msgspec
from recorded import GIB, START_NS, S, a_run, a_tick
from still import CPU, StillSession, a_live_run, a_snapshot, has

from trainfast_tui.app import farewell_lines
from trainfast_tui.control import run_control
from trainfast_tui.control.messages import Changes, MachineSeen, Notified, SnapshotTaken
from trainfast_tui.control.run_control import PendingStart, RunControl
from trainfast_tui.live.snapshot import SearchKind

SECOND = "20261121-060000-tiny-llama-0001"


def a_session(home, **options):
    """A session and the messages that it posts."""
    session, posted = StillSession(home, **options), list[object]()
    session.listener = posted.append
    return session, posted


def test_the_next_run_has_the_knobs_of_the_run_on_the_screen_until_some_are_chosen(home):
    session, posted = a_session(home)
    changes = session.receive(SnapshotTaken(a_snapshot(a_run(home, knobs={"batch_size": 32}))))
    assert session.next_run.spec.knobs["batch_size"] == 32
    assert changes == Changes(next_run=True)
    assert not posted, "a message causes no message"
    session.set_next_run(session.next_run.with_value("batch_size", "8"))
    session.receive(SnapshotTaken(a_snapshot(a_run(home, SECOND, knobs={"batch_size": 64}))))
    assert session.next_run.spec.knobs["batch_size"] == 8
    assert session.next_run.shown_run_knobs["batch_size"] == 64, "it is compared with the run on the screen"


def test_settings_are_applied_together_or_not_at_all(home):
    session, _ = a_session(home)
    changed = []
    session.on_change = changed.append
    before = session.next_run
    assert not session.set_knobs([("batch_size", "16"), ("attention", "dense")])
    assert session.next_run is before
    assert [changes.refusal is not None for changes in changed] == [True]
    changed.clear()
    assert session.set_knobs([("batch_size", "16"), ("grad_accum", "2")])
    assert session.next_run.spec.overrides == ("batch_size", "grad_accum")
    notice = Notified("batch_size = 16, grad_accum = 2; r runs it")
    assert changed == [Changes(next_run=True, knob="batch_size", notices=(notice,))]


def test_the_prediction_follows_the_free_memory_while_nothing_runs(home, hold):
    session, _ = a_session(home)
    session.receive(MachineSeen(CPU))
    tick = a_tick(1, live=False)

    def see(free_gib, run=None):
        """The free memory of the requests that follow a sample with so much of it."""
        before = len(session.requests)
        host = msgspec.structs.replace(tick.host, memory_available_bytes=int(free_gib * GIB))
        sample = msgspec.structs.replace(tick, host=host)
        # In the place of the run's own samples, which are older.
        snapshot = a_snapshot(run, ticks=(msgspec.structs.replace(sample, t_ns=START_NS + 90 * S),))
        session.receive(SnapshotTaken(snapshot))
        found = [request.free_bytes for request in session.requests[before:]]
        return [None if free_bytes is None else free_bytes / GIB for free_bytes in found]

    assert see(5.0) == [5.0]
    assert see(4.97) == [], "it moves with every sample"
    assert see(3.0) == [3.0]
    live = a_live_run(home, hold)
    assert see(2.0, live) == [2.0], "a run has begun"
    assert see(1.0, live) == [], "the run itself moves it"
    assert see(1.0) == [1.0], "no run is on the screen"
    assert see(4.0) == [4.0]
    session.background.is_shown = False
    assert see(2.0) == [], "another screen is on top"
    session.background.is_shown = True
    assert see(2.0) == [2.0]


def test_a_run_that_ends_before_it_is_stopped_is_no_obstacle(home, monkeypatch):
    looks = iter([True, True, False])
    monkeypatch.setattr(run_control, "is_alive", lambda directory: next(looks))
    RunControl(home, lambda message: None, None).stop_and_wait(a_run(home))
    assert next(looks, None) is None, "its processes were waited for"


def test_the_farewell_names_each_run_that_goes_on_and_a_start_that_does_not(home, hold, monkeypatch):
    session, _ = a_session(home)
    assert list(farewell_lines(session)) == []
    directory = a_live_run(home, hold)
    session.receive(SnapshotTaken(msgspec.structs.replace(a_snapshot(directory), other_live_run_id=SECOND)))
    farewell = "\n".join(farewell_lines(session))
    for run_id in (directory.name, SECOND):
        has(farewell, f"{run_id} goes on without this screen.", f"\ntrainfast-tui attach {run_id}")
    session.searches.of(SearchKind.BEST)._pending.begin()
    starting, *_ = farewell_lines(session)
    assert starting == "A best-fit search was being started; B in trainfast-tui shows if it runs."
    session.searches.of(SearchKind.BEST).note_refused()
    session.run_control.pending.begin()
    assert list(farewell_lines(session))[-1].endswith("see if it runs with: trainfast-tui runs list")
    monkeypatch.setattr(RunControl, "is_waiting", True)
    assert list(farewell_lines(session))[-1] == "The run that waited was not started."


def test_a_start_is_pending_until_it_is_seen_refused_or_gone(tmp_path):
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
