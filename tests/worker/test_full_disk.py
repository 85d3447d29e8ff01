"""A full disk: the training goes on, and reports the missing lines as soon as it can."""

import json
import os
import subprocess
import sys
from pathlib import Path

from trainfast_runner.worker.records.record_file import RecordFile, WorkerLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_on_a_full_disk_leave_a_gap_that_is_reported(tmp_path, disk, capfd):
    text = []
    file = RecordFile(tmp_path / "steps.jsonl", complain=text.append)
    for step in range(1, 7):
        disk["room"] = 0 if 3 <= step <= 5 else None
        file.write({"step": step})
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [1, 2, 6]
    assert text == [
        "steps.jsonl cannot be written: No space left on device; the training goes on",
        "steps.jsonl can be written again: 3 lines are missing",
    ]
    assert capfd.readouterr().err.count("cannot be written") == 1


def test_a_line_cut_short_spoils_no_other(tmp_path, disk):
    file = RecordFile(tmp_path / "steps.jsonl")
    disk["room"] = 5
    file.write({"step": 1})
    disk["room"] = None
    file.write({"step": 2})
    assert (tmp_path / "steps.jsonl").read_text() == '{"ste\n{"step":2}\n'


def test_records_of_a_rank_wait_for_the_disk(tmp_path, disk):
    log = WorkerLog(tmp_path, 0)
    disk["room"] = 0
    log.enter("train")
    log.write("finished", steps=3)
    assert lines(tmp_path / "worker.jsonl") == []
    disk["room"] = None
    log.settle()
    assert [line["kind"] for line in lines(tmp_path / "worker.jsonl")] == ["phase", "finished"]


TEARDOWN = 7
"""Exit code of a process below that goes through an ordinary teardown, which can block after an error."""


def run_with_full_output(program, *arguments):
    """Run a Python program whose output nothing takes; return its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = f"import atexit, os; atexit.register(lambda: os._exit({TEARDOWN})); {program}"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, env=environment, stdout=full, stderr=full, timeout=60).returncode


def test_a_training_that_fails_on_a_full_disk_ends_at_once(tmp_path):
    # Without a run.json it fails before torch is imported.
    program = "import sys; from trainfast_runner.worker.main import main; main(sys.argv[1])"
    assert run_with_full_output(program, str(tmp_path)) == 1
    assert [line["kind"] for line in lines(tmp_path / "worker.jsonl")] == ["started", "exception"]


def test_output_that_a_full_disk_does_not_take_holds_no_end_up():
    program = "from trainfast_runner.worker.shared.process import exit_now; print('unwritten'); exit_now(3)"
    assert run_with_full_output(program) == 3
