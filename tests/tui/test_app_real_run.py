"""The app beside a real training: started with r, seen live, outlived, stopped."""

import contextlib
import time

import pytest
from still import screen_text

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.settling import kill_now
from trainfast_tui.app import TrainfastApp
from trainfast_tui.session import Session

PATIENCE_S = 180.0


@pytest.fixture
def home(tmp_path, cache, monkeypatch):
    """A home of which nothing is alive when the test ends, beside the cache of all tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    home = Home(tmp_path / "home").create()
    yield home
    for run_id in home.run_ids():
        directory = home.directory(run_id)
        with contextlib.suppress(UserError):
            kill_now(directory)
        wait_for(lambda directory=directory: not is_alive(directory))


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def until(pilot, words):
    deadline = time.monotonic() + PATIENCE_S
    while words not in (text := screen_text(pilot.app)):
        assert time.monotonic() < deadline, f"{words!r} never came:\n{text}"
        await pilot.pause(0.1)
    return text


@pytest.mark.long
@pytest.mark.ci
async def test_r_trains_q_leaves_it_running_and_s_stops_it(home, tmp_path):
    pytest.importorskip("torch")
    # The model of `SMALL`: what another test has asked of the training Python is in the cache.
    (tmp_path / "small.toml").write_text(
        'schema = 1\nextends = "tiny-llama"\n[model]\nhidden_size = 32\nnum_hidden_layers = 1\n'
        '[data]\nkind = "random"\n[knobs]\nsteps = 100000\nseq_len = 16\nbatch_size = 2\n'
    )
    first = TrainfastApp(Session(home, preset=str(tmp_path / "small.toml")))
    async with first.run_test(size=(160, 48)) as pilot:
        await until(pilot, "No run yet.")
        await pilot.press("r")
        await until(pilot, "● running")
        text = await until(pilot, "medians of the last")
        assert "samples/s" in text
        assert "this run" in text, "the supervisor's telemetry is on the screen"
        await pilot.press("q")
    run_id = home.run_ids()[0]
    directory = home.directory(run_id)
    assert is_alive(directory), "leaving the app does not end the run"
    second = TrainfastApp(Session(home))
    async with second.run_test(size=(160, 48)) as pilot:
        await until(pilot, "● running")
        assert second.session.next_run.spec.knobs["batch_size"] == 2, "the next run starts from the one on the screen"
        await pilot.press("s")
        await until(pilot, "■ stopped")
        text = await until(pilot, "Its steps are kept")
        assert "run 1" in text
    steps = Follower(directory).poll().steps
    assert steps
    assert steps[-1].step < 100_000


@pytest.mark.long
@pytest.mark.ci
async def test_what_cannot_run_is_refused_at_its_knob(home):
    pytest.importorskip("torch")
    app = TrainfastApp(Session(home, preset="tiny-llama"))
    async with app.run_test(size=(160, 48)) as pilot:
        await until(pilot, "No run yet.")
        app.session.set_next_run(app.session.next_run.with_value("steps", "3"))
        await pilot.press("r")
        text = await until(pilot, "Refused:")
        assert "timing_warmup=3 leaves no step of steps=3" in text
        assert "▸ timing_warmup" in text, "the cursor stands on the knob it is about"
        assert home.run_ids() == []
