"""The lines that the hooks write about a script whose figures or objects are odd."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainfast_runner.door.trainfast_door import notes
from trainfast_runner.door.trainfast_door.script_run import ScriptRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptRun:
    """The run of a script that has taken one step."""
    (tmp_path / "run.json").write_text(json.dumps({"script": None, "device": "cpu"}))
    monkeypatch.setenv(notes.RUN_VARIABLE, str(tmp_path))
    monkeypatch.setattr(notes, "_noted", set())
    run = ScriptRun(str(tmp_path))
    assert not run.steps.record_step()
    return run


def written_lines(directory: Path) -> dict[str, dict[str, Any]]:
    """The newest line of each kind in `worker.jsonl`."""
    lines = map(json.loads, (directory / "worker.jsonl").read_text().splitlines())
    return {line["kind"]: line for line in lines}


def test_a_clipping_norm_that_is_infinite_is_recorded_as_null(run: ScriptRun, tmp_path: Path) -> None:
    run.ran.update(grad_clip=math.inf, lr=0.5)
    run.write_facts()
    assert written_lines(tmp_path)["script"]["ran"] == {"grad_clip": None, "lr": 0.5}
