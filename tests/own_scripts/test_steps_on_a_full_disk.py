"""The hooks' records of a script's steps on a full disk."""

import json

import pytest

from trainfast_runner.door.trainfast_door.notes import RUN_VARIABLE, LineFile
from trainfast_runner.door.trainfast_door.script_run import ScriptRun


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The log of a script that is to stop after two steps."""
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    (tmp_path / "run.json").write_text(json.dumps({"script": {"steps": 2}, "device": "cpu"}))
    return ScriptRun(str(tmp_path)).steps


def test_the_last_step_stops_the_script_though_the_disk_is_full(log, disk):
    assert not log.record_step()
    disk["room"] = 0
    assert log.record_step()


def test_steps_count_from_the_first_though_the_disk_is_full(log, tmp_path, disk):
    disk["room"] = 0
    assert not log.record_step()
    disk["room"] = None
    assert log.record_step()
    log.flush()
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps[-1] == 2


def test_a_script_that_trains_on_is_noted_once_the_disk_has_room(log, tmp_path, disk):
    assert [log.record_step() for _ in range(2)] == [False, True]
    disk["room"] = 0
    with pytest.raises(OSError, match="No space left"):
        log.record_step()
    disk["room"] = None
    assert not any(log.record_step() for _ in range(3))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "worker.jsonl").read_text().splitlines()]
    assert kinds.count("ignored_stop") == 1


def test_a_line_of_the_hooks_cut_short_spoils_no_other(tmp_path, disk):
    file = LineFile(str(tmp_path), "steps.jsonl")
    disk["room"] = 5
    with pytest.raises(OSError, match="No space left"):
        file.write({"step": 1})
    disk["room"] = None
    file.write({"step": 2})
    file.write({"step": 3})
    assert (tmp_path / "steps.jsonl").read_text() == '{"ste\n{"step":2}\n{"step":3}\n'
