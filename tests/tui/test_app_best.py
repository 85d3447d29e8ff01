"""The best-fit search on the screen: planned, started, paused, ordered, left and taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from best_searched import (
    BASELINE,
    BEST_ID,
    FASTEST,
    LEADING,
    SPACE,
    a_best_search,
    a_question,
    a_trial,
    best_answered,
    best_going_on,
    best_opened,
    best_seen,
    chosen,
    show_best,
)
from msgspec import to_builtins
from msgspec.structs import replace
from recorded import START_NS, S, write_lines
from still import FULL, SMALL, StillApp, screen_text, until_true

from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Doubt
from trainfast_runner.records.search_directories import PAUSE_FILE
from trainfast_runner.search.best.best_so_far import BestSoFar
from trainfast_runner.search.best.person_instructions import read_instructions
from trainfast_runner.search.best.report import best_report
from trainfast_runner.search.journal.best import ColdRun, Instruction, Trial, read_best_journal
from trainfast_runner.search.journal.lines import Paused, Waiting
from trainfast_tui.text.lines import line_text
from trainfast_tui.text.search.best_answer import answer_lines
from trainfast_tui.text.search.best_state import chance_words
from trainfast_tui.widgets.search.best_lines import trial_lines
from trainfast_tui.widgets.search.best_view import BestView, candidate_points


def knob(app: StillApp, name: str) -> object:
    assert app.session.next_run is not None
    return app.session.next_run.spec.knobs[name]


def test_the_title_names_the_preset_before_the_question_is_recorded(home: Home) -> None:
    lines = BestView("tiny-llama").search_lines(best_seen(a_best_search(home, [])), [], 100, 30)
    assert line_text(lines[0]).startswith("best fit: tiny-llama ─")


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_a_live_search_shows_the_best_its_chance_the_chart_and_the_trials(
    home: Home, live_best: Path, size: tuple[int, int]
) -> None:
    async with StillApp(home).run_test(size=size) as pilot:
        text = await best_opened(pilot, live_best)
    lines = text.splitlines()
    words = " ".join(text.split())
    assert lines[0].startswith("best fit: tiny-llama ─")
    assert lines[1].startswith("● trying batch_size=16 grad_accum=1 precision=bf16 checkpointing=full")
    assert lines[2].startswith("best so far 61.0 samples/s (59.4 to 62.6)  batch_size=4")
    assert "precision=bf16" in " ".join(lines[2:4]), "no part of the best setting is cut off"
    assert "31 % chance that going on finds 2 % more, for about 1 min 35 s" in words
    assert "12 settings, 5 measurements, 40 s so far, the budget is 10 min" in words
    assert "limit 1.00 GiB" in text
    assert text.count("┊") >= 5, "the limit is a line of the chart"
    assert "samples/s over memory  ⠤ Pareto front  ■ best  • measured  ✗ too large  ○ now" in text
    assert text.count("■") == 2, "the best so far, beside its meaning"
    assert "it may be 4 % f" in text
    assert lines[-1].startswith("Enter take  space pause  p pin  x skip  Esc leave  s stop")


async def test_each_trial_has_a_row_with_its_rate_and_the_newest_stay_visible(home: Home, live_best: Path) -> None:
    async with StillApp(home).run_test(size=FULL) as pilot:
        text = await best_opened(pilot, live_best)
        rows = [line.split() for line in text.splitlines() if line.startswith(("● the base", "✗", "▸"))]
        assert rows[0][:3] == ["●", "the", "baseline"]
        assert rows[0][-4:] == ["8", "7.5", "s", "new"]
        assert rows[1][-7:] == ["out", "of", "memory", "–", "3.2", "s", "warm"]
        assert rows[2][1] == "batch_size=16"
    async with StillApp(home).run_test(size=SMALL) as pilot:
        text = await best_opened(pilot, live_best)
        assert "● the baseline" not in text
        await pilot.press("up", "up", "up", "up", "up", "up")
        assert "● the baseline" in screen_text(pilot.app)  # type: ignore[arg-type]
        await pilot.press("down")
        assert "● the baseline" not in screen_text(pilot.app), "no key is owed"  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_a_search_that_starts_tells_its_question(
    home: Home, conduct: Callable[[Path], None], size: tuple[int, int]
) -> None:
    search = a_best_search(home, best_going_on()[:2])
    conduct(search)
    async with StillApp(home).run_test(size=size) as pilot:
        text = await best_opened(pilot, search)
    assert "○ starting: the model is built" in text
    varied = "varying batch_size 4, 8, 16; precision fp32, bf16; checkpointing off, full at a global batch of 16"
    assert varied in " ".join(text.split())


def test_the_price_of_going_on_waits_for_two_settings_and_ends_with_the_budget() -> None:
    lines = best_going_on()
    assert chance_words(BestSoFar(tuple(lines[:7]))) == ""
    one_measured = chosen(15, "trial", 3, "an assumption", **{**LEADING, "leader_number": BASELINE, "chance": 1.0})
    assert chance_words(BestSoFar((*lines[:7], one_measured))) == ""
    assert chance_words(BestSoFar(tuple(lines))).endswith("2 % more, for about 1 min 35 s")
    dear = chosen(31, "trial", 11, "many processes", **{**LEADING, "price_s": 9400.0})
    words = "31 % chance that going on finds 2 % more, but that takes 2 h 36 min, beyond the budget"
    assert chance_words(BestSoFar((*lines, dear))) == words


@pytest.mark.parametrize(("chance", "words"), [(1.0, "over 99 %"), (0.996, "over 99 %"), (0.0, "under 1 %")])
def test_an_estimated_chance_is_never_certain(chance: float, words: str) -> None:
    step = chosen(31, "trial", 11, "it may be faster", **{**LEADING, "chance": chance})
    assert chance_words(BestSoFar((*best_going_on(), step))).startswith(f"{words} chance that going on")


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_the_answer_has_the_effects_the_ties_and_the_verdicts_and_enter_takes_it(
    home: Home, size: tuple[int, int]
) -> None:
    app = StillApp(home)
    async with app.run_test(size=size) as pilot:
        text = await best_opened(pilot, a_best_search(home, best_answered()))
        assert "✓ batch_size=4 grad_accum=4 precision=bf16: +44.4 % (+42.1 % to +46.8 %)" in text
        assert "precision=bf16 for fp32" in text
        assert "+44.4 % (+41.9 % to +46.9 %)  in a run" in text
        assert "the same as the baseline, counting precision=bf16 as the same as fp32" in " ".join(text.split())
        assert "within the noise  batch_size=16 grad_accum=1 precision=bf16 checkpointing=full" in text
        assert "12: 5 measured, 6 beaten, 1 too large" in text
        assert text.splitlines()[-1].startswith("Enter take  Esc back  f5 restart  v new question")
        await pilot.press("enter")
        await pilot.pause()
        assert app.screen is app.main
        assert (knob(app, "batch_size"), knob(app, "grad_accum"), knob(app, "precision")) == (4, 4, "bf16")
        assert "r runs it" in screen_text(app)


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_an_answer_that_the_budget_ended_says_how_far_the_search_came(home: Home, size: tuple[int, int]) -> None:
    lines = best_answered(best_number=BASELINE, gain_percent=None, tied_numbers=[], tried_in_budget=5)
    async with StillApp(home).run_test(size=size) as pilot:
        text = await best_opened(pilot, a_best_search(home, lines))
        assert "? 5 of 12 tried when the budget ended; t adds time; best so far: the baseline" in " ".join(text.split())
        assert "best so far 60.5 samples/s" in text


OTHERS = Doubt(kind="other_processes", text="other processes took 72 % of the CPU")


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_a_search_that_got_nowhere_says_why_and_has_no_check_mark(home: Home, size: tuple[int, int]) -> None:
    void = [
        a_trial(number, 70.0, 33 + number, outcome="void", reason=OTHERS.text, doubts=[OTHERS]) for number in (4, 7, 9)
    ]
    *lines, end = best_answered(tied_numbers=[], tried_in_budget=1)
    only_baseline = [
        line for line in lines if not isinstance(line, Trial | ColdRun) or line.candidate_number == BASELINE
    ]
    search = a_best_search(home, [*only_baseline, *void, end])
    async with StillApp(home).run_test(size=size) as pilot:
        text = " ".join((await best_opened(pilot, search)).split())
        assert "? machine busy: 3 of 4 settings void; t adds time; best so far" in text
        assert "✓" not in text
    table = [line_text(line) for line in trial_lines(best_seen(search).so_far, size[0])]
    for row, reason in itertools.pairwise(table):
        assert OTHERS.text in reason or not row.startswith("~"), "each void trial has its reason"
    assert sum(OTHERS.text in row for row in table) == 3
    answer = "\n".join(answer_lines(BestSoFar(tuple(read_best_journal(search))), BEST_ID))
    assert answer.count(OTHERS.text) == 3
    reported = [trial["reason"] for trial in best_report(search)["trials"] if trial["outcome"] == "void"]
    assert reported == 3 * [OTHERS.text]


async def test_an_answer_measured_beside_others_is_doubtful_on_the_screen_and_in_json(home: Home) -> None:
    lines = [
        replace(line, reason=OTHERS.text, doubts=[OTHERS]) if isinstance(line, ColdRun) else line
        for line in best_answered(tied_numbers=[])
    ]
    search = a_best_search(home, lines)
    async with StillApp(home).run_test(size=FULL) as pilot:
        text = await best_opened(pilot, search)
        assert "✓" not in text
        assert f"? the best setting: {OTHERS.text}" in text
    report = best_report(search)
    assert {"kind": "other_processes", "text": OTHERS.text} in to_builtins(report["best"]["doubts"])
    assert [doubt.kind for doubt in report["doubts"]] == ["other_processes", "other_processes"]
    assert f"the baseline: {OTHERS.text}" in "\n".join(answer_lines(BestSoFar(tuple(lines)), BEST_ID))


@pytest.mark.parametrize("is_live", [True, False])
def test_the_mark_of_the_chart_stands_at_the_figure_of_the_headline(home: Home, is_live: bool) -> None:
    """A trial of 80.0 samples/s of the best setting, whose rate is 60.5 by all that was measured."""
    lines = best_going_on() if is_live else best_answered()
    so_far = BestSoFar((*lines[:-1], a_trial(FASTEST, 80.0, 33), lines[-1]))
    [mark] = [point for point in candidate_points(so_far, is_live=is_live) if point.sign == "■"]
    assert so_far.best is not None
    assert mark.rate == so_far.best.value.median != 80.0


async def test_only_a_gain_has_a_bar(home: Home) -> None:
    async with StillApp(home).run_test(size=FULL) as pilot:
        rows = (await best_opened(pilot, a_best_search(home, best_answered()))).splitlines()
        assert "█" in next(row for row in rows if row.startswith("precision=bf16 for fp32"))
        assert "█" not in next(row for row in rows if "-20.3 %" in row)


async def test_enter_takes_the_best_of_another_preset_with_that_preset(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        await best_opened(pilot, a_best_search(home, best_answered()))
        app.session.set_preset("gpt2")
        await pilot.press("enter")
        await pilot.pause()
        assert app.screen is app.main
        assert app.session.next_run is not None
        assert app.session.next_run.spec.name == "tiny-llama"
        assert (knob(app, "batch_size"), knob(app, "precision")) == (4, "bf16")
        assert knob(app, "memory_limit") == a_question().knobs["memory_limit"], "the search's own settings"
        assert "The next run is now tiny-llama with its search's best setting" in screen_text(app)


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_an_answer_that_the_noise_decides_names_no_winner(home: Home, size: tuple[int, int]) -> None:
    async with StillApp(home).run_test(size=size) as pilot:
        text = await best_opened(pilot, a_best_search(home, best_answered(within_percent=8.0)))
        assert "✓ no winner: within 8.0 %, the noise of this machine" in text
        assert "chosen 60.5 samples/s" in text


async def test_enter_takes_the_best_so_far_and_the_search_goes_on(home: Home, live_best: Path) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        await best_opened(pilot, live_best)
        await pilot.press("enter")
        await pilot.pause()
        assert knob(app, "precision") == "bf16"
        await pilot.press("r")
        await pilot.pause()
        assert "Best-fit search is using the device; B shows it, s there stops it." in screen_text(app)
        await pilot.press("b")
        await pilot.pause()
        assert app.screen is app.main, "the batch search needs the device as well"
        await pilot.press("B")
        await pilot.pause()
        assert "best so far" in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert "The search goes on; B shows it." in screen_text(app)


async def test_search_that_waits_for_another_run_names_it(home: Home, conduct: Callable[[Path], None]) -> None:
    run_id = "20261121-080200-gpt2-0a0a"
    search = a_best_search(home, [*best_going_on(), Waiting(t_ns=START_NS + 32 * S, run_id=run_id)])
    conduct(search)
    async with StillApp(home).run_test(size=FULL) as pilot:
        text = await best_opened(pilot, search)
    assert f"● waiting for {run_id} to end" in text
    assert "32 s so far, the budget is 10 min" in text, "the wait takes nothing of the budget"


async def test_space_pauses_and_again_goes_on(home: Home, live_best: Path) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        await best_opened(pilot, live_best)
        await pilot.press("space")
        await until_true(pilot, (live_best / PAUSE_FILE).exists, "the pause")
        assert "● pausing after this step" in await show_best(pilot, live_best)
        write_lines(live_best / "journal.jsonl", [*best_going_on(), Paused(t_ns=START_NS + 35 * S)])
        text = await show_best(pilot, live_best)
        assert "■ paused: no process is running" in text
        assert "space resume" in text
        await pilot.press("space")
        await until_true(pilot, lambda: not (live_best / PAUSE_FILE).exists(), "the end of the pause")


async def test_p_pins_a_value_and_x_skips_one(home: Home, live_best: Path) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        await best_opened(pilot, live_best)
        await pilot.press("p")
        assert "checkpointing=full  6 settings" in screen_text(app)
        await pilot.press(*"bf16", "enter")
        await until_true(pilot, lambda: len(read_instructions(live_best)) == 1, "the pin")
        await show_best(pilot, live_best)
        await pilot.press("x")
        assert "precision=bf16  6 settings" not in screen_text(app), "without the pinned value there is none"
        await pilot.press(*"full 3 settings", "enter")
        await until_true(pilot, lambda: len(read_instructions(live_best)) == 2, "the skip")
        assert [(one.do, one.knob, one.value) for one in read_instructions(live_best)] == [
            ("pin", "precision", "bf16"),
            ("skip", "checkpointing", "full"),
        ]
        text = await show_best(pilot, live_best)
        assert "your instructions: pin precision=bf16 (before the next step), skip checkpointing=full" in text
        taken = Instruction(t_ns=START_NS + 36 * S, do="pin", knob="precision", value="bf16")
        write_lines(live_best / "journal.jsonl", [*best_going_on(), taken])
        assert "your instructions: pin precision=bf16, skip" in await show_best(pilot, live_best)
        await pilot.press("p", *"unpin", "enter")
        await until_true(pilot, lambda: len(read_instructions(live_best)) == 3, "the unpin")
        assert read_instructions(live_best)[-1].do == "unpin"


async def test_x_skips_the_setting_under_way(home: Home, live_best: Path) -> None:
    async with StillApp(home).run_test(size=FULL) as pilot:
        await best_opened(pilot, live_best)
        await pilot.press("x")
        assert "setting 11" in screen_text(pilot.app)  # type: ignore[arg-type]
        await pilot.press(*"under way", "enter")
        await until_true(pilot, lambda: len(read_instructions(live_best)) == 1, "the skip")
        assert (read_instructions(live_best)[0].do, read_instructions(live_best)[0].candidate_number) == ("skip", 11)
        words = " ".join((await show_best(pilot, live_best)).split())
    assert "your instructions: skip the setting batch_size=16 grad_accum=1 precision=bf16 checkpointing=full" in words


OBJECTIVES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"objective": "tokens_per_s"}, "7,808 tokens/s (7,603 to 8,013)", "tokens/s (95 % CI)", "tokens/s over memory"),
    (
        {"objective": "time", "for_steps": 800},
        "3.65 min (3.57 to 3.75) for 800 steps",
        "min (95 % CI)",
        "samples/s over memory",
    ),
    (
        {"objective": "samples_per_joule"},
        "61.0 samples/J (59.4 to 62.6)",
        "samples/J (95 % CI)",
        "samples/J over memory",
    ),
]


@pytest.mark.parametrize("size", [FULL, SMALL])
@pytest.mark.parametrize(("asked", "best", "column", "chart"), OBJECTIVES)
async def test_every_figure_is_that_of_the_objective(
    home: Home,
    conduct: Callable[[Path], None],
    size: tuple[int, int],
    asked: dict[str, Any],
    best: str,
    column: str,
    chart: str,
) -> None:
    lines = [a_question(**asked), *best_going_on()[1:]]
    joules = [replace(line, joules=0.2 * 16 * 8) if isinstance(line, Trial) else line for line in lines]
    search = a_best_search(home, joules)
    conduct(search)
    async with StillApp(home).run_test(size=size) as pilot:
        text = await best_opened(pilot, search)
    assert f"best so far {best}" in text
    assert column in text
    assert chart in text
    if asked["objective"] == "samples_per_joule":
        assert "5.00 (" in text, "of the trials' own counters"


async def test_a_smaller_terminal_shows_all_that_matters(home: Home, live_best: Path) -> None:
    async with StillApp(home).run_test(size=FULL) as pilot:
        await best_opened(pilot, live_best)
        await pilot.resize_terminal(*SMALL)
        await pilot.pause()
        lines = screen_text(pilot.app).splitlines()  # type: ignore[arg-type]
    assert (len(lines), max(map(len, lines))) == (24, 80)
    assert lines[-1].startswith("Enter take")
    assert any("limit 1.00 GiB" in line for line in lines)
    assert any(line.startswith("▸ batch_size=16") for line in lines)


async def test_an_answer_longer_than_the_screen_begins_at_its_top_and_scrolls_to_the_trials(
    home: Home, live_best: Path
) -> None:
    app = StillApp(home)
    async with app.run_test(size=(80, 12)) as pilot:
        await best_opened(pilot, live_best)
        await pilot.press(*["up"] * 3, *["down"] * 12)
        write_lines(live_best / "journal.jsonl", best_answered())
        lines = (await show_best(pilot, live_best)).splitlines()
        assert lines[0].startswith("best fit: tiny-llama ─"), "moves in the table of trials scroll no answer"
        assert lines[1].startswith("✓ ")
        assert lines[10].startswith("more lines: ")
        await pilot.press("space")
        assert "There is no live search." in screen_text(app), "a notice stands below what scrolls"
        await pilot.press(*["down"] * 30)
        assert "cold" in screen_text(app).splitlines()[8]


@pytest.mark.parametrize("plain_output", [False, True])
async def test_plain_ascii_and_no_control_sequences(
    home: Home, conduct: Callable[[Path], None], plain_output: bool
) -> None:
    search = a_best_search(home, [*best_going_on()[:-1], chosen(31, "trial", 3, "x\x1b[31my")])
    conduct(search)
    async with StillApp(home, ascii=True, plain_output=plain_output).run_test(size=FULL) as pilot:
        text = await best_opened(pilot, search)
    assert text.isascii(), {character for character in text if ord(character) > 127}
    assert "xy" in text


def test_a_snapshot_knows_the_state_the_rates_and_the_limit(home: Home) -> None:
    seen = best_seen(a_best_search(home, best_going_on()))
    assert seen.state == "interrupted"
    rate = seen.so_far.rates[0]
    assert rate.low < 42.0 < rate.high
    assert seen.so_far.limit_bytes == 1 << 30
    assert seen.so_far.candidates == SPACE.candidates


def test_the_rate_of_a_run_under_the_limit_is_none_of_the_setting(home: Home) -> None:
    run = ColdRun(candidate_number=2, role="limit", run_id="r", outcome="measured", samples_per_s=4.0, seconds=9.0)
    so_far = best_seen(a_best_search(home, [*best_going_on(), run])).so_far
    assert so_far.attempts[-1] == run
    assert len(so_far.attempts) - 1 not in so_far.values
    assert 41 < so_far.values[0].median < 43


def test_the_command_aligns_the_gains_of_its_answer_to_the_right(home: Home) -> None:
    lines = answer_lines(best_seen(a_best_search(home, best_answered())).so_far, BEST_ID)
    header = next(at for at, line in enumerate(lines) if line.startswith("value "))
    table = lines[header : header + 5]
    assert len({line.index(")") for line in table}) == 1, "\n".join(table)
