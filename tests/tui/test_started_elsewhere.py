"""A run that somebody starts at another terminal while the app is open."""

import shutil
from pathlib import Path

from recorded import a_run, a_search, best_going_on, going_on
from still import CPU, StillSession, a_live_run

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import locked
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE
from trainfast_tui.control.messages import MachineSeen, SnapshotTaken
from trainfast_tui.live import reader as reader_module
from trainfast_tui.live.reader import Reader
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.next_run.sources import next_run_from_preset

FIRST, SECOND = "20261121-000000-tiny-llama-0001", "20261121-000001-tiny-llama-0002"


def a_reader(home):
    """Reads without a sampler."""
    reader = Reader(home, lambda snapshot: None)
    reader._update_sampler = lambda run: None
    return reader


def test_the_newest_live_run_that_is_not_shown_is_known_until_it_ends(home, hold):
    reader = a_reader(home)
    trial = a_live_run(home, hold, run_id="20261121-000000-tiny-llama-aaaa", role="probe")
    shown = a_run(home, FIRST)
    snapshot = reader._snapshot()
    assert (snapshot.run.run_id, snapshot.other_live_run_id) == (FIRST, trial.name)
    directory = a_run(home, SECOND, with_result=False)
    with locked(directory / ALIVE_LOCK_FILE):
        assert reader._snapshot().other_live_run_id == SECOND
        reader.follow(directory)
        assert reader._snapshot().other_live_run_id == trial.name
        reader.follow(shown)
    assert reader._snapshot().other_live_run_id == trial.name
    shutil.rmtree(directory)
    assert reader._snapshot().other_live_run_id == trial.name


def test_no_live_run_of_a_search_comes_onto_the_screen_but_its_ended_confirmation_does(home, hold):
    a_live_run(home, hold, run_id=FIRST, role="probe")
    live = a_live_run(home, hold, run_id=SECOND, role="proof")
    reader = a_reader(home)
    for _ in range(2):
        assert reader._snapshot().run is None
    confirmation = a_run(home, "20261120-000000-tiny-llama-0000", role="proof")
    reader = a_reader(home)
    snapshot = reader._snapshot()
    assert (snapshot.run.run_id, snapshot.other_live_run_id) == (confirmation.name, live.name)


def test_a_live_run_older_than_many_runs_is_known(home, hold, monkeypatch):
    monkeypatch.setattr(reader_module, "RUNS_LOOKED_AT", 1)
    live = a_live_run(home, hold, run_id=FIRST)
    shown = a_run(home, SECOND)
    reader = a_reader(home)
    reader.follow(shown)
    assert reader._snapshot().other_live_run_id == live.name
    a_run(home, "20261121-000002-tiny-llama-0003")
    assert reader._snapshot().other_live_run_id == live.name


def test_where_no_run_is_shown_it_comes_onto_the_screen(home, hold):
    reader = a_reader(home)
    assert reader._snapshot().run is None
    a_live_run(home, hold, run_id=FIRST)
    reader._snapshot()
    run = reader._snapshot().run
    assert run.run_id == FIRST


def test_a_search_started_elsewhere_is_followed(home, conduct, monkeypatch):
    monkeypatch.setattr(reader_module, "LOOK_AGAIN_S", 0.0)
    reader = a_reader(home)
    assert reader._snapshot().best_search is None
    search = a_search(home, best_going_on())
    assert reader._snapshot().best_search is None, "nobody conducts it"
    conduct(search)
    best = reader._snapshot().best_search
    assert (best.directory, best.state) == (search, "running")
    other = Path(shutil.copytree(search, search.with_name("20261121-090000-tiny-llama-be58")))
    conduct(other)
    following = reader._snapshot().best_search
    assert following.directory == search, "the live one that is shown stays"


def test_a_live_run_that_is_not_on_the_screen_uses_the_device(home, hold):
    live = a_live_run(home, hold, run_id=SECOND)
    session = StillSession(home)
    session.receive(MachineSeen(CPU))
    reader = a_reader(home)
    reader.follow(live)
    session.receive(SnapshotTaken(reader._snapshot()))
    reader.follow(a_run(home, FIRST))
    snapshot = reader._snapshot()
    session.receive(SnapshotTaken(snapshot))
    assert snapshot.live_run is None
    assert snapshot.other_live_run_id == SECOND
    assert session.is_device_used
    session.set_next_run(next_run_from_preset("gpt2"))
    assert not session.requests[-1].may_trace


def test_a_journal_that_cannot_be_read_leaves_the_other_search_and_its_own_last_state(home, monkeypatch):
    reader = a_reader(home)
    reader.follow_search(a_search(home, going_on()), SearchKind.BATCH)
    reader.follow_search(a_search(home, best_going_on()), SearchKind.BEST)
    readable = reader._snapshot()
    assert readable.trouble is None

    def broken():
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reader._batch_search, "_poll", broken)
    snapshot = reader._snapshot()
    assert snapshot.trouble == "cannot read the batch search: [Errno 5] Input/output error"
    assert None not in (snapshot.batch_search, snapshot.best_search)
    assert (snapshot.batch_search, snapshot.best_search) == (readable.batch_search, readable.best_search)


def test_an_unreadable_home_is_an_error_at_each_look(home, monkeypatch):
    reader = a_reader(home)
    assert reader._snapshot().trouble is None
    a_run(home)

    def broken(self):
        raise UserError("the runs cannot be listed: no permission", key="TRAINFAST_HOME")

    monkeypatch.setattr(Home, "run_ids", broken)
    for _ in range(2):
        assert "no permission" in (reader._snapshot().trouble or "")
