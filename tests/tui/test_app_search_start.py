"""The start of a batch search on the screen: its question, what stands in its way, and taking it up again."""

import fcntl
import os
import re

import pytest
from recorded import CONDUCTED, START_NS, S, a_search, answered, asked, going_on
from still import MIDDLE, NOW_S, SMALL, a_live_run, has, running

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import PAUSE_FILE
from trainfast_runner.search.batch_journal import BatchEnded
from trainfast_runner.worker.shared.host import SEARCH_LOCK_FILE
from trainfast_tui.live.snapshot import SearchKind


def lock_of_conductor(search):
    """The descriptor of the search's lock: to close it is the conductor's end."""
    conductor = os.open(search / SEARCH_LOCK_FILE, os.O_RDWR)
    fcntl.flock(conductor, fcntl.LOCK_EX)
    return conductor


async def asked_for(pilot):
    """Ask for a search where there was none; it has not started yet."""
    await pilot.show_search(None)
    await pilot.press("b", "enter")
    await pilot.until("The knobs are being checked")


async def test_the_answer_for_the_same_knobs_is_shown_again_without_another_search(home, starts):
    search = a_search(home, answered())
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.opened(search)
        await pilot.press("enter")
        assert "is the largest that fits" in await pilot.press("b")
        assert starts.asked == []
        assert "F5 restart" in app.text.splitlines()[-1]
        starts.directory = search
        await pilot.press("f5")
        await pilot.until("The knobs are being checked")
        await pilot.until_true(lambda: starts.asked, "the start")
        assert starts.asked[0].fresh, "an answered search starts anew"


async def stopped_while_it_starts(pilot, starts, search, cancelled):
    """Press `s`, let the start go on, and show the search until it is cancelled."""
    await pilot.press("s")
    await pilot.until("Stopping as soon as the search has started")
    starts.go.set()
    while not cancelled:
        await pilot.show_search(search)


async def test_b_starts_a_search_of_the_knobs_and_s_while_it_starts_stops_it(home, starts, conduct, cancelled):
    search = starts.directory = a_search(home, [asked(), CONDUCTED])
    conduct(search)
    starts.go.clear()
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.show_search(None)
        await pilot.press("right", "b", "enter")
        await pilot.until("The knobs are being checked")
        assert not app.session.requests[-1].may_trace
        assert "The knobs are being checked" in await pilot.press("enter"), "there is no answer to apply or miss"
        await pilot.press("space")
        await pilot.until("The search is starting; press the key again once it runs.")
        await stopped_while_it_starts(pilot, starts, search, cancelled)
        assert starts.asked[0].spec.knobs["batch_size"] == 16
        assert not starts.asked[0].fresh, "an unfinished journal is continued"


async def test_s_while_an_unfinished_search_starts_again_stops_it_though_the_snapshot_is_older(home, starts, cancelled):
    broken = BatchEnded(t_ns=START_NS + NOW_S * S, state="cancelled")
    search = starts.directory = a_search(home, [*going_on(), broken])
    starts.go.clear()
    async with running(home, size=MIDDLE) as (_, pilot):
        await pilot.opened(search)
        await pilot.press("enter")
        await pilot.until("The knobs are being checked")
        # Each snapshot still shows the search as it was before its conductor took the lock.
        await stopped_while_it_starts(pilot, starts, search, cancelled)
    assert cancelled == [search]


async def test_a_continued_search_that_ends_at_once_is_notified(home, starts):
    search = starts.directory = a_search(home, [*going_on(), BatchEnded(t_ns=START_NS + NOW_S * S, state="cancelled")])
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.opened(search)
        await pilot.press("enter")
        await pilot.until("The knobs are being checked")
        await pilot.until_true(lambda: starts.asked, "the start")
        await pilot.press("escape")
        assert "The search has ended" not in await pilot.show_search(search), "the reader still shows it as it was"
        await pilot.show_search(search, lines=answered())
        await pilot.until("The search has ended: batch_size 42 is the largest that fits")
        app.main.notify("")
        assert "The search has ended" not in await pilot.show_search(search), "once is enough"


