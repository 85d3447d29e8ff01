"""The question of a best-fit search on the screen: planned, put part by part, refused, and searched."""

import fcntl
import os
import threading

import pytest
from recorded import START_NS, S, a_question, a_run, a_search, best_answered, best_going_on, own_supervisor, write_lines
from still import BEST_NOW_S, MIDDLE, SMALL, a_snapshot, has, running

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_lines import Event
from trainfast_runner.search.best_journal import BestEnded, BestRequest
from trainfast_runner.search.journal import CANCELLED_REASON
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.screens import best
from trainfast_tui.screens.best import BestPlanned
from trainfast_tui.text.best_words import busy_lines

PLAN = "candidates 12, 11 of them can run here"


@pytest.fixture
def planned(monkeypatch):
    """A plan without a look at this machine."""
    vary = {"batch_size": [4, 8], "precision": ["fp32", "bf16"]}

    def plan(spec, request, python):
        return BestPlanned(request, [(PLAN, "text")], request.vary or vary, 16)

    monkeypatch.setattr(best, "plan_best", plan)


async def until_started(pilot, starts):
    """Wait until a search was started and its thread has posted SearchStarted."""

    def has_posted():
        return bool(starts.asked) and all(thread.name != "trainfast-search" for thread in threading.enumerate())

    await pilot.until_true(has_posted, "the start")


async def test_s_stops_the_search_and_f5_continues_its_question(home, live_best, starts, cancelled):
    async with running(home) as (_, pilot):
        await pilot.opened(live_best)
        await pilot.press("s")
        await pilot.until_true(lambda: cancelled == [live_best], "the end")
        ended = BestEnded(t_ns=START_NS + 36 * S, state="cancelled", reason=CANCELLED_REASON, seconds=36.0)
        write_lines(live_best / "journal.jsonl", [*best_going_on(), ended])
        assert "■ stopped; its journal is kept, F5 continues" in await pilot.show_search(live_best)
        await pilot.press("f5")
        await pilot.until_true(lambda: starts.asked, "the start")
        asked = starts.asked[0]
        assert not asked.fresh, "the unfinished one goes on"
        question = a_question()
        assert (asked.spec.knobs, asked.best.vary, asked.best.global_batch) == (question.knobs, question.vary, 16)


async def test_without_a_search_the_screen_tells_the_plan_and_enter_starts(home, planned, starts, conduct):
    async with running(home, size=SMALL) as (_, pilot):
        await pilot.opened(None)
        text = await pilot.until(PLAN)
        assert "Enter starts the search; Esc goes back." in text
        assert text.splitlines()[-1].startswith("Enter start  Esc back")
        await pilot.press("enter")
        await pilot.until("The knobs are being checked")
        await until_started(pilot, starts)
        assert starts.asked[0].best == BestRequest()
        search = a_search(home, best_going_on())
        conduct(search)
        assert "best so far" in await pilot.show_search(search)


