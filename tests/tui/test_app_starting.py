"""Starting a run from the screen: once however often `r` is pressed, and what a question does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from recorded import START_NS, S, a_result, a_run, a_step, write_lines
from still import StillApp, a_snapshot, own_supervisor, running, until, until_true
from textual.pilot import Pilot

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_lines import Event
from trainfast_runner.running import launch
from trainfast_runner.running.scripts import script_plan
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.control.run_control import RunControl

OLD, NEW = "20261121-054455-tiny-llama-7f3a", "20261121-060000-tiny-llama-0001"


SCRIPT = SimpleNamespace(unconfirmed=[], hooks_blocked=None, steps_from_log=None)


class Launches:
    """Stands in for the launcher: counts, and holds every start until `go` is set."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.count = 0
        self.refusal: UserError | None = None
        self.go = threading.Event()

    def plan(self, spec: object, python: str | None) -> object:
        self.count += 1
        return SimpleNamespace(devices_reason=None, script=SCRIPT)

    def start(self, plan: object, home: Home, on_wait: object) -> Path:
        self.go.wait(60)
        if self.refusal is not None:
            raise self.refusal
        return a_run(home, NEW, with_result=False)


@pytest.fixture
def launches(home: Home, monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches(home)
    monkeypatch.setattr(script_plan, "plan_spec", found.plan)
    monkeypatch.setattr(launch, "start", found.start)
    return found


async def show(pilot: Pilot[Any], directory: Path, second: int = 23) -> None:
    pilot.app.post(SnapshotTaken(a_snapshot(directory, second=second)))
    await pilot.pause()


def live(home: Home, hold: Callable[[Path], None], run_id: str = OLD, **options: Any) -> Path:
    directory = a_run(home, run_id, with_result=False, **options)
    hold(directory)
    running = Event(t_ns=START_NS + S, kind="state", state="running")
    write_lines(directory / "events.jsonl", [own_supervisor(), running])
    return directory


def end(directory: Path) -> None:
    """The supervisor has written how the run ended."""
    run = read_run_file(directory)
    assert run is not None
    result = a_result(run, [], "finished", "50 of 50 steps", False, None)
    (directory / "result.json").write_bytes(msgspec.json.encode(result))


async def test_r_pressed_twice_starts_one_run(home: Home, launches: Launches, hold: Callable[[Path], None]) -> None:
    app = StillApp(home)
    old = a_run(home)
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, old)
        await pilot.press("r", "r")
        await until(pilot, "A run is starting; press r again")
        await pilot.press("s")
        await until(pilot, "The run is starting; press s again")
        launches.go.set()
        await until_true(
            pilot, lambda: not app.session.run_control.pending.is_pending or (home.runs / NEW).exists(), "the run"
        )
        # Its supervisor runs, and what is on the screen is still the run before.
        await show(pilot, old)
        await pilot.press("r")
        await until(pilot, "A run is starting; press r again")
        assert launches.count == 1
        hold(home.directory(NEW))
        await show(pilot, home.directory(NEW))
        assert not app.session.run_control.pending.is_pending
        await pilot.press("r")
        await until(pilot, "y  stop it, then run")


