"""The pictures of the documentation: from a real training when asked for, else from recorded runs.

    TRAINFAST_SCREENSHOTS=1 pytest tests/tui/test_screenshots.py

trains tiny-llama three times, finds its largest batch and its best fit, trains beside eight stand-in GPUs, and
writes docs/screens/*.svg. Take them on a quiet machine.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from benchmarks.sampler_cost import throttled_on_and_off
from recorded import a_run, an_oom_run
from still import a_snapshot, running, screen_text

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


async def until(pilot, words):
    """Wait for words, given as a regular expression, to stand on the screen."""
    deadline = time.monotonic() + PATIENCE_S
    while not re.search(words, text := screen_text(pilot.app)):
        assert time.monotonic() < deadline, f"{words!r} never came:\n{text}"
        await pilot.pause(0.1)


def picture(app, name, folder):
    """The screen as an SVG that no web font is needed for."""
    path = folder / f"{name}.svg"
    path.write_text(app.export_screenshot(title="trainfast-tui", simplify=True), encoding="utf-8")
    return path


class Step(NamedTuple):
    """Knobs to turn and keys to press, words to wait for, and the picture to take then."""

    keys: Sequence[str]
    words: str
    """A regular expression."""
    picture: str = ""
    knobs: dict[str, str] = {}


LATE_STEP = "step (3[5-9]|4[0-9]) of 50"
SMALL_LIMIT = {"batch_size": "8", "memory_limit": "768MiB"}
TRAINING = [
    Step("", "No run yet"), Step("", "global batch", "first-start"), Step("r", LATE_STEP, "live"),
    Step("", "✓ finished"), Step(["right"], "global batch 16", "turned-knob"), Step("r", "● running"),
    Step("", LATE_STEP, "second-run"), Step("", "✓ finished"), Step("c", "compare ─", "compare"),
    Step(["escape"], "✓ finished"), Step("r", "OUT OF MEMORY", knobs={"batch_size": "4096", "memory_limit": "1GiB"}),
    Step("", "the prediction says that each fits", "out-of-memory"),
    Step(["b", "enter"], "✓ batch_size [0-9]+ (is the largest that )?fits", "batch-search", SMALL_LIMIT),
    Step(["enter", "h"], "4 runs", "runs"),
]  # fmt: skip
BEST_FIT = [
    Step("", "global batch"),
    Step("B", "candidates ", knobs={"batch_size": "2", "grad_accum": "8", "seq_len": "64"}),
    Step([*"vbatch_size=2,4,8,16", "space", *"checkpointing=off,full", "enter"], "v vary +batch_size=2,4,8,16 check"),
    Step([*"b16", "enter"], "b global batch +16 samples"),
    Step([*"t4m", "enter"], "t time budget +4 min"),
    Step(["enter"], "✓ ", "best-fit"),
]
THROTTLED = [
    Step("", "global batch"),
    Step("r", "step (8[0-9]|9[0-9]) of 120", "throttled", {"watch": "0+1+2+3+4+5+6+7", "steps": "120"}),
    Step("s", "stop"),
]


async def take(steps, home, size=(140, 42)):
    """Train for real and take the pictures of these steps."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    app = TrainfastApp(Session(Home(home).create(), preset="tiny-llama"))
    async with app.run_test(size=size) as pilot:
        app.theme = "textual-dark"
        for step in steps:
            if step.knobs:
                app.session.set_knobs(step.knobs.items())
            await pilot.press(*step.keys)
            await until(pilot, step.words)
            if step.picture:
                picture(app, step.picture, SCREENS)


@asked
@pytest.mark.parametrize("steps", [TRAINING, BEST_FIT], ids=["training", "best-fit"])
async def test_pictures_of_a_real_training(tmp_path, steps):
    pytest.importorskip("torch")
    await take(steps, tmp_path / "home")


@asked
async def test_picture_of_eight_gpus_held_back_by_heat(tmp_path):
    """The driver's library is a stand-in, which only a new process loads: this test runs itself in one."""
    if BESIDE_GPUS not in os.environ:
        environment = {**throttled_on_and_off(tmp_path), BESIDE_GPUS: "1"}
        command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "eight_gpus"]
        assert subprocess.run(command, env=environment, check=False).returncode == 0
        return
    await take(THROTTLED, tmp_path / "home", (160, 48))


async def test_pictures_can_be_made_of_recorded_runs(home, tmp_path):
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


def test_the_documentation_has_every_picture():
    if not SCREENS.exists():
        pytest.skip("docs/screens has not been written yet")
    for name in NAMES:
        assert (SCREENS / f"{name}.svg").stat().st_size > 10_000
