"""A run of one's own script on the main screen: what its hooks saw, and nothing made up for the rest."""

import re

import msgspec
from recorded import START_NS, S, a_run, a_step, an_oom_run, explained, with_end, with_start, write_lines
from still import SMALL, a_live_run, a_snapshot, has, running, shown

from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_file import ScriptAsked, ScriptFigures
from trainfast_runner.records.run_lines import Event

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
