"""The start of a batch search on the screen: its question, what stands in its way, and taking it up again."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded import START_NS, S, a_run, write_lines
from searched import (
    CONDUCTED,
    FULL,
    NOW_S,
    SMALL,
    Starts,
    a_search,
    answered,
    asked,
    going_on,
    opened,
    show,
)
from still import own_supervisor, running, screen_text, until, until_true
from textual.pilot import Pilot

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.search_directories import PAUSE_FILE
from trainfast_runner.search import control
from trainfast_runner.search.journal.batch import BatchEnded
from trainfast_runner.worker.shared.lock_files import SEARCH_LOCK_FILE


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    found = Starts()
    monkeypatch.setattr(control, "start_search", found.start)
    return found


def lock_of_conductor(search: Path) -> int:
    """The descriptor of the search's lock: to close it is the conductor's end."""
    conductor = os.open(search / SEARCH_LOCK_FILE, os.O_RDWR)
    fcntl.flock(conductor, fcntl.LOCK_EX)
    return conductor


async def asked_for(pilot: Pilot[Any]) -> None:
    """Ask for a search where there was none; it has not started yet."""
    await show(pilot, None)
    await pilot.press("b", "enter")
    await until(pilot, "The knobs are being checked")


async def test_the_answer_for_the_same_knobs_is_shown_again_without_another_search(home: Home, starts: Starts) -> None:
    search = a_search(home, answered())
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, search)
        await pilot.press("enter")
        await pilot.press("b")
        await pilot.pause()
        assert "is the largest that fits" in screen_text(app)
        assert starts.asked == []
        assert "f5 restart" in screen_text(app).splitlines()[-1]
        starts.directory = search
        await pilot.press("f5")
        await until(pilot, "The knobs are being checked")
        await until_true(pilot, lambda: starts.asked, "the start")
        assert starts.asked[0][1], "an answered search starts anew"


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The searches that were cancelled, which ends none of them."""
    directories: list[Path] = []
    monkeypatch.setattr(control, "cancel", lambda directory: directories.append(directory) or True)
    return directories


async def stopped_while_it_starts(pilot: Pilot[Any], starts: Starts, search: Path, cancelled: list[Path]) -> None:
    """Press `s`, let the start go on, and show the search until it is cancelled."""
    await pilot.press("s")
    await until(pilot, "Stopping as soon as the search has started")
    starts.go.set()
    while not cancelled:
        await show(pilot, search)


async def test_b_starts_a_search_of_the_knobs_and_s_while_it_starts_stops_it(
    home: Home, starts: Starts, conduct: Callable[[Path], None], cancelled: list[Path]
) -> None:
    search = starts.directory = a_search(home, [asked(), CONDUCTED])
    conduct(search)
    starts.go.clear()
    async with running(home, size=FULL) as (app, pilot):
        await show(pilot, None)
        await pilot.press("right", "b", "enter")
        await until(pilot, "The knobs are being checked")
        assert not app.session.requests[-1].may_trace
        await pilot.press("enter")
        await pilot.pause()
        assert "The knobs are being checked" in screen_text(app), "there is no answer to apply, and none to miss"
        await pilot.press("space")
        await until(pilot, "The search is starting; press the key again once it runs.")
        await stopped_while_it_starts(pilot, starts, search, cancelled)
        assert starts.asked[0][0]["batch_size"] == 16
        assert not starts.asked[0][1], "an unfinished journal is continued"


async def test_s_while_an_unfinished_search_starts_again_stops_it_though_the_snapshot_is_older(
    home: Home, starts: Starts, cancelled: list[Path]
) -> None:
    broken = BatchEnded(t_ns=START_NS + NOW_S * S, state="cancelled")
    search = starts.directory = a_search(home, [*going_on(), broken])
    starts.go.clear()
    async with running(home, size=FULL) as (_, pilot):
        await opened(pilot, search)
        await pilot.press("enter")
        await until(pilot, "The knobs are being checked")
        # Each snapshot still shows the search as it was before its conductor took the lock.
        await stopped_while_it_starts(pilot, starts, search, cancelled)
    assert cancelled == [search]


