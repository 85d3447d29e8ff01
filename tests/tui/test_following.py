"""Following a run from the command line: what it waits for at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recorded import START_NS, S, a_run, write_lines
from still import own_supervisor

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import RESULT_FILE
from trainfast_runner.records.run_lines import Event
from trainfast_tui.cli import follow_run
from trainfast_tui.cli.follow_run import LOOK_EVERY_S, Signals, follow


def test_a_run_whose_result_is_still_being_written_is_waited_for(
    home: Home, hold: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = a_run(home, state="oom")
    result = (directory / RESULT_FILE).read_bytes()
    (directory / RESULT_FILE).unlink()
    hold(directory)
    write_lines(directory / "events.jsonl", [own_supervisor(), Event(t_ns=START_NS + S, kind="state", state="oom")])
    looks: list[float] = []

    def written_meanwhile(seconds: float) -> None:
        if seconds == LOOK_EVERY_S:
            looks.append(seconds)
            (directory / RESULT_FILE).write_bytes(result)

    monkeypatch.setattr(follow_run.time, "sleep", written_meanwhile)
    found = follow(directory, Signals(), interrupt_stops=True)
    assert found is not None
    assert found.state == "oom"
    assert len(looks) == 1
