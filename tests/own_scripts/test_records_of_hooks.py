"""The lines that the hooks write about a script whose figures or objects are odd, and on a full disk."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

from trainfast_runner.door.trainfast_door import install, notes
from trainfast_runner.door.trainfast_door.notes import RUN_VARIABLE
from trainfast_runner.door.trainfast_door.script_run import ScriptRun


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run of a script that has taken one step."""
    (tmp_path / "run.json").write_text(json.dumps({"script": None, "device": "cpu"}))
    monkeypatch.setenv(notes.RUN_VARIABLE, str(tmp_path))
    monkeypatch.setattr(notes, "_noted", set())
    run = ScriptRun(str(tmp_path))
    assert not run.record_step()
    return run


def written_lines(directory):
    """The newest line of each kind in `worker.jsonl`."""
    lines = map(json.loads, (directory / "worker.jsonl").read_text().splitlines())
    return {line["kind"]: line for line in lines}


def test_a_clipping_norm_that_is_infinite_is_recorded_as_null(run, tmp_path):
    run.ran.update(grad_clip=math.inf, lr=0.5)
    run.write_facts()
    assert written_lines(tmp_path)["script"]["ran"] == {"grad_clip": None, "lr": 0.5}


def test_the_end_is_recorded_though_the_facts_about_the_script_cannot_be_read(run, tmp_path, monkeypatch):
    class Unreadable:
        """An Accelerate state that was reset: its object cannot be made again."""

        _shared_state = (1,)

        def __init__(self):
            raise ValueError("no Accelerator")

    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(AcceleratorState=Unreadable))
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    install.record_end(run)
    assert written_lines(tmp_path)["finished"]["step"] == 1
    assert "no Accelerator" in (tmp_path / "door.jsonl").read_text()


def test_the_end_is_recorded_though_its_exception_has_no_text(run, tmp_path, monkeypatch):
    class MuteError(Exception):
        """An exception whose text cannot be made."""

        def __str__(self):
            raise ValueError("no text")

    monkeypatch.setattr(sys, "last_exc", None, raising=False)
    monkeypatch.setattr(sys, "last_value", MuteError(), raising=False)
    install.record_end(run)
    line = written_lines(tmp_path)["exception"]
    assert line["type"].endswith("MuteError")
    assert line["message"] == ""


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The log of a script that is to stop after two steps."""
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    (tmp_path / "run.json").write_text(json.dumps({"script": {"steps": 2}, "device": "cpu"}))
    return ScriptRun(str(tmp_path))


def test_steps_count_from_the_first_though_the_disk_is_full(log, tmp_path, disk):
    disk["room"] = 0
    assert not log.record_step()
    disk["room"] = None
    assert log.record_step()
    log.flush()
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps[-1] == 2


def test_a_script_that_trains_on_is_noted_once_the_disk_has_room(log, tmp_path, disk):
    assert not log.record_step()
    disk["room"] = 0
    assert log.record_step(), "the last step stops the script all the same"
    with pytest.raises(OSError, match="No space left"):
        log.record_step()
    disk["room"] = None
    assert not any(log.record_step() for _ in range(3))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "worker.jsonl").read_text().splitlines()]
    assert kinds.count("ignored_stop") == 1