async def test_a_continued_search_that_ends_at_once_is_notified(home: Home, starts: Starts) -> None:
    search = starts.directory = a_search(home, [*going_on(), BatchEnded(t_ns=START_NS + NOW_S * S, state="cancelled")])
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, search)
        await pilot.press("enter")
        await until(pilot, "The knobs are being checked")
        await until_true(pilot, lambda: starts.asked, "the start")
        await pilot.press("escape")
        await show(pilot, search)
        assert "The search has ended" not in screen_text(app), "the reader still shows it as it was before"
        write_lines(search / "journal.jsonl", answered())
        await show(pilot, search)
        await until(pilot, "The search has ended: batch_size 42 is the largest that fits")
        app.main.notify("")
        await show(pilot, search)
        assert "The search has ended" not in screen_text(app), "once is enough"


async def test_b_asks_first_and_escape_starts_nothing(home: Home, starts: Starts) -> None:
    async with running(home, size=SMALL) as (app, pilot):
        await show(pilot, None)
        await pilot.press("right", "b")
        text = screen_text(app)
        assert "Enter starts the search; Esc goes back." in text
        assert "batch_size=16" in text
        assert "not known before the first sizes have run" in text
        assert text.splitlines()[-1].startswith("Enter start  Esc back"), "there is nothing to pause yet"
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen is app.main
        assert starts.asked == []


async def test_the_question_names_an_unfinished_search_of_the_same_knobs(home: Home, starts: Starts) -> None:
    broken = BatchEnded(t_ns=START_NS + NOW_S * S, state="cancelled")
    search = starts.directory = a_search(home, [*going_on(), broken])
    async with running(home, size=SMALL) as (app, pilot):
        await opened(pilot, search)
        text = screen_text(app)
        assert "continues the search that has tried" in text
        assert "Enter continues the unfinished search; Esc goes back." in text
        assert "1.00 GiB a rank, as it began" in text
        await pilot.press("enter")
        await until_true(pilot, lambda: starts.asked, "the start")
        assert not starts.asked[0][1], "an unfinished journal is continued"


async def test_a_search_that_is_refused_says_why(home: Home, starts: Starts) -> None:
    starts.refusal = UserError("memory_limit is below what the parameters need", key="memory_limit")
    async with running(home, size=FULL) as (app, pilot):
        await show(pilot, None)
        await pilot.press("b", "enter")
        await until(pilot, "Refused: memory_limit is below what the parameters need")
        assert not app.session.searches.batch.is_active
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen is app.main


async def test_a_refusal_stands_below_a_question_that_is_longer_than_the_screen(home: Home, starts: Starts) -> None:
    starts.refusal = UserError("memory_limit is too small", key="memory_limit")
    async with running(home, size=(40, 9)) as (_, pilot):
        await show(pilot, None)
        await pilot.press("b", "enter")
        text = await until(pilot, "Refused: memory_limit is too small")
    assert "more lines: " in text


async def test_a_refusal_that_comes_under_the_help_stands_there_when_the_help_is_closed(
    home: Home, starts: Starts
) -> None:
    starts.refusal = UserError("memory_limit is below what the parameters need", key="memory_limit")
    starts.go.clear()
    async with running(home, size=FULL) as (app, pilot):
        await asked_for(pilot)
        await pilot.press("question_mark")
        starts.go.set()
        await until_true(pilot, lambda: not app.session.searches.batch.is_active, "the refusal")
        await pilot.press("escape")
        await show(pilot, None)
        text = screen_text(app)
        assert "Refused: memory_limit is below what the parameters need" in text
        assert "The knobs are being checked" not in text


async def test_a_refusal_is_not_shown_over_the_search_before(home: Home, starts: Starts) -> None:
    starts.refusal = UserError("search max-batch cannot try batch sizes with strategy=pp", key="strategy")
    async with running(home, size=FULL) as (_, pilot):
        await show(pilot, a_search(home, answered()))
        await pilot.press("right", "b", "enter")
        text = await until(pilot, "Refused: search max-batch cannot try batch sizes with strategy=pp")
        assert "is the largest that fits" not in text


async def test_a_start_that_another_search_prevents_shows_that_search(
    home: Home, starts: Starts, live_search: Path
) -> None:
    starts.refusal = UserError("cpu in use by a search", key="devices")
    starts.go.clear()
    async with running(home, size=FULL) as (app, pilot):
        await asked_for(pilot)
        await show(pilot, live_search)
        starts.go.set()
        await until(pilot, "Refused: cpu in use by a search")
        await show(pilot, live_search)
        assert "probing: batch_size 42" in screen_text(app)
        await pilot.press("space")
        await until_true(pilot, (live_search / PAUSE_FILE).exists, "the pause")


