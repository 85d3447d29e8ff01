"""Ending a process from the monitor: the questions, the signals, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from monitored import opened, the_machine
from recorded import MIB, START_NS, a_run, write_lines
from still import running, screen_text

from trainfast_runner.errors import UserError
from trainfast_runner.machine.process_list import ProcessRow
from trainfast_runner.machine.processes import identify
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_lines import Event
from trainfast_tui.control.messages import SnapshotTaken


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of one's own that ignores SIGTERM once it has said so."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


async def test_ending_a_process_asks_first_then_offers_sigkill(home: Home, sleeper: subprocess.Popen[bytes]) -> None:
    row = ProcessRow(sleeper.pid, identify(sleeper.pid), "anna", True, "sleeper --long", 0.0, MIB, 5.0)
    snapshot = the_machine(0, rows=(row,))
    async with running(home, size=(120, 40)) as (app, pilot):
        await opened(pilot, snapshot)
        await pilot.press("x")
        await pilot.pause()
        text = screen_text(app)
        assert f"End process {sleeper.pid}?" in text
        assert "sleeper --long" in text
        assert "send SIGTERM" in text
        await pilot.press("n")
        await pilot.pause()
        assert sleeper.poll() is None
        await pilot.press("x", "y")
        await pilot.pause()
        assert "SIGTERM sent" in screen_text(app)
        assert "x again offers SIGKILL" in screen_text(app)
        assert sleeper.poll() is None
        await pilot.press("x")
        await pilot.pause()
        assert "it still runs. SIGKILL gives it no chance" in screen_text(app)
        await pilot.press("y")
        await pilot.pause()
        assert sleeper.wait(60) == -signal.SIGKILL
        app.post(SnapshotTaken(snapshot))
        await pilot.pause()
        assert f"Process {sleeper.pid} has ended." in screen_text(app)


async def test_f18_signals_take_the_key_y_alone(home: Home, sleeper: subprocess.Popen[bytes]) -> None:
    row = ProcessRow(sleeper.pid, identify(sleeper.pid), "anna", True, "sleeper --long", 0.0, MIB, 5.0)
    async with running(home, size=(120, 40)) as (app, pilot):
        await opened(pilot, the_machine(0, rows=(row,)))
        await pilot.press("x", "enter")
        await pilot.pause()
        assert "y  send SIGTERM" in screen_text(app), "Enter does not answer"
        await pilot.press("y", "x", "enter")
        await pilot.pause()
        assert "y  send SIGKILL" in screen_text(app)
        assert sleeper.poll() is None
        await pilot.press("escape")
        await pilot.pause()
        assert "send SIGKILL" not in screen_text(app)


async def test_a_process_of_a_run_is_ended_by_stopping_the_run(
    home: Home, hold: Callable[[Path], None], sleeper: subprocess.Popen[bytes]
) -> None:
    directory = a_run(home, with_result=False)
    hold(directory)
    supervisor = identify(sleeper.pid)
    assert supervisor is not None
    started = Event(t_ns=START_NS, kind="supervisor", pid=supervisor.pid, start_ticks=supervisor.start_ticks)
    write_lines(directory / "events.jsonl", [started])
    row = ProcessRow(
        sleeper.pid,
        supervisor,
        "anna",
        True,
        "python -m trainfast_runner.running.supervision",
        0.0,
        MIB,
        5.0,
    )
    async with running(home, size=(120, 40)) as (app, pilot):
        await opened(pilot, the_machine(0, rows=(row,)))
        await pilot.press("x")
        await pilot.pause()
        text = screen_text(app)
        assert f"Stop the run {directory.name}?" in text
        assert f"Process {sleeper.pid} is its supervisor." in text
        assert "send SIGTERM" not in text
        await pilot.press("y")
        for thread in threading.enumerate():
            if thread.name == "trainfast-stop":
                thread.join(60)
        await pilot.pause()
        assert "The run was asked to stop." in screen_text(app)


async def test_what_is_not_ones_own_or_not_visible_is_refused_without_a_question(home: Home) -> None:
    own = ProcessRow(os.getpid(), identify(os.getpid()), "me", True, "trainfast-tui")
    for row, words in (
        (own, "press q to quit"),
        (ProcessRow(7, devices=((0, None),)), "not visible from here, so"),
    ):
        async with running(home, size=(120, 40)) as (app, pilot):
            await opened(pilot, the_machine(0, rows=(row,)))
            await pilot.press("x")
            await pilot.pause()
            assert words in screen_text(app)
            assert "send SIGTERM" not in screen_text(app)


async def test_a_process_is_not_ended_while_the_runs_cannot_be_read(
    home: Home, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Home) -> list[str]:
        raise UserError("the runs cannot be listed: no permission", key="TRAINFAST_HOME")

    row = ProcessRow(sleeper.pid, identify(sleeper.pid), "anna", True, "sleeper --long", 0.0, MIB, 5.0)
    async with running(home, size=(120, 40)) as (app, pilot):
        await opened(pilot, the_machine(0, rows=(row,)))
        monkeypatch.setattr(Home, "run_ids", refused)
        await pilot.press("x")
        await pilot.pause()
        assert "the runs cannot be listed: no permission" in screen_text(app)
        assert f"End process {sleeper.pid}?" not in screen_text(app)
