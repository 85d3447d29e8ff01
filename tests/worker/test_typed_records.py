"""Plain dicts of the worker, read by the parent as typed records: each kind, and each field of it."""

import ast
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.worker_lines import WarmLine, WorkerLine
from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.records.record_file import WorkerLog

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
