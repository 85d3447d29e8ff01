"""Waiting for the GPUs to cool before a run: asked for with a key, counted down, and given up with another."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in
from recorded import a_run
from stand_in import Gpu, Machine
from still import StillApp, a_snapshot, running, screen_text, until
from textual.pilot import Pilot

from trainfast_runner.machine import cooling
from trainfast_runner.records.home import Home
from trainfast_runner.running import launch
from trainfast_runner.running.scripts import script_plan
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.control.run_control import RunControl

WARM_C = 71
SCRIPT = SimpleNamespace(unconfirmed=[], hooks_blocked=None, steps_from_log=None)


class Warm:
    """A GPU that cools only when it is told to, and a launcher that starts nothing but a recorded run."""

    def __init__(self, home: Home) -> None:
        self.gpu = Gpu(uuid="GPU-0", temperature=WARM_C)
        self.machine = Machine([self.gpu])
        self.started = threading.Event()
        self._home = home

    def plan(self, spec: object, python: str | None) -> object:
        return SimpleNamespace(watched_uuids={"GPU-0"}, devices_reason=None, script=SCRIPT)

    def start(self, plan: object, home: Home, on_wait: object) -> Path:
        self.started.set()
        return a_run(self._home, "20261121-060000-tiny-llama-0001", with_result=False)


@pytest.fixture
def warm(home: Home, monkeypatch: pytest.MonkeyPatch) -> Warm:
    found = Warm(home)
    monkeypatch.setattr(script_plan, "plan_spec", found.plan)
    monkeypatch.setattr(launch, "start", found.start)
    monkeypatch.setattr(cooling, "POLL_S", 0.01)
    return found


async def asked(pilot: Pilot[Any], degrees: str) -> None:
    pilot.app.post(SnapshotTaken(a_snapshot(None)))
    await pilot.pause()
    await pilot.press("C")
    await pilot.pause()
    await pilot.press(*degrees, "enter")
    await pilot.pause()


async def test_a_run_waits_until_its_gpus_are_cool_and_counts_down(home: Home, warm: Warm) -> None:
    app = StillApp(home)
    with stand_in.installed(warm.machine):
        async with app.run_test(size=(160, 40)) as pilot:
            await asked(pilot, "55")
            assert "Each run waits until its GPUs are below 55 °C." in screen_text(app)
            await pilot.press("r")
            await until(pilot, "cooling GPU 0: 71 °C, waiting for less than 55 °C")
            assert not warm.started.is_set()
            warm.gpu.temperature = 56
            await until(pilot, "cooling GPU 0: 56 °C")
            warm.gpu.temperature = 54
            assert await asyncio.to_thread(warm.started.wait, 10)


async def test_s_gives_the_wait_up_and_nothing_is_started(home: Home, warm: Warm) -> None:
    app = StillApp(home)
    with stand_in.installed(warm.machine):
        async with app.run_test(size=(160, 40)) as pilot:
            await asked(pilot, "55")
            await pilot.press("r")
            await until(pilot, "s gives up")
            await pilot.press("s")
            text = await until(pilot, "given up; nothing was started")
            assert "Refused" not in text, "it is what was asked for"
            assert not app.session.run_control.pending.is_pending
            assert not warm.started.is_set()


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


async def test_what_is_no_temperature_is_refused_where_it_is_typed(home: Home) -> None:
    async with running(home, size=(120, 40)) as (app, pilot):
        await asked(pilot, "500")
        assert "500 is not a temperature to wait for" in screen_text(app)
        assert app.session.run_control.cool_to_c is None


async def test_without_a_temperature_to_wait_for_nothing_starts(home: Home, warm: Warm) -> None:
    app = StillApp(home)
    with stand_in.installed(Machine([])):
        async with app.run_test(size=(160, 40)) as pilot:
            await asked(pilot, "55")
            await pilot.press("r")
            await until(pilot, "there is no temperature to wait for")
            assert not warm.started.is_set()
