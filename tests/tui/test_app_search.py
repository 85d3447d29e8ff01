"""A batch search on the screen: how it is drawn, started, paused, cancelled, and its answer applied."""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded import START_NS, S, a_run, write_lines
from searched import (
    ANSWER,
    CONDUCTED,
    FULL,
    NOW_S,
    PROOF_ID,
    SMALL,
    a_probe,
    a_search,
    answered,
    asked,
    going_on,
    nothing_fits,
    opened,
    seen,
    show,
)
from still import StillApp, a_snapshot, own_supervisor, running, screen_text, until, until_true

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes.identity import boot_id
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import Event
from trainfast_runner.records.search_directories import LOCK_FILE
from trainfast_runner.search import control
from trainfast_runner.search.journal import PAUSE_FILE, ConfirmationRun, CoolingDown, Ended, Paused
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control.messages import SnapshotTaken


class Starts:
    """Stands in for the start of a conductor: remembers what was asked, and gives the search a test has prepared."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], bool]] = []
        self.directory: Path | None = None
        self.refusal: UserError | None = None
        self.cool_to_c: float | None = None
        self.go = threading.Event()
        self.go.set()

    def start(
        self,
        spec: RunSpec,
        home: Home,
        python: str | None = None,
        *,
        fresh: bool = False,
        cool_to_c: float | None = None,
    ) -> Path:
        self.asked.append((dict(spec.knobs), fresh))
        self.cool_to_c = cool_to_c
        assert self.go.wait(60)
        if self.refusal is not None:
            raise self.refusal
        assert self.directory is not None
        return self.directory


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    found = Starts()
    monkeypatch.setattr(control, "start_search", found.start)
    return found


def knob(app: StillApp, name: str) -> object:
    assert app.session.next_run is not None
    return app.session.next_run.spec.knobs[name]


async def test_the_answer_has_its_reasons_and_enter_applies_the_recommended_one(home: Home) -> None:
    async with running(home, size=FULL) as (app, pilot):
        text = await opened(pilot, a_search(home, answered()))
        assert "✓ batch_size 42 is the largest that fits, confirmed in a fresh process  took 41 s" in text
        assert "✗ out of memory in backward" in text
        assert f"✓ confirmed: {PROOF_ID}" in text
        assert ANSWER.certainty in text
        assert "the largest leaves 3.00 MiB of the limit" in text
        assert "▸ recommended batch_size=40  leaves 46.0 MiB: 3 % for fragmentation" in text
        assert "  aligned     batch_size=40  a multiple of 8" in text
        assert f"  largest     batch_size=42  confirmed by {PROOF_ID}" in text
        assert "  fastest     batch_size=8  16.6 samples/s" in text
        await pilot.press("enter")
        await pilot.pause()
        assert app.screen is app.main
        assert knob(app, "batch_size") == 40
        assert "batch_size = 40; r runs it" in screen_text(app)


async def test_a_size_that_its_proof_refuted_is_marked(home: Home) -> None:
    *tried, confirmation, last, ended = answered()
    refuting = ConfirmationRun(batch_size=42, run_id="20261121-055000-cold", state="oom", seconds=1.0, refutes=[42])
    async with StillApp(home).run_test(size=FULL) as pilot:
        text = await opened(pilot, a_search(home, [*tried, refuting, confirmation, last, ended]))
        assert text.count("✗ fitted, refuted by the confirmation run") == 1
        assert "✗ OOM in the confirmation run" in text
        assert text.count("● fits") == 2


async def test_enter_applies_the_answer_under_the_cursor(home: Home) -> None:
    async with running(home, size=SMALL) as (app, pilot):
        await opened(pilot, a_search(home, answered()))
        await pilot.press("down", "down")
        assert "▸ largest     batch_size=42" in screen_text(app)
        await pilot.press("enter")
        await pilot.pause()
        assert knob(app, "batch_size") == 42


async def test_the_answer_for_the_same_knobs_is_shown_again_without_another_search(home: Home, starts: Starts) -> None:
    search = a_search(home, answered())
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, search)
        await pilot.press("enter")
        await pilot.press("b")
        await pilot.pause()
        assert "is the largest that fits" in screen_text(app)
        assert starts.asked == []
        starts.directory = search
        await pilot.press("f5")
        await until(pilot, "The knobs are being checked")
        await until_true(pilot, lambda: starts.asked, "the start")
        assert starts.asked[0][1], "an answered search starts anew"


async def test_where_batch_1_does_not_fit_enter_applies_all_of_a_change(home: Home) -> None:
    async with running(home, size=FULL) as (app, pilot):
        text = await opened(pilot, a_search(home, nothing_fits()))
        assert "✗ batch_size 1 does not fit: 75.0 MiB too much" in text
        assert "▸ change 1    optimizer=adafactor  frees 120 MiB; speed: slower to converge" in text
        await pilot.press("down", "enter")
        await pilot.pause()
        assert knob(app, "checkpointing") == "full"
        assert knob(app, "precision") == "bf16"


async def test_escape_cancels_what_goes_on_and_leaves_what_has_ended(
    home: Home, live_search: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[Path] = []
    monkeypatch.setattr(control, "cancel", lambda directory: cancelled.append(directory) or True)
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, live_search)
        await pilot.press("escape")
        await until(pilot, "Cancelling: the probe is stopped, the journal is kept")
        await until_true(pilot, lambda: cancelled, "the cancel")
        assert cancelled == [live_search]
        write_lines(
            live_search / "journal.jsonl",
            [*going_on(), Ended(t_ns=START_NS + NOW_S * S, state="cancelled", seconds=16.0)],
        )
        await show(pilot, live_search)
        text = screen_text(app)
        assert "■ cancelled; its journal is kept, f5 continues  took 16 s" in text
        assert text.splitlines()[-1].startswith("Esc back  b leave  f5 go on"), "nothing to apply, nothing to pause"
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen is app.main


async def test_space_pauses_after_the_probe_and_again_goes_on(home: Home, live_search: Path) -> None:
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, live_search)
        await pilot.press("space")
        await until_true(pilot, (live_search / PAUSE_FILE).exists, "the pause")
        await show(pilot, live_search)
        assert "● pausing after this probe" in screen_text(app)
        write_lines(live_search / "journal.jsonl", [*going_on(), Paused(t_ns=START_NS + 15 * S)])
        await show(pilot, live_search)
        text = screen_text(app)
        assert "■ paused: no process is running" in text
        assert "space go on" in text
        assert "next: probe batch_size 42" in text
        assert "apply" not in text.splitlines()[-1], "there is nothing to apply yet"
        done = [*going_on(), a_probe(42), Paused(t_ns=START_NS + 15 * S)]
        write_lines(live_search / "journal.jsonl", done)
        await show(pilot, live_search)
        assert "next: decided from these when the search continues" in screen_text(app)
        await pilot.press("p")
        await until_true(pilot, lambda: not (live_search / PAUSE_FILE).exists(), "the end of the pause")


async def test_leaving_lets_it_go_on_and_its_end_is_said_on_the_main_screen(home: Home, live_search: Path) -> None:
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, live_search)
        await pilot.press("b")
        await pilot.pause()
        assert app.screen is app.main
        assert "The search goes on; b shows it." in screen_text(app)
        assert not app.session.requests[-1].may_trace, "a search measures too"
        await pilot.press("r")
        assert "Batch search is using the device" in screen_text(app)
        write_lines(live_search / "journal.jsonl", answered())
        await show(pilot, live_search)
        assert "The search has ended: batch_size 42 is the largest that fits" in screen_text(app)


async def test_b_starts_a_search_of_the_knobs_and_escape_while_it_starts_cancels_it(
    home: Home, starts: Starts, conduct: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[Path] = []
    monkeypatch.setattr(control, "cancel", lambda directory: cancelled.append(directory) or True)
    search = starts.directory = a_search(home, [asked(), CONDUCTED])
    conduct(search)
    starts.go.clear()
    async with running(home, size=FULL) as (app, pilot):
        await show(pilot, None)
        await pilot.press("right", "b", "enter")
        await until(pilot, "The knobs are being checked")
        assert not app.session.requests[-1].may_trace
        await pilot.press("escape")
        await until(pilot, "Cancelling as soon as the search has started")
        starts.go.set()
        while not cancelled:
            await show(pilot, search)
        assert starts.asked[0][0]["batch_size"] == 16
        assert not starts.asked[0][1], "an unfinished journal is continued"


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
    broken = Ended(t_ns=START_NS + NOW_S * S, state="cancelled")
    search = starts.directory = a_search(home, [*going_on(), broken])
    async with running(home, size=SMALL) as (app, pilot):
        await opened(pilot, search)
        assert "goes on with the search that has tried" in screen_text(app)
        await pilot.press("enter")
        await until_true(pilot, lambda: starts.asked, "the start")
        assert not starts.asked[0][1], "an unfinished journal is continued"


async def test_a_search_that_is_refused_says_why(home: Home, starts: Starts) -> None:
    starts.refusal = UserError("memory_limit is below what the parameters need", key="memory_limit")
    async with running(home, size=FULL) as (app, pilot):
        await show(pilot, None)
        await pilot.press("b", "enter")
        await until(pilot, "Refused: memory_limit is below what the parameters need")
        assert not app.session.search.is_going_on
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen is app.main


async def test_a_refusal_is_not_shown_over_the_search_before(home: Home, starts: Starts) -> None:
    starts.refusal = UserError("search max-batch does not change the batch of strategy=pp", key="strategy")
    async with running(home, size=FULL) as (_, pilot):
        await show(pilot, a_search(home, answered()))
        await pilot.press("right", "b", "enter")
        text = await until(pilot, "Refused: search max-batch does not change the batch of strategy=pp")
        assert "is the largest that fits" not in text


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


async def test_a_search_whose_conductor_is_gone_says_so_and_f5_takes_it_up_again(home: Home, starts: Starts) -> None:
    search = starts.directory = a_search(home, going_on())
    conductor = os.open(search / LOCK_FILE, os.O_RDWR)
    fcntl.flock(conductor, fcntl.LOCK_EX)
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


async def test_a_search_waits_for_its_gpus_to_cool_and_shows_the_degrees(
    home: Home, conduct: Callable[[Path], None], starts: Starts
) -> None:
    waits = [
        CoolingDown(t_ns=START_NS + (8 + n) * S, device=1, temperature_c=71 - 5 * n, below_c=55, waited_s=n)
        for n in range(3)
    ]
    starts.directory = a_search(home, [*going_on(), *waits])
    conduct(starts.directory)
    async with running(home, size=SMALL) as (app, pilot):
        await show(pilot, None)
        app.session.runs.cool_to_c = 55
        await pilot.press("b", "enter")
        while starts.cool_to_c is None or app.session.search.current is None:
            await show(pilot, starts.directory)
        await until(pilot, "cooling GPU 1: 61 °C, waiting for less than 55 °C")
        assert re.search(r"▸42 +cooling…", screen_text(app))
        assert "has not fallen" not in screen_text(app)
        # The last look was at second 10: a temperature that stands still writes no further line.
        app.post(SnapshotTaken(replace(a_snapshot(None, second=40), search=seen(starts.directory))))
        text = " ".join((await until(pilot, "given up after 180 s")).split())
        assert (
            "waiting for less than 55 °C, 32 s so far; it has not fallen for 30 s, and is given up after 180 s" in text
        )
    assert starts.cool_to_c == 55


def test_the_reader_finds_a_search_that_goes_on_or_the_newest_of_this_boot(
    home: Home, conduct: Callable[[Path], None]
) -> None:
    from trainfast_runner.search.searches import newest_search

    assert newest_search(home) is None
    live = a_search(home, going_on())
    assert newest_search(home) is None, "of another boot, where nobody knows what the machine was"
    here = msgspec.structs.replace(CONDUCTED, boot_id=boot_id())
    ended = a_search(home, [*answered(), here], "20991231-000000-tiny-llama-ffff")
    assert newest_search(home) == ended, "it ended while the app was closed"
    conduct(live)
    assert newest_search(home) == live


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


async def test_what_was_searched_with_other_knobs_is_applied_with_a_warning(home: Home) -> None:
    async with running(home, size=FULL) as (app, pilot):
        await opened(pilot, a_search(home, answered()))
        assert app.session.next_run is not None
        app.session.next_run = app.session.next_run.with_value("seq_len", "256")
        await pilot.press("enter")
        await pilot.pause()
        assert knob(app, "batch_size") == 40
        assert "the search had other knobs" in screen_text(app)


async def test_without_a_limit_on_a_cpu_it_says_up_to_what_it_searches(home: Home, starts: Starts) -> None:
    starts.go.clear()
    async with running(home, size=SMALL) as (_, pilot):
        await show(pilot, None)
        await pilot.press("b")
        text = " ".join((await until(pilot, "No memory_limit")).split())
        assert re.search(r"this searches up to [\d.]+ [GM]iB of this machine's memory, set as a real limit", text)
        assert starts.asked == [], "nothing starts before Enter"
        await pilot.press("enter")
        starts.refusal = UserError("enough", key="memory_limit")
        starts.go.set()
        await until(pilot, "Refused: enough")


async def test_what_broke_a_search_off_is_said(home: Home, live_search: Path) -> None:
    reason = "cpu in use by 20261121-054455-tiny-llama-7f3a"
    async with running(home, size=SMALL) as (app, pilot):
        await opened(pilot, live_search)
        broken = Ended(t_ns=START_NS + NOW_S * S, state="cancelled", reason=reason)
        write_lines(live_search / "journal.jsonl", [*going_on(), broken])
        await show(pilot, live_search)
        text = " ".join(screen_text(app).split())
        assert f"stopped early: {reason}; its journal is kept, f5 tries again" in text
        assert text.count(reason) == 1
