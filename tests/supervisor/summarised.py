"""Records of a run by hand, and the result that is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_records import read_records
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict

S = 1_000_000_000


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def result_of(directory: Path, **run: Any) -> Result:
    fields = {"run_id": "r", "preset": "p", "clock": ClockAnchor(monotonic_ns=0, wall_ns=7), **run}
    (directory / "run.json").write_bytes(msgspec.json.encode(RunFile(**fields)))
    return summarise(directory, read_records(directory), Verdict("finished", ""), 60 * S)


def step(number: int, ms: float, **fields: Any) -> dict[str, Any]:
    """A step that ended at second `number`."""
    return {"t_ns": number * S, "step": number, "samples": 8, "tokens": 80, "step_ms": ms, **fields}
