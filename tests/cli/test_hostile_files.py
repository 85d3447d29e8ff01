"""Records, results and journals that hold anything at all: every command answers, and prints no control sequence."""

from __future__ import annotations

import copy
import functools
import io
import json
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from cli.command import Done
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import RunFile
from trainfast_tui.cli import main

RECORDED = Path(__file__).parents[1] / "recorded_runs" / "20261121-133323-tiny-llama-d703"
OTHER = "20261121-133322-tiny-llama-d702"
"""The id of a run of the same records as they are."""
RECORD_FILES = ("run.json", "result.json")
LINE_FILES = ("events.jsonl", "worker.jsonl", "steps.jsonl", "telemetry.jsonl")
FORMS = ("training-args", "accelerate", "deepspeed", "torchrun", "command", "preset")
COMMANDS = [
    *("runs list", "runs list --json", "runs show last", "runs show last --json", "runs show last --steps"),
    *(
        "runs show last --why",
        f"runs compare {OTHER} last",
        f"runs compare last {OTHER} --json",
        "logs last",
        "attach last",
    ),
    *("runs prune --keep 0 --dry-run", "stop last", *(f"export last --to {form}" for form in FORMS)),
    *("export last --to command --json", "report last -o FOLDER/r.md", "report last -o FOLDER/r.html"),
]
SEQUENCES = ["\x1b]52;c;eA==\x07", "\x1b[2J", "\x9b31m", "\x9d52;c;eA==\x9c", "\u202e", "\x85", "\r", "\x7f", "\x08"]
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
UNFILLED = ("script", "provisional", "search_id", "role", "tried")
"""Fields that make another run of it."""
JsonPath = tuple[str | int, ...]


def run_in_process(home: Path, command: str) -> Done:
    """Run a command in this process; an exception of it is the test's."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    words = command.replace("FOLDER", str(home)).split()
    with patch.dict(os.environ, TRAINFAST_HOME=str(home)), redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    texts = []
    for stream in (out, err):
        stream.flush()
        stream.seek(0)
        texts.append(stream.read())
    return Done(code, *texts)


def leaves(value: Any, at: JsonPath = ()) -> Iterator[JsonPath]:
    """Yield the path of every value within a JSON value, tables and lists included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from leaves(item, (*at, key))


def value_at(value: Any, at: JsonPath) -> Any:
    """Return the value at a path."""
    return functools.reduce(operator.getitem, at, value)


def changed(value: Any, at: JsonPath, change: Any) -> None:
    """Put another value at a path, or take the value away for `...`."""
    table = value_at(value, at[:-1])
    if change is ...:
        del table[at[-1]]
    else:
        table[at[-1]] = change


def filled_up(value: Any, kind: inspect.Type) -> Any:
    """Return a JSON value of the type with every field of it, those that it lacks with any value."""
    match kind:
        case inspect.UnionType(types=kinds):
            return filled_up(value, next(kind for kind in kinds if not isinstance(kind, inspect.NoneType)))
        case inspect.StructType(fields=fields):
            value = value or {}
            return value | {
                field.encode_name: filled_up(value.get(field.encode_name), field.type)
                for field in fields
                if field.encode_name not in UNFILLED
            }
        case inspect.ListType(item_type=item):
            return value or [filled_up(None, item)]
        case inspect.DictType(value_type=item):
            return value or dict.fromkeys(("forward", "data"), filled_up(None, item))
        case _:
            samples = {inspect.StrType: "x", inspect.BoolType: False, inspect.IntType: 1, inspect.FloatType: 1.0}
            return samples.get(type(kind)) if value is None else value


RECORDS = {name: json.loads((RECORDED / name).read_text()) for name in RECORD_FILES}
# The records are of an earlier version: fields that came later have a value of their type.
RECORDS["run.json"] = filled_up(RECORDS["run.json"], inspect.type_info(RunFile))
RECORDS["result.json"] = filled_up(RECORDS["result.json"], inspect.type_info(Result))
RECORDS |= {name: json.loads((RECORDED / name).read_text().splitlines()[0]) for name in LINE_FILES}
PLACES = [(name, place) for name, record in RECORDS.items() for place in leaves(record)]
TEXT_PLACES = [(name, place) for name, place in PLACES if isinstance(value_at(RECORDS[name], place), str)]


def home_with(folder: str, name: str, place: JsonPath, change: Any) -> Path:
    """Return a home with the recorded run twice, one value of the newer one changed, in the first line of a file."""
    directory = Path(folder) / "runs" / RECORDED.name
    shutil.copytree(RECORDED, directory.with_name(OTHER))
    shutil.copytree(RECORDED, directory)
    (directory / "output.log").write_text(f"a line {change if isinstance(change, str) else ''}\n")
    _, *rest = (directory / name).read_text().splitlines(keepends=True) if name in LINE_FILES else [""]
    record = copy.deepcopy(RECORDS[name])
    changed(record, place, change)
    (directory / name).write_text("".join([json.dumps(record) + "\n", *rest]))
    return Path(folder)


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=40)
@given(place=st.sampled_from(TEXT_PLACES), text=st.sampled_from(SEQUENCES), is_key=st.booleans())
def test_f02_no_text_of_a_record_reaches_the_terminal_raw(
    command: str, place: tuple[str, JsonPath], text: str, is_key: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = run_in_process(home_with(folder, *place, {text: 1} if is_key else f"a{text}b"), command)
        written = [file.read_text() for file in Path(folder).glob("r.*")]
    for printed in (done.out, done.err, *written):
        assert not RAW.search(printed), printed


CHANGES = st.sampled_from([..., None, True, -1, 0, 10**18, 1.5, 1e300, "", "unknown", [], ["x"], {}, {"x": "y"}])


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=60)
@given(place=st.sampled_from(PLACES), change=CHANGES)
def test_f12_any_value_of_a_record_is_a_missing_figure_or_one_line(
    command: str, place: tuple[str, JsonPath], change: object
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = run_in_process(home_with(folder, *place, change), command)
    assert done.code != 2 or len(done.refused().splitlines()) == 1