async def test_a_live_run_is_named_first_and_stopped_only_when_that_is_wanted(
    home: Home, starts: Starts, hold: Callable[[Path], None]
) -> None:
    run = a_run(home, with_result=False)
    hold(run)
    write_lines(run / "events.jsonl", [own_supervisor(), Event(t_ns=START_NS + S, kind="state", state="running")])
    async with running(home, size=FULL) as (_, pilot):
        await show(pilot, None, run)
        await pilot.press("b", "enter")
        text = await until(pilot, "y  stop it, then search")
        assert "20261121-054455-tiny-llama-7f3a is running and uses the device." in " ".join(text.split())
        await pilot.press("n")
        await pilot.pause()
        assert starts.asked == []


async def test_f5_asks_before_it_stops_a_live_run(home: Home, starts: Starts, hold: Callable[[Path], None]) -> None:
    run = a_run(home, with_result=False)
    hold(run)
    write_lines(run / "events.jsonl", [own_supervisor(), Event(t_ns=START_NS + S, kind="state", state="running")])
    search = a_search(home, answered())
    async with running(home, size=FULL) as (_, pilot):
        await opened(pilot, search)
        await show(pilot, search, run)
        await pilot.press("f5")
        await until(pilot, "y  stop it, then search")
        await pilot.press("n")
        await pilot.pause()
        assert starts.asked == []


async def test_a_search_whose_conductor_is_gone_says_so_and_f5_continues_it(home: Home, starts: Starts) -> None:
    search = starts.directory = a_search(home, going_on())
    conductor = lock_of_conductor(search)
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, search)
        os.close(conductor)
        await show(pilot, search)
        assert "✗ interrupted: no process works on it; f5 continues" in screen_text(app)
        await pilot.press("f5")
        await until(pilot, "The knobs are being checked")
        await pilot.press("f5")
        await until(pilot, "The search is starting.")
        await until_true(pilot, lambda: starts.asked, "the start")
    assert [fresh for _, fresh in starts.asked] == [False]


async def test_f5_continues_the_search_on_the_screen_though_a_knob_was_turned_since(home: Home, starts: Starts) -> None:
    search = starts.directory = a_search(home, going_on())
    conductor = lock_of_conductor(search)
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, search)
        await pilot.press("escape")
        assert app.session.next_run is not None
        app.session.set_next_run(app.session.next_run.with_value("optimizer", "sgd"))
        await pilot.press("b")
        await show(pilot, search)
        os.close(conductor)
        await show(pilot, search)
        await pilot.press("f5")
        await until_true(pilot, lambda: starts.asked, "the start")
    assert starts.asked[0][0]["optimizer"] == "adamw"


async def test_b_pressed_before_anything_is_known_waits_for_the_search_that_goes_on(
    home: Home, conduct: Callable[[Path], None], starts: Starts
) -> None:
    search = a_search(home, going_on())
    conduct(search)
    async with running(home, size=SMALL) as (app, pilot):
        await pilot.press("b")
        assert app.screen is app.main
        await show(pilot, search)
        assert "probing: batch_size 42" in await until(pilot, "largest batch")
        assert starts.asked == []


async def test_the_notice_of_looking_for_a_search_goes_when_none_is_found(home: Home) -> None:
    async with running(home, size=SMALL) as (app, pilot):
        await pilot.press("b")
        assert "Looking for a live search…" in screen_text(app)
        await show(pilot, None)
        await until(pilot, "Enter starts the search")
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen is app.main
        assert "Looking for a live search" not in screen_text(app)


async def test_without_a_limit_on_a_cpu_it_says_up_to_what_it_searches(home: Home, starts: Starts) -> None:
    starts.go.clear()
    async with running(home, size=SMALL) as (_, pilot):
        await show(pilot, None)
        await pilot.press("b")
        text = " ".join((await until(pilot, "No memory_limit")).split())
        assert re.search(r"the search uses up to [\d.]+ [GM]iB of this machine's memory, set as a real limit", text)
        assert starts.asked == [], "nothing starts before Enter"
        await pilot.press("enter")
        starts.refusal = UserError("enough", key="memory_limit")
        starts.go.set()
        await until(pilot, "Refused: enough")
