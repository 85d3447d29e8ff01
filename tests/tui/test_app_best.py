"""The best-fit search on the screen: planned, started, paused, ordered, left and taken."""

import itertools

import pytest
import recorded
from msgspec import to_builtins
from msgspec.structs import replace
from recorded import BASELINE, BEST_ID, SLOW_HOST, START_NS, a_search, a_trial, best_answered, best_going_on, seen
from still import FULL, SMALL, has, running

from trainfast_runner.records.result import Doubt
from trainfast_runner.search.best.answer import BestSoFar, best_report
from trainfast_runner.search.best_journal import ColdRun, Trial
from trainfast_tui.screens.best import best_page, candidate_points
from trainfast_tui.text.best_words import answer_lines, chance_words
from trainfast_tui.text.format import line_text


async def test_the_title_names_the_preset_before_the_question_is_recorded(home, conducted):
    async with running(home) as (_, pilot):
        assert (await pilot.opened(conducted([]))).startswith("best fit: tiny-llama ─")


async def test_the_newest_trials_stay_visible_and_the_keys_reach_the_others(home, live_best):
    async with running(home, size=SMALL) as (_, pilot):
        assert "● the baseline" not in await pilot.opened(live_best)
        assert "● the baseline" in await pilot.press(*["up"] * 6)
        assert "● the baseline" not in await pilot.press("down"), "no key is owed"


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_a_search_that_starts_tells_its_question(home, conducted, size):
    search = conducted(best_going_on()[:2])
    async with running(home, size=size) as (_, pilot):
        text = await pilot.opened(search)
    assert "○ starting: the model is built" in text
    varied = "varying batch_size 4, 8, 16; precision fp32, bf16; checkpointing off, full at a global batch of 16"
    assert varied in " ".join(text.split())


def test_the_price_of_going_on_waits_for_two_settings_and_ends_with_the_budget():
    lines = best_going_on()
    assert chance_words(BestSoFar(tuple(lines[:7]))) == ""
    one_measured = replace(lines[-1], leader_number=BASELINE, chance=1.0)
    assert chance_words(BestSoFar((*lines[:7], one_measured))) == ""
    words = "next: batch_size=16 precision=bf16 checkpointing=full, about 1 min 35 s, 31 % chance of 2 % or more"
    assert chance_words(BestSoFar(tuple(lines))) == words
    dear = replace(lines[-1], price_s=9400.0, next_number=None)
    words = "next, about 2 h 36 min, beyond the budget, 31 % chance of 2 % or more"
    assert chance_words(BestSoFar((*lines, dear))) == words


@pytest.mark.parametrize("size", [FULL, SMALL])
def test_an_answer_has_the_baselines_bottleneck_and_the_lever_that_was_left_alone(size):
    lever = "predicted: about 4x samples/s by a global batch of 64 instead of 8, if your training allows"
    so_far = BestSoFar(tuple(best_answered(diagnosis=[SLOW_HOST], unused_lever=lever)), state="answered")
    shown = "\n".join(line_text(line) for line in best_page(so_far, START_NS, size[0]).foot)
    for text in ("\n".join(answer_lines(so_far, BEST_ID)), shown):
        assert f"of the baseline: {SLOW_HOST}" in " ".join(text.split())
        assert lever in " ".join(text.split())


async def test_enter_takes_the_answer(home):
    async with running(home, size=SMALL) as (app, pilot):
        await pilot.opened(a_search(home, best_answered()))
        assert "r runs it" in await pilot.press("enter")
        assert app.screen is app.main
        assert (app.knobs["batch_size"], app.knobs["grad_accum"], app.knobs["precision"]) == (4, 4, "bf16")


OTHERS = Doubt(kind="other_processes", text="other processes took 72 % of the CPU")


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_a_search_that_got_nowhere_says_why_and_has_no_check_mark(home, size):
    void = [a_trial(n, 70.0, 33 + n, outcome="void", reason=OTHERS.text, doubts=[OTHERS]) for n in (4, 7, 9)]
    *lines, end = best_answered(tied_numbers=[], tried_in_budget=1)
    only_baseline = [one for one in lines if not isinstance(one, Trial | ColdRun) or one.candidate_number == BASELINE]
    search = a_search(home, [*only_baseline, *void, end])
    async with running(home, size=size) as (_, pilot):
        text = " ".join((await pilot.opened(search)).split())
        assert "? machine busy: 3 of 4 settings void; t adds time; best so far" in text
        assert "✓" not in text
        assert "t time" in text.splitlines()[-1] if size == FULL else "t time" in text, "the footer has the key"
    table = [line_text(line) for line in best_page(seen(search), START_NS, size[0]).table]
    for row, reason in itertools.pairwise(table):
        assert OTHERS.text in reason or not row.startswith("~"), "each void trial has its reason"
    assert sum(OTHERS.text in row for row in table) == 3
    answer = "\n".join(answer_lines(BestSoFar.read(search), BEST_ID))
    assert answer.count(OTHERS.text) == 3
    reported = [trial["reason"] for trial in best_report(search)["trials"] if trial["outcome"] == "void"]
    assert reported == 3 * [OTHERS.text]


