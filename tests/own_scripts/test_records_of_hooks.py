"""The lines that the hooks write about scripts of odd figures or uneven steps, that evaluate, and on a full disk."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest

from own_scripts.conftest import run_script, samples_of_steps, written
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


START = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_case_04_steps_that_differ_in_size_have_a_mean_over_time_and_no_median(cli, tmp_path):
    lines = """
sizes = [4, 4, 4, 64] * 4
ends = [sum(sizes[: n + 1]) for n in range(16)]
batches = [list(range(end - size, end)) for size, end in zip(sizes, ends)]
for x in DataLoader(torch.randn(sum(sizes), 8), batch_sampler=batches):
    time.sleep(0.02)
    step(x)
"""
    result = run_script(cli, *written(tmp_path, START + lines))
    assert samples_of_steps(cli, result) == {4, 64}
    rate = result["throughput"]["samples_per_s"]
    assert (rate["median"], rate["mad"]) == (None, None)
    steps_per_s = 1000 / 20
    assert 0 < rate["mean"] <= steps_per_s * (4 * 64 + 9 * 4) / 13
    assert rate["mean"] > 64, "the median of the steps' rates is at most 200, the mean may be at 1,100"
    assert re.search(r"throughput +[\d.,]+ samples/s \(mean: steps differ in size", cli("runs", "show", "last").out)
    assert cli("runs", "list", "--json").json["runs"][0]["samples_per_s"] == rate["mean"]
    compared = cli("runs", "compare", "last", "last", "--json").json
    assert rate["mean"] in compared["rows"][0].values()
    assert cli("report", "last", "-o", str(tmp_path / "report.md")).code == 0
    assert "mean: steps differ in size" in (tmp_path / "report.md").read_text()


def test_case_08_out_of_memory_in_an_evaluation_is_told_from_one_in_training(cli, tmp_path):
    lines = """
def evaluate():
    for (x,) in DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=8):
        with torch.no_grad(): model(x)
    raise MemoryError("Unable to allocate 512. MiB for an array with shape (2,) and data type float64")
for n in range(5): step(torch.randn(8, 8))
evaluate()
"""
    result = run_script(cli, *written(tmp_path, START + lines), code=3)
    assert (result["state"], result["error"]["phase"]) == ("oom", "evaluation")
    assert result["reason"].endswith("(step 5, phase evaluation)")
    oom = result["oom"]
    assert (oom["phase"], oom["asked_bytes"], oom["changes"]) == ("evaluation", 512 << 20, [])
    text = cli("runs", "show", "last").out
    for advice in ("evaluation batch", "eval_accumulation_steps", "preprocess_logits_for_metrics"):
        assert any(advice in line for line in oom["advice"])
        assert advice in text
