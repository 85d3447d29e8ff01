"""A script of one's own on the screen: its flags and mapping as next run, and what its hooks saw of a run."""

import re
import shlex
import shutil
import sys
import tomllib
from functools import partial

import msgspec
import pytest
from recorded import START_NS, S, a_run, a_step, an_oom_run, explained, with_end, with_start, write_lines
from still import FULL, SMALL, a_live_run, a_snapshot, has, running, shown
from textual.widgets import Input

from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_file import ScriptAsked, ScriptFigures
from trainfast_runner.records.run_lines import Event
from trainfast_runner.running import discovery
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.panels.dialogs import YesDialog
from trainfast_tui.panels.knob_panel import KnobPanel
from trainfast_tui.screens.batch import BatchScreen

ARGPARSE = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=16)
parser.add_argument("--eval-batch-size", type=int, default=64)
parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
parser.add_argument("--workers", "-j", type=int, default=2)
parser.add_argument("--half", action="store_true")
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
pathlib.Path("trained").write_text("the training has begun")
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a script, which is the current one."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(ARGPARSE)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def patient_discovery(monkeypatch):
    """A script that does not reach its parser is ended by nothing but its screen."""
    monkeypatch.setattr(discovery, "discover", partial(discovery.discover, limit_s=600.0))


def command(*arguments):
    """The command of the folder's script, as it is typed."""
    return shlex.join([sys.executable, "train.py", *arguments])


async def typed(pilot, text):
    """Type a line into the dialog in sight, in place of what stands there."""
    pilot.app.screen.query_one(Input).value = text
    await pilot.press("enter")


async def looked_into(pilot, *arguments):
    """Press `o`, type the command, and wait for the flags of its script; the text of the screen."""
    await pilot.show(a_snapshot(None))
    await pilot.press("o")
    await typed(pilot, command(*arguments))
    return await pilot.until("stopped at the parser")


async def to_knob(pilot, name):
    """Move the cursor of the mapping to this knob."""
    screen = pilot.app.screen
    for _ in range(20):
        await pilot.press("up")
    while screen.current != name:
        before = screen.current
        await pilot.press("down")
        assert screen.current != before, f"{name} is not mapped"


async def saved(pilot, name):
    """Save the mapping as this preset, which becomes the next run."""
    await pilot.press("w")
    await typed(pilot, name)
    await pilot.until(f"{name} is the next run")


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_o_shows_a_scripts_flags_and_the_proposed_mapping(home, work, size):
    async with running(home, size=size) as (_, pilot):
        text = await looked_into(pilot, "--bs", "8")
        has(text, "stopped at the parser: argparse, 6 flags", "▸ batch_size      --bs {}", "now 8")
        has(text, "--bs is a usual name for batch_size; default 16, this command gives 8")
        has(text, "fp32: --dtype float32, bf16: --dtype bfloat16")
        has(text, "without a flag, through DataLoader's defaults: pin_memory", "--eval-batch-size")
        assert text.splitlines()[-1].startswith("w save  Enter flag  a add  x remove  c command  Esc back")
        assert not (work / "trained").exists(), "nothing of the training ran"


async def test_without_a_command_the_screen_says_what_to_do(home, work):
    async with running(home, size=SMALL) as (app, pilot):
        text = await pilot.press("o", "escape")
        assert "Enter types its command." in text
        assert text.splitlines()[-1].startswith("Enter command  Esc back")
        await pilot.press("enter")
        await typed(pilot, command())
        await pilot.until("stopped at the parser")
        await pilot.press("escape")
        assert app.screen is app.main


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("", "type the command that starts your script; try python train.py"),
        ("python 'train.py", "a quote is open"),
        ("python train.py | tee log", "no shell runs the command, so | has no meaning in it"),
        (f"{sys.executable} trian.py", "there is no script trian.py; did you mean train.py?"),
    ],
)
async def test_a_line_that_is_no_command_is_refused_where_it_is_typed(home, work, line, refusal):
    async with running(home, size=SMALL) as (app, pilot):
        await pilot.press("o")
        await typed(pilot, line)
        assert refusal in " ".join(app.text.replace("│", " ").split())
        assert app.screen.query(Input), "the dialog stays"