async def test_an_answer_measured_beside_others_is_doubtful_on_the_screen_and_in_json(home):
    lines = [
        replace(line, reason=OTHERS.text, doubts=[OTHERS]) if isinstance(line, ColdRun) else line
        for line in best_answered(tied_numbers=[])
    ]
    search = a_search(home, lines)
    async with running(home) as (_, pilot):
        text = await pilot.opened(search)
        assert "✓" not in text
        assert f"? the best setting: {OTHERS.text}" in text
    report = best_report(search)
    assert {"kind": "other_processes", "text": OTHERS.text} in to_builtins(report["best"]["doubts"])
    assert [doubt.kind for doubt in report["doubts"]] == ["other_processes", "other_processes"]
    assert f"the baseline: {OTHERS.text}" in "\n".join(answer_lines(BestSoFar(tuple(lines)), BEST_ID))


@pytest.mark.parametrize("is_live", [True, False])
def test_the_mark_of_the_chart_stands_at_the_figure_of_the_headline(home, is_live):
    """A trial of 80.0 samples/s of the best setting, whose rate is 60.5 by all that was measured."""
    lines = best_going_on() if is_live else best_answered()
    lines.insert(-1, a_trial(recorded.FASTEST, 80.0, 33))
    so_far = BestSoFar(tuple(lines), state="running" if is_live else "answered")
    [mark] = [point for point in candidate_points(so_far) if point.sign == "■"]
    assert mark.y == so_far.best.value.median != 80.0


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_an_answer_that_the_noise_decides_names_no_winner(home, size):
    async with running(home, size=size) as (_, pilot):
        text = await pilot.opened(a_search(home, best_answered(within_percent=8.0)))
        has(text, "✓ no winner: within 8.0 %, the noise of this machine", "chosen 60.5 samples/s")


async def test_enter_takes_the_best_so_far_and_the_search_goes_on(home, live_best):
    async with running(home) as (app, pilot):
        await pilot.opened(live_best)
        await pilot.press("enter")
        assert app.knobs["precision"] == "bf16"
        assert "Best-fit search is using the device; B shows it, s there stops it." in await pilot.press("r")
        await pilot.press("b")
        assert app.screen is app.main, "the batch search needs the device as well"
        assert "best so far" in await pilot.press("B")
        assert "The search goes on; B shows it." in await pilot.press("escape")


@pytest.mark.parametrize("size", [FULL, SMALL])
@pytest.mark.parametrize(
    ("objective", "for_steps", "best", "unit", "charted"),
    [
        ("time", 800, "3.65 min (3.57 to 3.75) for 800 steps", "min", "samples/s"),
        ("samples_per_joule", None, "61.0 samples/J (59.4 to 62.6)", "samples/J", "samples/J"),
    ],
)
async def test_every_figure_is_that_of_the_objective(home, conducted, size, objective, for_steps, best, unit, charted):
    lines = [recorded.a_question(objective=objective, for_steps=for_steps), *best_going_on()[1:]]
    joules = [replace(line, joules=0.2 * 16 * 8) if isinstance(line, Trial) else line for line in lines]
    async with running(home, size=size) as (_, pilot):
        text = await pilot.opened(conducted(joules))
    has(text, f"best so far {best}", f"{unit} (95 % CI)", f"{charted} over memory")
    if objective == "samples_per_joule":
        assert "5.00 (" in text, "of the trials' own counters"


@pytest.mark.parametrize("plain_output", [False, True])
async def test_plain_ascii_and_no_control_sequences(home, conducted, plain_output):
    *lines, step = best_going_on()
    search = conducted([*lines, replace(step, why="x\x1b[31my")])
    async with running(home, ascii=True, plain_output=plain_output) as (_, pilot):
        text = await pilot.opened(search)
    assert text.isascii(), {character for character in text if ord(character) > 127}
    assert "xy" in text


def test_the_rate_of_a_run_under_the_limit_is_none_of_the_setting(home):
    run = ColdRun(candidate_number=2, role="limit", run_id="r", outcome="measured", samples_per_s=4.0, seconds=9.0)
    so_far = seen(a_search(home, [*best_going_on(), run]))
    assert so_far.attempts[-1] == run
    assert len(so_far.attempts) - 1 not in so_far.values
    assert 41 < so_far.values[0].median < 43
