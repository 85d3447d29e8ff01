"""A full disk takes a trace that the command line makes beside a run, and not the run's result."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from recorded import an_oom_run
from tests.plans import PLAN

from trainfast_runner.memory import tracing
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_result
from trainfast_tui.cli.launching.start_run import predict_memory
from trainfast_tui.cli.launching.traced_changes import with_traced_changes


@pytest.fixture(autouse=True)
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail each trace as where the tracer's temporary file cannot be written."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracing, "cached_model", lambda *arguments: None)
    monkeypatch.setattr(tracing, "cached_models", lambda *arguments, **options: lambda spec: None)
    monkeypatch.setattr(tracing, "trace_model", refuse)
    monkeypatch.setattr(tracing, "trace_models", refuse)


def test_an_out_of_memory_result_keeps_its_estimates(home: Home) -> None:
    directory = an_oom_run(home)
    result = read_result(directory)
    assert result is not None
    explained = with_traced_changes(directory, result, None).oom
    assert explained is not None
    assert explained.changes


def test_a_run_starts_without_a_prediction(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.create()
    predict_memory(PLAN, home)
    assert "memory is not predicted: [Errno 28] No space left on device" in capsys.readouterr().err
