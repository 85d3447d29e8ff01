"""Ending a process from the monitor: the questions, the signals, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from recorded import MIB, START_NS, a_run, write_lines
from still import Lock, StillPilot, has, running, the_machine

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import ProcessRow, identify
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_lines import Event


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of one's own that ignores SIGTERM once it has said so."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def row_of(process: subprocess.Popen[bytes]) -> ProcessRow:
    return ProcessRow(process.pid, identify(process.pid), "anna", True, "sleeper --long", 0.0, MIB, 5.0)


async def asked(pilot: StillPilot, key: str) -> str:
    """Press a key and wait for its question: a thread looks at the process."""
    await pilot.press(key)
    return await pilot.until("n  leave it")


async def test_f18_ending_a_process_asks_first_then_offers_sigkill(
    home: Home, sleeper: subprocess.Popen[bytes]
) -> None:
    snapshot = the_machine(0, rows=(row_of(sleeper),))
    async with running(home, size=(120, 40)) as (_, pilot):
        await pilot.monitor(snapshot)
        text = await asked(pilot, "x")
        has(text, f"End process {sleeper.pid}?", "sleeper --long", "send SIGTERM")
        assert "y  send SIGTERM" in await pilot.press("enter"), "y alone answers"
        await pilot.press("n")
        assert sleeper.poll() is None
        await asked(pilot, "x")
        text = await pilot.press("y")
        has(text, "SIGTERM sent", "x again offers SIGKILL")
        assert sleeper.poll() is None
        assert "it still runs. SIGKILL gives it no chance" in await asked(pilot, "x")
        assert "y  send SIGKILL" in await pilot.press("enter")
        await pilot.press("y")
        assert sleeper.wait(60) == -signal.SIGKILL
        assert f"Process {sleeper.pid} has ended." in await pilot.show(snapshot)


async def test_a_process_of_a_run_is_ended_by_stopping_the_run(
    home: Home, hold: Lock, sleeper: subprocess.Popen[bytes]
) -> None:
    directory = a_run(home, with_result=False)
    hold(directory)
    supervisor = identify(sleeper.pid)
    started = Event(t_ns=START_NS, kind="supervisor", pid=supervisor.pid, start_ticks=supervisor.start_ticks)
    write_lines(directory / "events.jsonl", [started])
    async with running(home, size=(120, 40)) as (app, pilot):
        await pilot.monitor(the_machine(0, rows=(row_of(sleeper),)))
        text = await asked(pilot, "x")
        has(text, f"Stop {directory.name}?", f"Process {sleeper.pid} is its supervisor.")
        assert "send SIGTERM" not in text
        await pilot.press("y")
        for thread in threading.enumerate():
            if thread.name == "trainfast-stop":
                thread.join(60)
        await pilot.pause()
        assert "The run was asked to stop." in app.text


async def test_what_is_not_ones_own_or_not_visible_is_refused_without_a_question(home: Home) -> None:
    own = ProcessRow(os.getpid(), identify(os.getpid()), "me", True, "trainfast-tui")
    for row, words in ((own, "press Q to quit"), (ProcessRow(7, devices=((0, None),)), "not visible from here, so")):
        async with running(home, size=(120, 40)) as (_, pilot):
            await pilot.monitor(the_machine(0, rows=(row,)))
            text = await pilot.press("x")
            assert words in text
            assert "send SIGTERM" not in text


async def test_a_process_is_not_ended_while_the_runs_cannot_be_read(
    home: Home, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Home) -> list[str]:
        raise UserError("the runs cannot be listed: no permission", key="TRAINFAST_HOME")

    async with running(home, size=(120, 40)) as (_, pilot):
        await pilot.monitor(the_machine(0, rows=(row_of(sleeper),)))
        monkeypatch.setattr(Home, "run_ids", refused)
        await pilot.press("x")
        text = await pilot.until("the runs cannot be listed: no permission")
        assert f"End process {sleeper.pid}?" not in text