async def test_mapping_is_corrected_by_keyboard(home, work):
    async with running(home) as (app, pilot):
        await looked_into(pilot)
        await pilot.press("enter")
        await typed(pilot, "--bss")
        assert "the script has no flag --bss; did you mean --bs?" in app.text
        await typed(pilot, "--eval-batch-size")
        text = app.text
        has(text, "▸ batch_size      --eval-batch-size {}", "given by you")
        await to_knob(pilot, "workers")
        assert "workers has no flag now" in await pilot.press("x")
        await pilot.press("a")
        await pilot.press(*"checkpointing", "enter")
        await typed(pilot, "--half")
        assert "▸ checkpointing   full: --half, off: nothing" in app.text
        await to_knob(pilot, "precision")
        await pilot.press("enter")
        await typed(pilot, "bf16: --halve, fp32: nothing")
        assert "the script has no flag --halve; did you mean --half?" in app.text
        await typed(pilot, "bf16: --half, fp32: nothing")
        (row,) = (row for row in app.text.splitlines() if row.startswith("▸ precision "))
        assert "bf16: --half, fp32: nothing" in row
        await saved(pilot, "mine")
    preset = tomllib.loads((home.path.parent / "config/trainfast-tui/presets/mine.toml").read_text())
    assert preset["script"]["knobs"] == {
        "batch_size": "--eval-batch-size {}",
        "lr": "--lr {}",
        "precision": {"bf16": "--half", "fp32": ""},
        "checkpointing": {"full": "--half", "off": ""},
    }
    assert preset["script"]["cwd"] == str(work)


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_saved_script_is_the_next_run_and_its_knobs_say_how_they_reach_it(home, work, size):
    async with running(home, size=size) as (app, pilot):
        await looked_into(pilot)
        await saved(pilot, "mine")
        assert app.screen is app.main
        text = app.text
        has(text, "script train.py", "by a flag", "batch_size     16")
        assert "script --bs {}" in " ".join(text.split())
        panel = app.main.query_one(KnobPanel)
        await pilot.press("right")
        assert app.knobs["batch_size"] == 32
        panel.move_to("lr")
        assert "script's own" in app.text, "a value that nobody asked for is left to the script"
        panel.move_to("precision")
        await pilot.press("right")
        assert app.knobs["precision"] == "bf16", "tf32 has no words in this script"
        panel.move_to("attention")
        text = app.text
        assert "script no flag is mapped to" in text
        await pilot.press("right")
        assert "attention cannot reach mine" in " ".join(app.text.split())
        panel.move_to("optimizer")
        assert "script without a flag: only" in app.text
        assert "your script: train.py" in await pilot.press("p")


async def test_both_searches_and_r_ask_first_about_a_script(home, work):
    async with running(home) as (app, pilot):
        await looked_into(pilot)
        await saved(pilot, "mine")
        await pilot.press("b")
        text = " ".join(app.text.split())
        assert isinstance(app.screen, BatchScreen)
        has(text, "each size is a process of its own", "Enter starts the search; Esc goes back.")
        await pilot.press("escape")
        await pilot.press("B")
        await pilot.until_true(lambda: "Listing the settings" not in app.text, "the plan of a best-fit search")
        text = app.text
        assert "best fit: mine" in text
        assert "Refused" not in text
        assert "each trial is a process of its own" in " ".join(text.split())
        assert "Enter starts the search; Esc goes back." in text
        await pilot.press("escape")
        started = []
        app.session.run_control.start = lambda spec, run_to_stop=None: started.append(spec)
        await pilot.press("r")
        assert isinstance(app.screen, YesDialog)
        assert "train.py runs to completion and writes its usual files" in app.text
        await pilot.press("enter", "n")
        assert started == []
        app.session.set_next_run(app.session.next_run.with_value("steps", "20"))
        await pilot.press("r")
        assert [spec.knobs["steps"] for spec in started] == [20]
        assert started[0].script.command[-1] == "train.py"


async def test_a_script_that_fails_says_why_and_its_command_looks_again(home, work):
    (work / "train.py").write_text("raise RuntimeError('no data here')\n")
    async with running(home, a_snapshot(None), size=SMALL) as (_, pilot):
        await pilot.press("o")
        await typed(pilot, command())
        text = " ".join((await pilot.until("c types another command, or looks again")).split())
        assert "train.py ended before its arguments were read: RuntimeError: no data here" in text
        (work / "train.py").write_text(ARGPARSE)
        await pilot.press("c", "enter")
        await pilot.until("stopped at the parser")


