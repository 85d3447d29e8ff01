"""A full disk takes a trace that the command line makes beside a run, and not the run's result."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import an_oom_run
from tests.plans import PLAN

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_result
from trainfast_tui.cli.launching.start_run import predict_memory
from trainfast_tui.cli.launching.traced_changes import with_traced_changes


@pytest.fixture(autouse=True)
def no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the tracer no folder for its temporary file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a cached trace


def test_an_out_of_memory_result_keeps_its_estimates(home: Home) -> None:
    directory = an_oom_run(home)
    result = read_result(directory)
    assert result is not None
    explained = with_traced_changes(directory, result, None).oom
    assert explained is not None
    assert explained.changes


def test_a_run_starts_without_a_prediction(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.create()
    predict_memory(replace(PLAN, python=sys.executable), home)
    assert (
        "memory is not predicted: a temporary file cannot be made: No such file or directory; try freeing some space"
        in capsys.readouterr().err
    )