async def test_the_plan_that_waits_for_a_live_run_is_made_when_the_run_has_ended(home, planned):
    run = a_run(home, with_result=False)
    write_lines(run / "events.jsonl", [own_supervisor(), Event(t_ns=START_NS + S, kind="state", state="running")])
    alive = os.open(run / "alive.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(alive, fcntl.LOCK_SH)
    async with running(home, a_snapshot(run, second=BEST_NOW_S)) as (app, pilot):
        await pilot.press("B")
        text = await pilot.until(f"{run.name} is using the device: Enter stops it first.")
        assert PLAN not in text, "a plan would slow the run"
        os.close(alive)
        app.post(SnapshotTaken(a_snapshot(run, second=BEST_NOW_S)))
        assert "is using the device" not in await pilot.until(PLAN)


async def test_the_question_is_put_part_by_part_and_then_searched(home, planned, starts):
    async with running(home, size=SMALL) as (_, pilot):
        await pilot.opened(None)
        text = await pilot.until(PLAN)
        has(text, "v vary          every knob that keeps the training the same; mixed precision")
        has(text, "b global batch  16 samples, as the knobs are set", "o objective     the most samples a second")
        has(text, "t time budget   10 min", "f fresh         no: continues an unfinished search")
        assert text.splitlines()[-1].startswith("Enter start  Esc back  v vary  b batch  o objective  t time")
        assert "batch_size=4,8 precision=fp32,bf16" in await pilot.press("v")
        await pilot.press(*"precision=fp32, bf16  workers=0,2", "enter")
        await pilot.until("v vary          precision=fp32,bf16 workers=0,2")
        await pilot.press("b", *"32", "enter")
        await pilot.until("b global batch  32 samples")
        await pilot.press("t", *"90s", "enter")
        await pilot.until("t time budget   1 min 30 s")
        await pilot.press("o", *"time", "enter")
        await pilot.until("Optimizer steps")
        await pilot.press(*"800", "enter")
        await pilot.until("o objective     the least time for a start and a number of steps: 800 steps")
        await pilot.press("enter")
        await pilot.until_true(lambda: starts.asked, "the start")
    assert starts.asked[0].best == BestRequest(
        vary={"precision": ["fp32", "bf16"], "workers": [0, 2]},
        global_batch=32,
        objective="time",
        for_steps=800,
        budget_s=90.0,
    )


async def test_the_varied_values_are_a_checklist_with_a_count(home, planned):
    async with running(home, size=MIDDLE) as (_, pilot):
        await pilot.opened(None)
        await pilot.until(PLAN)
        text = await pilot.press("v")
        has(text, "[x] precision=fp32", "[ ] precision=tf32", "[x] precision=bf16", "4 of ")
        text = await pilot.press("down", "down", "down", "space")
        has(text, "batch_size=4,8 precision=fp32,bf16,tf32", "[x] precision=tf32", "5 of ")
        text = await pilot.press("up", "up", "space")
        has(text, "batch_size=4,8 precision=bf16,tf32", "[ ] precision=fp32", "4 of ")
        await pilot.press("enter")
        await pilot.until("v vary          batch_size=4,8 precision=bf16,tf32")


async def test_nonsense_in_the_question_says_what_is_allowed_and_changes_nothing(home, planned):
    async with running(home, size=SMALL) as (_, pilot):
        await pilot.opened(None)
        await pilot.until(PLAN)
        for key, typed, words in (
            ("v", "prcision=fp32", "precision"),
            ("v", "nonsense", "knob=a,b,c"),
            ("v", "precision=fp33", "fp32"),
            ("v", "precision=", "no value"),
            ("b", "-3", "from 1 to"),
            ("b", "ten", "whole number"),
            ("t", "soon", "'soon': not a time"),
            ("t", "0", "not a time"),
        ):
            await pilot.press(key, *typed, "enter")
            await pilot.until(words)
            assert "10 min" in await pilot.press("escape")


async def test_escape_closes_the_question_and_forgets_it(home, planned):
    async with running(home, size=SMALL) as (app, pilot):
        await pilot.opened(None)
        await pilot.until(PLAN)
        await pilot.press("b", *"32", "enter", "f")
        await pilot.until("b global batch  32 samples")
        await pilot.press("escape")
        assert app.screen is app.main
        await pilot.opened(None)
        text = await pilot.until(PLAN)
        has(text, "b global batch  16 samples, as the knobs are set", "f fresh         no")


async def test_after_an_answer_another_question_can_be_put(home, planned, starts):
    async with running(home, size=SMALL) as (_, pilot):
        text = await pilot.opened(a_search(home, best_answered()))
        assert "v new question" in text.splitlines()[-1]
        await pilot.press("v", *"precision=fp32,bf16", "enter")
        await pilot.until("v vary          precision=fp32,bf16")
        await pilot.press("enter")
        await pilot.until_true(lambda: starts.asked, "the start")
    question = a_question()
    assert starts.asked[0].best == BestRequest(
        vary={"precision": ["fp32", "bf16"]}, global_batch=question.global_batch, budget_s=question.budget_s
    )


async def test_f_begins_anew_without_earlier_searches(home, planned, starts):
    async with running(home) as (_, pilot):
        await pilot.opened(None)
        text = await pilot.until(PLAN)
        assert "t time  f fresh" in text.splitlines()[-1]
        await pilot.press("f")
        await pilot.until("f fresh         yes: starts over")
        await pilot.press("f")
        await pilot.until("f fresh         no: continues an unfinished search")
        await pilot.press("f", "enter")
        await until_started(pilot, starts)
        assert starts.asked[0].fresh, "it is asked for fresh"
        search = a_search(home, best_answered())
        text = await pilot.show_search(search)
        assert "f fresh" not in text.splitlines()[-1]
        await pilot.press("f")
        text = await pilot.until("f fresh         yes: starts over")
        assert "v vary          batch_size=4,8,16" in text, "the question of the search that has ended"


async def test_a_search_of_another_preset_stays_when_it_ends(home, planned, conducted):
    search = conducted([a_question(preset="gpt2-small"), *best_going_on()[1:]])
    async with running(home) as (_, pilot):
        assert "● trying" in await pilot.opened(search)
        write_lines(search / "journal.jsonl", [a_question(preset="gpt2-small"), *best_answered()[1:]])
        assert "✓ batch_size=4 grad_accum=4 precision=bf16: +44.4 %" in await pilot.show_search(search)
        await pilot.press("escape")
        assert "Enter starts the search" in await pilot.opened(search), "the next run is of another preset"


@pytest.mark.parametrize(("preset", "asked"), [("gpt2", "best fit: gpt2 "), ("no-such-preset", "no-such-preset")])
async def test_a_question_after_an_answer_is_about_the_preset_on_the_screen(home, planned, conducted, preset, asked):
    search = conducted([a_question(preset=preset), *best_going_on()[1:]])
    async with running(home) as (_, pilot):
        await pilot.opened(search)
        write_lines(search / "journal.jsonl", [a_question(preset=preset), *best_answered()[1:]])
        await pilot.show_search(search)
        text = await pilot.press("t", *"90", "enter")
        assert asked in text
        assert ("1 min 30 s" in text) == (preset == "gpt2"), "a preset that is gone is named, and nothing is asked"


async def test_a_refused_plan_and_start_say_why(home, monkeypatch, starts):
    def refuse(*arguments):
        raise UserError("the device is in use", key="devices")

    monkeypatch.setattr(best, "plan_best", refuse)
    starts.refusal = UserError("the device is still in use", key="devices")
    async with running(home) as (_, pilot):
        await pilot.opened(None)
        await pilot.until("Refused: the device is in use")
        await pilot.press("enter")
        text = await pilot.until("Refused: the device is still in use")
        assert len(starts.asked) == 1
        assert text.count("Refused: ") == 1, "the start's refusal stands in place of the plan's"


def test_a_busy_cpu_is_said_before_a_search(monkeypatch):
    monkeypatch.setattr("trainfast_runner.machine.cpu.others_percent", lambda seconds: 72.0)
    said = "others take 72 % of the CPU: this budget tries about 28 % of what it would alone"
    assert (busy_lines("cpu"), busy_lines("cuda")) == ([said], [])
