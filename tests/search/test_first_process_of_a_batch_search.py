"""The first warm process of a batch search that ends before it is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch import preset_conductor
from trainfast_runner.search.batch.batch_plan import plan_preset_batch
from trainfast_runner.search.batch.opening import open_batch
from trainfast_runner.search.batch.predicted_size import SizePrediction
from trainfast_runner.search.batch.preset_conductor import PresetBatchConductor
from trainfast_runner.search.conducting.conductor import SearchCaller
from trainfast_runner.search.conducting.search_runs import SearchRuns
from trainfast_runner.search.conducting.warm_process import WarmProcess
from trainfast_runner.search.journal.batch import BatchLaunched, Predicted, Probe
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.settings.spec import resolve


def untraced(_plan: RunPlan, _cancelled: threading.Event) -> SizePrediction:
    """A prediction that takes no time."""
    return SizePrediction(None, "no trace")


@pytest.fixture
def conductor_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], PresetBatchConductor]:
    """Make the conductor of a new search, whose first process ends in a state."""
    home, options = Home(tmp_path), BatchSearchOptions()
    batch_plan = plan_preset_batch(resolve("tiny-llama", ()), None, options)
    monkeypatch.setattr(preset_conductor, "predict_size", untraced)

    def make(state: str) -> PresetBatchConductor:
        process = SimpleNamespace(directory=tmp_path / "r1", ready=lambda: None)
        monkeypatch.setattr(SearchRuns, "start_process", lambda *_: cast("WarmProcess", process))
        monkeypatch.setattr(SearchRuns, "wait_for_process_end", lambda _: Result(run_id="r1", state=state))
        return PresetBatchConductor(open_batch(batch_plan, home, options), batch_plan, home, options, SearchCaller())

    return make


@pytest.mark.parametrize("state", ["stopped", "killed"])
def test_a_search_whose_first_process_is_stopped_before_it_is_ready_is_cancelled(
    conductor_of: Callable[[str], PresetBatchConductor], state: str
) -> None:
    conductor = conductor_of(state)
    assert conductor.run().state == "cancelled"
    conductor.close()
    assert [type(line) for line in conductor._lines if isinstance(line, BatchLaunched | Predicted | Probe)] == [
        BatchLaunched
    ]


def test_a_first_process_that_failed_is_an_error(
    conductor_of: Callable[[str], PresetBatchConductor],
) -> None:
    conductor = conductor_of("failed")
    with pytest.raises(UserError, match="r1 ended failed"):
        conductor.run()
    conductor.close()
