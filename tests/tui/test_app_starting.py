"""Starting a run from the screen: once however often `r` is pressed, and what is asked before it."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from recorded import GIB, a_result, a_run, a_step
from still import CPU, FIT, a_fit, a_live_run, a_snapshot, running

from on_disk import put
from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.headroom import AvailableMemory
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.running import launch, planning
from trainfast_tui.app import run_app
from trainfast_tui.control.messages import NextRunPredicted
from trainfast_tui.live.reader import Reader
from trainfast_tui.next_run.sources import NextRunMemory
from trainfast_tui.text.memory_words import swap_notice

OLD, NEW = "20261121-054455-tiny-llama-7f3a", "20261121-060000-tiny-llama-0001"


SCRIPT = SimpleNamespace(unconfirmed=[], hooks_blocked=None, steps_from_log=None)


class Launches:
    """Stands in for the launcher: counts, and holds every start until `go` is set."""

    def __init__(self, home):
        self.home = home
        self.count = 0
        self.refusal: UserError | None = None
        self.go = threading.Event()

    def plan(self, spec, python):
        self.count += 1
        return SimpleNamespace(script=SCRIPT, spans_nodes=False)

    def start(self, plan, home, on_wait):
        self.go.wait(60)
        if self.refusal is not None:
            raise self.refusal
        return a_run(home, NEW, with_result=False)


@pytest.fixture
def launches(home, monkeypatch):
    found = Launches(home)
    monkeypatch.setattr(planning, "plan_spec", found.plan)
    monkeypatch.setattr(launch, "start", found.start)
    return found


def end(directory):
    """The supervisor has written how the run ended."""
    run = read_run_file(directory)
    assert run is not None
    result = a_result(run, [], "finished", "50 of 50 steps", False, None)
    put(directory / "result.json", result)


async def test_r_pressed_twice_starts_one_run(home, launches, hold):
    old = a_run(home)
    async with running(home, a_snapshot(old, second=23), size=(120, 40)) as (app, pilot):
        await pilot.press("r", "r")
        await pilot.until("A run is starting; press r again")
        await pilot.press("s")
        await pilot.until("The run is starting; press s again")
        launches.go.set()
        await pilot.until_true(
            lambda: not app.session.run_control.pending.is_pending or (home.runs / NEW).exists(), "the run"
        )
        # Its supervisor runs, and what is on the screen is still the run before.
        await pilot.show(a_snapshot(old, second=23))
        await pilot.press("r")
        await pilot.until("A run is starting; press r again")
        assert launches.count == 1
        hold(home.directory(NEW))
        await pilot.show(a_snapshot(home.directory(NEW), second=23))
        assert not app.session.run_control.pending.is_pending
        await pilot.press("r")
        await pilot.until("y  stop it, then run")


async def test_after_a_refusal_r_starts_again(home, launches):
    launches.refusal = UserError("no room for it", key="batch_size")
    launches.go.set()
    async with running(home, size=(120, 40)) as (_, pilot):
        await pilot.show(a_snapshot(a_run(home), second=23))
        await pilot.press("r")
        await pilot.until("Refused: no room for it")
        launches.refusal = UserError("still no room for it", key="batch_size")
        await pilot.press("r")
        await pilot.until("Refused: still no room for it")
        assert launches.count == 2


async def test_a_started_run_is_followed_beside_a_newer_live_one(home, hold):
    a_live_run(home, hold, run_id="20991231-000000-tiny-llama-ffff")
    started = a_live_run(home, hold, run_id=NEW)
    seen = []
    seen_often = threading.Event()

    def post(snapshot):
        seen.append(snapshot.run.directory if snapshot.run is not None else None)
        if len(seen) == 1:
            reader.follow(started)
        if len(seen) > 3:
            seen_often.set()

    reader = Reader(home, post)
    reader.period_s = 0.05
    reader.start()
    assert seen_often.wait(60)
    reader.stop()
    assert set(seen[1:]) == {started}


async def test_below_a_question_the_run_goes_on_being_painted(home, hold):
    directory = a_live_run(home, hold, steps=10)
    async with running(home, size=(120, 40)) as (_, pilot):
        await pilot.show(a_snapshot(directory, second=23))
        await pilot.press("r")
        await pilot.until("y  stop it, then run")
        with (directory / "steps.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(a_step(11)) + b"\n")
        await pilot.show(a_snapshot(directory, second=23))
        # A pause of the pilot paints the screen on top; the one below follows with its own timer.
        text = await pilot.until("step 11 of 50")
        assert "y  stop it, then run" in text


def test_a_preset_that_is_not_there_fails_before_the_app_opens(home):
    with pytest.raises(UserError, match="there is no preset 'nope'"):
        run_app(home, preset="nope", python=None, ascii=False, plain_output=False, mouse=True)


FREE = AvailableMemory(20 * GIB, "free")
TOO_MUCH = a_fit(48 * 1024, FREE)


async def test_r_asks_before_a_run_that_would_make_it_swap(home, monkeypatch):
    started = []
    async with running(home, a_snapshot(None)) as (app, pilot):
        monkeypatch.setattr(app.session.run_control, "start", lambda spec, after: started.append(spec))
        too_much = NextRunMemory(TOO_MUCH, spec=app.session.requests[-1].spec)
        await pilot.post(NextRunPredicted(too_much))
        await pilot.press("r")
        text = " ".join(app.text.split())
        assert "Predicted to need 48.0 GiB of 20.0 GiB (free): 28.0 GiB too much" in text
        await pilot.press("n")
        assert not started
        await pilot.press("r", "y")
        assert [spec.name for spec in started] == ["tiny-llama"]
        await pilot.post(NextRunPredicted(msgspec.structs.replace(too_much, fit=FIT)))
        await pilot.press("r")
        assert len(started) == 2, "what fits is not asked about"


async def test_the_prediction_of_earlier_settings_asks_nothing(home, monkeypatch):
    started = []
    async with running(home, a_snapshot(None)) as (app, pilot):
        monkeypatch.setattr(app.session.run_control, "start", lambda spec, after: started.append(spec))
        await pilot.post(NextRunPredicted(NextRunMemory(TOO_MUCH, spec=app.session.requests[-1].spec)))
        assert app.session.set_knobs([("seq_len", "16")])
        await pilot.pause()
        await pilot.press("r")
        assert [spec.knobs["seq_len"] for spec in started] == [16]


@pytest.mark.parametrize(
    ("fit", "machine"),
    [
        (replace(TOO_MUCH, available=AvailableMemory(20 * GIB, "memory_limit", from_memory_limit=True)), CPU),
        (TOO_MUCH, Machine(device="cuda", gpus=(), nvml_gpus=(), cores=2)),
        (a_fit(19 * 1024, FREE), CPU),
        (replace(TOO_MUCH, available=None), CPU),
        (None, CPU),
    ],
)
def test_where_nothing_but_the_run_would_end_there_is_no_question(fit, machine):
    assert swap_notice(fit, machine) == ""
    assert swap_notice(TOO_MUCH, CPU)
    assert "less than memory_limit" in swap_notice(
        replace(TOO_MUCH, available=AvailableMemory(GIB, "free, less than memory_limit")), CPU
    )
