"""An empty home, a quiet clock, and runs that a test keeps alive."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded import a_search, best_going_on, going_on
from still import Conducted, Lock, Starts, settled

from trainfast_runner.records.home import Home
from trainfast_runner.search import control
from trainfast_tui.control import threads


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home without runs."""
    return Home(tmp_path / "home").create()


@pytest.fixture(autouse=True)
def _one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Dates, presets and colours do not depend on who runs the tests."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("COLORFGBG", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(autouse=True)
def _no_guess(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A key has had its effect when `press` returns, and `pause` returns when the screen is what it will be."""
    for module in ("textual.app", "textual.pilot"):
        monkeypatch.setattr(f"{module}.wait_for_idle", settled)
    begun: list[threading.Thread] = []

    class NotedThread(threading.Thread):
        def start(self) -> None:
            super().start()
            begun.append(self)  # not before: a thread that has not begun cannot be joined

    monkeypatch.setattr(threads, "threading", SimpleNamespace(Thread=NotedThread, Event=threading.Event))
    yield
    # What a key has begun would otherwise go on under the next test, and with the real parts in place of the stand-ins.
    for thread in begun:
        # The predictor may wait for the test that has made its tracer.
        thread.join(1 if thread.name == "trainfast-predict" else 60)


def locks(file: str, kind: int) -> Iterator[Lock]:
    """Take this lock of any directory, as its processes would, until the test ends."""
    held: list[int] = []

    def lock(directory: Path) -> None:
        fd = os.open(directory / file, os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, kind)
        held.append(fd)

    yield lock
    for fd in held:
        os.close(fd)


@pytest.fixture
def hold() -> Iterator[Lock]:
    """Keep a run alive."""
    yield from locks("alive.lock", fcntl.LOCK_SH)


@pytest.fixture
def conduct() -> Iterator[Lock]:
    """Keep a search going, as its conductor would."""
    yield from locks("search.lock", fcntl.LOCK_EX)


@pytest.fixture
def conducted(home: Home, conduct: Lock) -> Conducted:
    """Write a search that its conductor works on."""

    def write(lines: list[Any]) -> Path:
        conduct(search := a_search(home, lines))
        return search

    return write


@pytest.fixture
def live_search(conducted: Conducted) -> Path:
    """A batch search that goes on."""
    return conducted(going_on())


@pytest.fixture
def live_best(conducted: Conducted) -> Path:
    """A best-fit search that goes on."""
    return conducted(best_going_on())


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Searches are asked for and not started."""
    found = Starts()
    monkeypatch.setattr(control, "start_search", found.start)
    return found


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The searches that were cancelled, which ends none of them."""
    directories: list[Path] = []
    monkeypatch.setattr(control, "cancel", lambda directory: directories.append(directory) or True)
    return directories