async def test_a_script_that_is_started_has_the_notices_that_the_command_prints(
    home: Home, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SimpleNamespace(unconfirmed=["lr"], hooks_blocked="python -I", steps_from_log=None)
    plan = SimpleNamespace(devices_reason="GPU 0 is joined", script=script)
    monkeypatch.setattr(script_plan, "plan_spec", lambda spec, python: plan)
    async with running(home, size=(200, 40)) as (_, pilot):
        await show(pilot, a_run(home))
        await pilot.press("r")
        text = await until(pilot, "lr: set without a flag, so the script may keep its own")
        assert "its steps are not seen: python -I; GPU 0 is joined" in " ".join(text.split())
        launches.go.set()


@pytest.mark.parametrize("key", ["b", "B"])
async def test_the_refusal_of_a_run_is_none_of_the_search_on_the_screen(
    home: Home, launches: Launches, key: str
) -> None:
    launches.refusal = UserError("no room for it", key="batch_size")
    async with running(home, size=(160, 40)) as (_, pilot):
        await show(pilot, a_run(home))
        await pilot.press("r")
        await until(pilot, "Starting tiny-llama")
        await pilot.press(key)
        await until(pilot, "Enter start")
        launches.go.set()
        text = await until(pilot, "The run was refused: no room for it")
        assert "Refused: no room" not in text


async def test_after_a_refusal_r_starts_again(home: Home, launches: Launches) -> None:
    launches.refusal = UserError("no room for it", key="batch_size")
    launches.go.set()
    async with running(home, size=(120, 40)) as (_, pilot):
        await show(pilot, a_run(home))
        await pilot.press("r")
        await until(pilot, "Refused: no room for it")
        launches.refusal = UserError("still no room for it", key="batch_size")
        await pilot.press("r")
        await until(pilot, "Refused: still no room for it")
        assert launches.count == 2


async def test_a_started_run_is_followed_beside_a_newer_live_one(home: Home, hold: Callable[[Path], None]) -> None:
    from trainfast_tui.live.reader import Reader

    live(home, hold, "20991231-000000-tiny-llama-ffff")
    started = live(home, hold, NEW)
    seen: list[Path | None] = []
    seen_often = threading.Event()

    def post(snapshot: Any) -> None:
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


async def test_below_a_question_the_run_goes_on_being_painted(home: Home, hold: Callable[[Path], None]) -> None:
    directory = live(home, hold, steps=10)
    async with running(home, size=(120, 40)) as (_, pilot):
        await show(pilot, directory)
        await pilot.press("r")
        await until(pilot, "y  stop it, then run")
        with (directory / "steps.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(a_step(11)) + b"\n")
        await show(pilot, directory)
        # A pause of the pilot paints the screen on top; the one below follows with its own timer.
        text = await until(pilot, "step 11 of 50")
        assert "y  stop it, then run" in text


async def test_a_request_for_a_run_that_ends_meanwhile_closes_and_says_so(
    home: Home, hold: Callable[[Path], None]
) -> None:
    directory = live(home, hold)
    async with running(home, size=(120, 40)) as (app, pilot):
        await show(pilot, directory)
        await pilot.press("r")
        await until(pilot, "y  stop it, then run")
        end(directory)
        await show(pilot, directory)
        text = await until(pilot, "has ended by itself: finished. r starts the next run.")
        assert "y  stop it, then run" not in text
        assert app.screen is app.main


def test_a_preset_that_is_not_there_fails_before_the_app_opens(home: Home) -> None:
    from trainfast_tui.app import run_app

    with pytest.raises(UserError, match="there is no preset 'nope'"):
        run_app(home, preset="nope", python=None, ascii=False, plain_output=False)


async def test_s_gives_up_the_wait_for_another_launch_and_nothing_is_started(
    home: Home, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(plan: object, home: Home, on_wait: Callable[[str], None]) -> Path:
        on_wait("another launch")
        while not launches.go.wait(0.01):
            on_wait("")
        return a_run(home, NEW, with_result=False)

    monkeypatch.setattr(launch, "start", wait)
    async with running(home, size=(120, 40)) as (app, pilot):
        pilot.app.post(SnapshotTaken(a_snapshot(None)))
        await pilot.press("r")
        await until(pilot, "Waiting for another launch; s gives up")
        await pilot.press("s")
        text = await until(pilot, "given up; nothing was started")
        assert "Refused" not in text, "it is what was asked for"
        assert not app.session.run_control.pending.is_pending


def test_giving_up_a_wait_that_ends_meanwhile_is_no_error(home: Home) -> None:
    class Ending(RunControl):
        """Its thread ends the wait right after the first look at it."""

        event = threading.Event()
        looks = iter((event,))

        @property
        def _giving_up(self) -> threading.Event | None:
            return next(self.looks, None)

        @_giving_up.setter
        def _giving_up(self, value: threading.Event | None) -> None: ...

    Ending(home, lambda message: None, None).give_up()
    assert Ending.event.is_set(), "what waits on it may still look"
