"""The records of a worker: typed for the parent, each field, and on a full disk reported as soon as it can."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.worker_lines import WarmLine, WorkerLine
from trainfast_runner.worker.invalid import InvalidInput
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


def test_a_training_that_fails_on_a_full_disk_ends_at_once_and_its_output_holds_no_end_up(tmp_path):
    # Without a run.json it fails before torch is imported.
    program = "import sys; from trainfast_runner.worker.main import main; main(sys.argv[1])"
    assert run_with_full_output(program, str(tmp_path)) == 1
    assert [line["kind"] for line in lines(tmp_path / "worker.jsonl")] == ["started", "exception"]
    program = "from trainfast_runner.worker.shared.process import exit_now; print('unwritten'); exit_now(3)"
    assert run_with_full_output(program) == 3


WORKER = Path(__file__).parents[2] / "runner" / "trainfast_runner" / "worker"
UNREAD = {
    "started": {"local_rank", "world_size"},
    "data": {"data_kind", "samples", "tokens"},
    "actual": {"model_type"},
    "signal": {"signal"},
    "finished": {"steps", "seconds"},
}
"""Fields that stand in the file for a person."""
WARM = dict.fromkeys(("probe", "trial", "ready"), WarmLine)
"""The types of the lines that warm processes alone write."""
TYPES = WARM | {line_type.__struct_config__.tag: line_type for line_type in get_args(WorkerLine)}


def kinds_written():
    """The kinds of record in the worker's source, and the fields that each is given by name."""
    found = {}
    for path in WORKER.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "write":
                continue
            if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str):
                fields = found.setdefault(call.args[0].value, set())
                fields.update(keyword.arg for keyword in call.keywords if keyword.arg is not None)
    return found


def test_every_field_that_the_worker_names_is_typed_or_known_to_be_unread():
    kinds = kinds_written()
    assert {"started", "phase", "data", "cpu", "actual", "exception", "invalid", "finished", *WARM} <= set(kinds)
    for kind, fields in kinds.items():
        typed = set(TYPES[kind].__struct_encode_fields__)
        assert fields - typed <= UNREAD.get(kind, set()), f"{kind}: {fields - typed}"


# The training that the tests of one process make too.
@pytest.mark.xdist_group("one-process")
def test_what_workers_wrote_is_decoded_field_by_field(train, tmp_path):
    run = train(steps=20)
    assert run.code == 0, run.stderr
    lines = (run.folder / "worker.jsonl").read_bytes().splitlines()
    log = WorkerLog(tmp_path, rank=0)
    log.write("invalid", **InvalidInput("m", "key", ["a"], "a").as_fields())
    log.exception(MemoryError("out of memory"))
    log.trouble("a full disk")
    log.write("signal", signal="SIGTERM", phase="train", step=3)
    log.write("overflow", step=3, scale=1024.0)
    lines += (tmp_path / "worker.jsonl").read_bytes().splitlines()
    for line in lines:
        assert_same(line, TYPES[msgspec.json.decode(line)["kind"]])
    wrote = {msgspec.json.decode(line)["kind"] for line in lines}
    assert wrote == set(kinds_written()) - {*WARM}, "warm processes are tested in test_probing and test_trials"
    steps = (run.folder / "steps.jsonl").read_bytes().splitlines()
    assert len(steps) == len(run.losses()) > 0
    for line in steps:
        assert_same(line, Step)


def assert_same(line, type):
    """Every field of the line is in the typed record, with its value."""
    plain = msgspec.json.decode(line)
    typed = msgspec.to_builtins(msgspec.json.decode(line, type=type))
    unread = UNREAD.get(plain.get("kind", ""), set())
    assert {name: value for name, value in plain.items() if name not in unread} == {
        name: typed.get(name) for name in plain if name not in unread
    }
