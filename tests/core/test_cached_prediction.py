"""A run that began before its model was traced has its prediction at the end all the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_memory_model import model_of, spec_with

from trainfast_runner.memory import tracing
from trainfast_runner.memory.headroom import with_prediction
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_records import RunRecords
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict
from trainfast_runner.settings.spec import RunSpec


def a_run(**fields: object) -> RunFile:
    knobs = dict(spec_with(batch_size=5000).knobs)
    run = RunFile(
        run_id="r1", preset="tiny", knobs=knobs, clock=ClockAnchor(monotonic_ns=0, wall_ns=0), python="/env/python"
    )
    return msgspec.structs.replace(run, **fields)


def test_a_trace_that_landed_after_the_start_is_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[RunSpec, str, str | None]] = []

    def cached(spec: RunSpec, device: str, python: str | None) -> MemoryModel:
        asked.append((spec, device, python))
        return model_of(12)

    monkeypatch.setattr(tracing, "cached_model", cached)
    found = with_prediction(RunRecords(run=a_run()))
    expected = model_of(12).predict(spec_with(batch_size=5000))
    assert found.run is not None
    assert found.run.predicted == msgspec.to_builtins(expected), "traced bytes as well, which a calibration needs"
    assert [(device, python) for _, device, python in asked] == [("cpu", "/env/python")]
    result = summarise(Path("r1"), found, Verdict("finished", ""), 1)
    assert result.memory.predicted_bytes == expected.total_bytes


def test_what_was_predicted_before_the_start_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "cached_model", lambda *_arguments: model_of(12))
    before = RunRecords(run=a_run(predicted={"total_bytes": 7}))
    assert with_prediction(before) is before


def test_without_a_trace_and_with_knobs_of_another_version_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "cached_model", lambda *_arguments: None)
    assert with_prediction(RunRecords(run=a_run())).run == a_run()
    assert with_prediction(RunRecords()).run is None
    monkeypatch.setattr(tracing, "cached_model", lambda *_arguments: model_of(12))
    strange = a_run(knobs={**a_run().knobs, "strategy": "something newer"})
    assert with_prediction(RunRecords(run=strange)).run == strange