async def test_b_asks_first_and_escape_starts_nothing(home, starts):
    async with running(home, size=SMALL) as (app, pilot):
        await pilot.show_search(None)
        await pilot.press("right", "b")
        text = await pilot.until("No memory_limit")
        has(text, "Enter starts the search; Esc goes back.", "batch_size=16")
        words = " ".join(text.split())
        assert re.search(r"the search uses up to [\d.]+ [GM]iB of this machine's memory, set as a real limit", words)
        assert re.search(r"a real limit: 90 % of the [\d.]+ [GM]iB free;", words), "the margin is named"
        assert text.splitlines()[-1].startswith("Enter start  Esc back"), "there is nothing to pause yet"
        await pilot.press("escape")
        assert app.screen is app.main
        assert starts.asked == []


async def test_the_question_names_an_unfinished_search_of_the_same_knobs(home, starts):
    broken = BatchEnded(t_ns=START_NS + NOW_S * S, state="cancelled")
    search = starts.directory = a_search(home, [*going_on(), broken])
    async with running(home, size=SMALL) as (_, pilot):
        text = await pilot.opened(search)
        has(text, "continues the search that has tried", "Enter continues the unfinished search; Esc goes back.")
        has(text, "1.00 GiB a rank, as it began")
        await pilot.press("enter")
        await pilot.until_true(lambda: starts.asked, "the start")
        assert not starts.asked[0].fresh, "an unfinished journal is continued"


async def test_a_refusal_is_not_shown_over_the_search_before(home, starts):
    starts.refusal = UserError("search max-batch cannot try batch sizes with strategy=pp", key="strategy")
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.show_search(a_search(home, answered()))
        await pilot.press("right", "b", "enter")
        text = await pilot.until("Refused: search max-batch cannot try batch sizes with strategy=pp")
        assert "is the largest that fits" not in text
        assert not app.session.searches.of(SearchKind.BATCH).is_active
        await pilot.press("escape")
        assert app.screen is app.main


async def test_a_start_that_a_search_prevents_shows_that_search(home, starts, live_search):
    starts.refusal = UserError("cpu in use by a search", key="devices")
    starts.go.clear()
    async with running(home, size=MIDDLE) as (_, pilot):
        await asked_for(pilot)
        await pilot.show_search(live_search)
        starts.go.set()
        await pilot.until("Refused: cpu in use by a search")
        assert "probing: batch_size 42" in await pilot.show_search(live_search)
        await pilot.press("space")
        await pilot.until_true((live_search / PAUSE_FILE).exists, "the pause")


@pytest.mark.parametrize("key", ["enter", "f5"])
async def test_a_live_run_is_named_first_and_stopped_only_when_that_is_wanted(home, starts, hold, key):
    run = a_live_run(home, hold)
    search = a_search(home, answered()) if key == "f5" else None
    async with running(home, size=MIDDLE) as (_, pilot):
        if search is not None:
            await pilot.opened(search)
        await pilot.show_search(search, run)
        await pilot.press(*(["b"] if search is None else []), key)
        text = await pilot.until("y  stop it, then search")
        assert "20261121-054455-tiny-llama-7f3a is running and uses the device." in " ".join(text.split())
        await pilot.press("n")
        assert starts.asked == []


async def test_a_search_whose_conductor_is_gone_says_so_and_f5_continues_it(home, starts):
    search = starts.directory = a_search(home, going_on())
    conductor = lock_of_conductor(search)
    async with running(home, size=MIDDLE) as (_, pilot):
        await pilot.opened(search)
        os.close(conductor)
        assert "✗ interrupted: no process works on it; F5 continues" in await pilot.show_search(search)
        await pilot.press("f5")
        await pilot.until("The knobs are being checked")
        await pilot.press("f5")
        await pilot.until("The search is starting.")
        await pilot.until_true(lambda: starts.asked, "the start")
    assert [asked.fresh for asked in starts.asked] == [False]


async def test_b_pressed_before_anything_is_known_opens_no_search(home):
    async with running(home, size=SMALL) as (app, pilot):
        assert "Looking for a live search; press b again." in await pilot.press("b")
        assert app.screen is app.main


async def test_the_limit_is_set_where_the_search_is_asked_for(home, starts):
    async with running(home, size=MIDDLE) as (app, pilot):
        await pilot.show_search(None)
        text = await pilot.press("b")
        has(text, "l limit  No memory_limit", "l limit")
        await pilot.press("l", *"much", "enter")
        await pilot.until("memory_limit")
        await pilot.press("ctrl+u", *"1g", "enter")
        await pilot.until("l limit  memory_limit=1GiB")
        assert app.knobs["memory_limit"] == "1GiB"
        await pilot.press("enter")
        await pilot.until_true(lambda: starts.asked, "the start")
        assert starts.asked[0].spec.knobs["memory_limit"] == "1GiB"
