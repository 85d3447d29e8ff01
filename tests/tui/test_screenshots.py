"""The pictures of the documentation: from a real training when asked for, else from recorded runs.

    TRAINFAST_SCREENSHOTS=1 pytest tests/tui/test_screenshots.py

trains tiny-llama three times, finds its largest batch and its best fit, trains beside eight stand-in GPUs, and
writes docs/screens/*.svg. Take them on a quiet machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sampler_cost import throttled_on_and_off
from recorded import a_run, an_oom_run
from still import a_snapshot, running, screen_text
from textual.pilot import Pilot

from trainfast_runner.records.home import Home
from trainfast_tui.app import TrainfastApp
from trainfast_tui.session import Session

SCREENS = Path(__file__).resolve().parents[2] / "docs" / "screens"
NAMES = (
    *("first-start", "live", "turned-knob", "second-run", "compare"),
    *("out-of-memory", "batch-search", "runs", "best-fit", "throttled"),
)
BESIDE_GPUS = "TRAINFAST_SCREENSHOTS_BESIDE_GPUS"
PATIENCE_S = 300.0
asked = pytest.mark.skipif(not os.environ.get("TRAINFAST_SCREENSHOTS"), reason="writes docs/screens only when asked to")


async def until(pilot: Pilot[Any], words: str) -> None:
    """Wait for words, given as a regular expression, to stand on the screen."""
    deadline = time.monotonic() + PATIENCE_S
    while not re.search(words, text := screen_text(pilot.app)):
        assert time.monotonic() < deadline, f"{words!r} never came:\n{text}"
        await pilot.pause(0.1)


async def result_shown(app: TrainfastApp, pilot: Pilot[Any]) -> None:
    """Wait for the result of the run on the screen, which is written after the run has finished."""
    deadline = time.monotonic() + PATIENCE_S
    while app.session.shown_run is None or app.session.shown_run.result is None:
        assert time.monotonic() < deadline, "no result"
        await pilot.pause(0.1)


def picture(app: TrainfastApp, name: str, folder: Path, title: str = "trainfast-tui") -> Path:
    """The screen as an SVG that no web font is needed for."""
    path = folder / f"{name}.svg"
    path.write_text(app.export_screenshot(title=title, simplify=True), encoding="utf-8")
    return path


async def take(app: TrainfastApp, *steps: tuple[tuple[str, ...], str, str | None]) -> None:
    """Press the keys of each step, wait for its words, and take its picture if it has a name."""
    pilot = Pilot(app)
    for keys, words, name in steps:
        await pilot.press(*keys)
        await until(pilot, words)
        if name is not None:
            picture(app, name, SCREENS)


@asked
async def test_pictures_of_a_real_training(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    SCREENS.mkdir(parents=True, exist_ok=True)
    app = TrainfastApp(Session(Home(tmp_path / "home").create(), preset="tiny-llama"))
    async with app.run_test(size=(140, 42)) as pilot:
        app.theme = "textual-dark"
        await take(
            app,
            ((), "No run yet", None),
            ((), "global batch", "first-start"),
            (("r",), "step (3[5-9]|4[0-9]) of 50", "live"),
            ((), "✓ finished", None),
            (("right",), "global batch 16", "turned-knob"),
            (("r",), "● running", None),
            ((), "step (3[5-9]|4[0-9]) of 50", "second-run"),
            ((), "✓ finished", None),
        )
        await result_shown(app, pilot)
        await take(app, (("c",), "compare ─", "compare"))
        await pilot.press("escape")
        app.session.next_run = app.session.next_run.with_value("batch_size", "4096").with_value("memory_limit", "1GiB")
        app.main.show_next_run()
        await take(app, (("r",), "OUT OF MEMORY", None), ((), "the prediction says that each fits", "out-of-memory"))
        app.session.set_next_run(
            app.session.next_run.with_value("batch_size", "8").with_value("memory_limit", "768MiB")
        )
        await take(app, (("b", "enter"), "✓ batch_size [0-9]+ (is the largest that )?fits", "batch-search"))
        await take(app, (("enter", "h"), "runs   4", "runs"))


@asked
async def test_picture_of_a_best_fit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    app = TrainfastApp(Session(Home(tmp_path / "home").create(), preset="tiny-llama"))
    async with app.run_test(size=(140, 42)) as pilot:
        app.theme = "textual-dark"
        await until(pilot, "global batch")
        next_run = app.session.next_run.with_value("batch_size", "2").with_value("grad_accum", "8")
        app.session.set_next_run(next_run.with_value("seq_len", "64"))
        varied = ("v", *"batch_size=2,4,8,16", "space", *"checkpointing=off,full", "enter")
        await take(
            app,
            (("B",), "candidates ", None),
            (varied, "v vary +batch_size=2,4,8,16 checkpointing", None),
            (("b", *"16", "enter"), "b global batch +16 samples", None),
            (("t", *"4m", "enter"), "t time budget +4 min", None),
            (("enter",), "✓ ", "best-fit"),
        )


@asked
async def test_picture_of_eight_gpus_held_back_by_heat(tmp_path: Path) -> None:
    """The driver's library is a stand-in, which only a new process loads: this test runs itself in one."""
    if BESIDE_GPUS not in os.environ:
        environment = {**throttled_on_and_off(tmp_path), BESIDE_GPUS: "1"}
        command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "eight_gpus"]
        assert subprocess.run(command, env=environment, check=False).returncode == 0
        return
    app = TrainfastApp(Session(Home(tmp_path / "home").create(), preset="tiny-llama"))
    async with app.run_test(size=(160, 48)) as pilot:
        app.theme = "textual-dark"
        await until(pilot, "global batch")
        app.session.set_next_run(
            app.session.next_run.with_value("watch", "+".join(map(str, range(8)))).with_value("steps", "120")
        )
        await pilot.press("r")
        await until(pilot, "step (8[0-9]|9[0-9]) of 120")
        picture(app, "throttled", SCREENS, "trainfast-tui beside eight stand-in GPUs, in a thermal throttle")
        await pilot.press("s")


async def test_pictures_can_be_made_of_recorded_runs(home: Home, tmp_path: Path) -> None:
    async with running(home, size=(140, 42)) as (app, pilot):
        for name, snapshot in (
            ("first-start", a_snapshot(None)),
            ("live", a_snapshot(a_run(home))),
            ("out-of-memory", a_snapshot(an_oom_run(home))),
        ):
            await pilot.show(snapshot)
            svg = picture(app, name, tmp_path).read_text()
            assert "next" in svg
            assert svg.count("<text") > 40


def test_the_documentation_has_every_picture() -> None:
    if not SCREENS.exists():
        pytest.skip("docs/screens has not been written yet")
    for name in NAMES:
        assert (SCREENS / f"{name}.svg").stat().st_size > 10_000