@pytest.mark.usefixtures("patient_discovery")
@pytest.mark.parametrize("key", ["escape", "c"])
async def test_leaving_or_looking_again_beside_a_measured_run_ends_the_script(home, work, hold, key):
    (work / "train.py").write_text("import time\ntime.sleep(600)\n")
    async with running(home, a_snapshot(None), size=SMALL) as (app, pilot):
        await pilot.press("o")
        await typed(pilot, command())
        await pilot.until("running the script up to its argument parser…")
        if key == "c":
            app.post(SnapshotTaken(a_snapshot(a_live_run(home, hold), second=23)))
        text = " ".join((await pilot.press(*([key] if key == "escape" else [key, "enter"]))).split())
        measured = "is being measured, and starting the script would slow it"
        assert app.screen is app.main if key == "escape" else measured in text
        thread = app.session.discovery._thread
        thread.join(60)
        assert not thread.is_alive()


async def test_the_screen_outlives_the_folder_that_the_app_was_started_in(home, work):
    async with running(home) as (app, pilot):
        await looked_into(pilot)
        shutil.rmtree(work)
        await pilot.show(a_snapshot(None))
        assert str(work) in app.text
        await pilot.press("w")
        await typed(pilot, "mine")
        await pilot.until(f"there is no script train.py in {work}")


COMMAND = ["python", "train.py"]


def of_script(directory):
    """The run as a script's: no samples, no tokens, no loss, no preset's settings."""
    asked = ScriptAsked(command=COMMAND, argv=COMMAND)
    knobs = {"timing_warmup": 3}
    with_start(directory, preset="train.py", title="python train.py", model={}, data={}, knobs=knobs, script=asked)
    unknown = {"samples": None, "tokens": None, "loss": None, "backward_ms": None}
    steps = [msgspec.structs.replace(a_step(number), **unknown) for number in range(1, 31)]
    write_lines(directory / "steps.jsonl", steps)
    return directory


async def test_live_script_shows_its_steps_and_no_rate_of_samples(home, hold):
    why = "no optimizer step seen in 60 s: torch was imported"
    directory = of_script(a_live_run(home, hold, Event(t_ns=START_NS + 9 * S, kind="no_step", detail=why)))
    for size in ((160, 48), SMALL):
        text, app = await shown(home, a_snapshot(directory, second=23), size=size)
        has(text, "● running", "step 30")
        assert re.search(r"\b4[5-9]\d ms", text), "the median of its steps"
        assert "0 samples/s" not in text
        assert app.session.next_run.spec.preset == "train.py", "r starts it again"


LONG = ("/a/folder/deep/below/others/env/bin/python", "-u")


def with_flags(directory, *, flagged, knobs):
    """The run as one of a script, whose flags took these knobs."""
    words, named = [*LONG, "train.py"], {"preset": "train.py", "knobs": knobs}
    asked = ScriptAsked(command=words, argv=words, flagged=list(flagged))
    with_start(directory, title="train.py", model={}, data={}, overrides=list(knobs), script=asked, **named)
    with_end(directory, script=ScriptFigures(command=words), **named)
    return explained(directory) if read_result(directory).state == "oom" else directory


async def test_out_of_memory_proposes_only_knobs_that_reach_the_script(home):
    knobs = {"batch_size": 64, "grad_accum": 1, "precision": "fp32", "timing_warmup": 3}
    directory = with_flags(an_oom_run(home), flagged=("batch_size", "grad_accum"), knobs=knobs)
    async with running(home, a_snapshot(directory)) as (app, pilot):
        text = app.text
        has(text, "1 batch_size = 32, grad_accum = 2", "the global batch stays")
        for name in ("precision = ", "optimizer = ", "checkpointing = ", "seq_len = "):
            assert name not in text
        app.session.set_preset("tiny-llama")
        assert "The changes are for train.py; the next run is tiny-llama." in await pilot.press("1")


async def test_out_of_memory_without_a_knob_says_what_to_try(home):
    directory = with_flags(an_oom_run(home), flagged=(), knobs={"timing_warmup": 3})
    async with running(home, a_snapshot(directory), size=SMALL) as (app, _):
        text = " ".join(line.split("│")[0] for line in app.text.splitlines())
        assert "make the batch smaller, or map its flag (o)" in " ".join(text.split())


async def test_a_script_run_on_the_screen_is_the_next_run_unless_a_value_of_it_is_unknown(home):
    directory = with_flags(a_run(home), flagged=("batch_size",), knobs={"batch_size": 8, "steps": 30})
    newer = with_flags(a_run(home, "20261121-060000-x-0001"), flagged=(), knobs={"precision": "fp4", "steps": 30})
    async with running(home, a_snapshot(directory)) as (app, _):
        assert app.session.next_run.script.command == (*LONG, "train.py"), "with the flags that it ran with"
        assert app.knobs == {"steps": 30}
    async with running(home, a_snapshot(newer)) as (app, _):
        assert app.session.next_run.script is None
        assert "train.py" in app.text, "the run itself is shown"
