"""A run of one's own script on the main screen: what its hooks saw, and nothing made up for the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
from recorded import START_NS, S, a_run, a_step, write_lines
from still import FULL, SMALL, a_live_run, a_snapshot, running, shown, until

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.script_run import ScriptAsked
from trainfast_tui.control.messages import SnapshotTaken

COMMAND = ["python", "train.py"]


def of_script(directory: Path) -> Path:
    """The run as a script's: no samples, no tokens, no loss, no preset's settings."""
    run = read_run_file(directory)
    assert run is not None
    asked = ScriptAsked(command=COMMAND, argv=COMMAND)
    run = msgspec.structs.replace(
        run, preset="train.py", title="python train.py", model={}, data={}, knobs={"timing_warmup": 3}, script=asked
    )
    (directory / "run.json").write_bytes(msgspec.json.encode(run))
    (directory / "steps.jsonl").unlink()
    unknown = {"samples": None, "tokens": None, "loss": None, "backward_ms": None}
    steps = [msgspec.structs.replace(a_step(number), **unknown) for number in range(1, 31)]
    write_lines(directory / "steps.jsonl", steps)
    return directory


async def test_live_script_shows_its_steps_and_no_rate_of_samples(home: Home, hold: Callable[[Path], None]) -> None:
    why = "no optimizer step seen in 60 s: torch was imported"
    directory = of_script(a_live_run(home, hold, Event(t_ns=START_NS + 9 * S, kind="no_step", detail=why)))
    for size in ((160, 48), SMALL):
        text, app = await shown(home, a_snapshot(directory, second=23), size=size)
        assert "● running" in text
        assert "step 30" in text
        assert re.search(r"\b4[5-9]\d ms", text), "the median of its steps"
        assert "0 samples/s" not in text
        assert app.session.next_run is not None
        assert app.session.next_run.spec.preset == "train.py", "r starts it again"


async def test_ended_script_is_in_the_history(home: Home) -> None:
    directory = of_script(a_run(home, preset="train.py", with_result=True))
    async with running(home, size=FULL) as (app, pilot):
        app.post(SnapshotTaken(a_snapshot(directory)))
        await pilot.press("h")
        await until(pilot, "train.py")
