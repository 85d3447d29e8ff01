"""How the screens read, from recorded runs: `screens/*.txt`. TRAINFAST_UPDATE_SCREENS=1 takes a wanted change over."""

from collections.abc import Callable

import pytest
from recorded import a_run, a_thermal_ramp, an_oom_run, answered, best_answered, best_going_on, going_on
from still import FULL, MIDDLE, PREDICTED, SMALL, Lock, a_live_run, a_snapshot, assert_screen, running, the_machine
from textual.color import Color

from trainfast_runner.records.home import Home
from trainfast_runner.records.result import RunError
from trainfast_runner.records.run_directory import read_result
from trainfast_tui.control.messages import NextRunPredicted, RunsCompared
from trainfast_tui.live.snapshot import Snapshot


def a_failed_run(home):
    error = RunError(rank=0, phase="backward", type="ValueError", message="no gradient for wte")
    reason, log = "ValueError: no gradient for wte", "one\ntwo\nthree\n"
    return a_run(home, state="failed", steps=4, reason=reason, error=error, log=log)


RUNS: dict[str, Callable[[Home, Lock], Snapshot]] = {
    "live": lambda home, hold: a_snapshot(a_live_run(home, hold), second=23),
    "eight-gpus": lambda home, hold: a_snapshot(a_live_run(home, hold, gpus=8), second=23),
    "thermal-ramp": lambda home, hold: a_snapshot(a_thermal_ramp(home), second=38),
    "first-start": lambda home, hold: a_snapshot(None),
    "out-of-memory": lambda home, hold: a_snapshot(an_oom_run(home)),
    "finished": lambda home, hold: a_snapshot(a_run(home)),
    "synthetic-data": lambda home, hold: a_snapshot(a_run(home, synthetic=True)),
    "failed": lambda home, hold: a_snapshot(a_failed_run(home)),
}


SCREENS = [
    ("live", FULL, ""), ("live", SMALL, ""), ("live", (60, 20), ""), ("live", FULL, "r"), ("eight-gpus", FULL, ""),
    ("eight-gpus", SMALL, ""), ("thermal-ramp", (140, 48), "less_than_sign"), ("thermal-ramp", FULL, "d"),
    ("first-start", (100, 30), ""), ("first-start", SMALL, ""), ("first-start", SMALL, "question_mark"),
    ("out-of-memory", (120, 36), ""), ("out-of-memory", SMALL, ""), ("finished", FULL, ""),
    ("finished", MIDDLE, "right down right l"), ("finished", SMALL, "enter"), ("synthetic-data", MIDDLE, ""),
    ("failed", MIDDLE, ""),
]  # fmt: skip


@pytest.mark.parametrize(("run", "size", "keys"), SCREENS)
async def test_the_main_screen(home, hold, run, size, keys):
    async with running(home, RUNS[run](home, hold), size=size) as (app, pilot):
        await pilot.post(NextRunPredicted(PREDICTED))
        await pilot.press(*keys.split())
        assert_screen(app, "-".join([run, *keys.split(), f"{size[0]}x{size[1]}"]))


async def test_ascii(home, hold):
    async with running(home, RUNS["live"](home, hold), size=(100, 30), ascii=True) as (app, pilot):
        await pilot.post(NextRunPredicted(PREDICTED))
        assert_screen(app, "live-ascii-100x30")


async def test_a_comparison(home):
    first = read_result(a_run(home, "20261121-054455-tiny-llama-7f3a"))
    second = read_result(a_run(home, "20261121-055012-tiny-llama-91bc", knobs={"batch_size": 16}, step_ms=700.0))
    async with running(home, size=(120, 32)) as (app, pilot):
        await pilot.post(RunsCompared(first, second))
        assert_screen(app, "comparison-120x32")


async def test_the_list_of_runs(home):
    a_run(home, "20261121-054455-tiny-llama-7f3a")
    a_run(home, "20261121-055012-bert-large-91bc", preset="bert-large", synthetic=True, knobs={"precision": "bf16"})
    an_oom_run(home)
    async with running(home, size=(120, 20)) as (app, pilot):
        await pilot.press("h")
        await pilot.until("3 runs")
        await pilot.press("space", "down")
        assert_screen(app, "runs-120x20")


@pytest.mark.parametrize(
    ("name", "lines", "sizes"),
    [
        ("batch-live", going_on, [MIDDLE]),
        ("batch-answered", answered, [MIDDLE, SMALL]),
        ("best-live", best_going_on, [FULL, SMALL]),
        ("best-answered", best_answered, [FULL, SMALL]),
    ],
)
async def test_a_search(home, conducted, name, lines, sizes):
    search = conducted(lines())
    for size in sizes:
        async with running(home, size=size) as (app, pilot):
            await pilot.opened(search)
            assert_screen(app, f"{name}-{size[0]}x{size[1]}")


@pytest.mark.parametrize(("size", "keys"), [(FULL, ["right"] * 5 + ["down"]), (SMALL, []), ((160, 90), [])])
async def test_eight_gpus_and_who_uses_them(home, size, keys):
    async with running(home, size=size) as (app, pilot):
        await pilot.monitor(the_machine())
        await pilot.press(*keys)
        assert_screen(app, f"monitor-{size[0]}x{size[1]}")


async def test_throttled_columns_are_red_and_a_light_theme_is_light(home, hold):
    async with running(home, RUNS["thermal-ramp"](home, hold), size=(140, 48)) as (app, pilot):
        assert {style.color.name for style in app.styles_of("░░") if not style.bold} == {"color(1)"}
        for theme, is_light in (("terminal-light", None), ("textual-dark", False), ("textual-light", True)):
            await pilot.press("f2")
            assert app.theme == theme
            if is_light is not None:
                grounds = {Color.from_rich_color(style.bgcolor).brightness for style in app.styles_of("░░")}
                assert all((ground > 0.5) == is_light for ground in grounds)
