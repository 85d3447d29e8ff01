"""The runs that killed conductors of a search may have left: looked for in a continued search only."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfast_runner.records.home import Home
from trainfast_runner.search.batch.batch_plan import plan_preset_batch
from trainfast_runner.search.batch.opening import open_batch
from trainfast_runner.search.batch.preset_conductor import PresetBatchConductor
from trainfast_runner.search.conducting.conductor import SearchCaller
from trainfast_runner.search.journal.lines import Conducted, JournalWriter
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.settings.spec import resolve


def test_only_a_continued_batch_search_lists_the_runs_of_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, options = Home(tmp_path), BatchSearchOptions()
    batch_plan = plan_preset_batch(resolve("tiny-llama", ()), None, options)
    directory = open_batch(batch_plan, home, options)
    listed: list[Home] = []
    monkeypatch.setattr(Home, "run_ids", lambda home: listed.append(home) or [])
    PresetBatchConductor(directory, batch_plan, home, options, SearchCaller()).close()
    assert listed == [], "a new search has no runs, and a home may have thousands"
    journal = JournalWriter(directory)
    journal.write(Conducted(pid=1, start_ticks=1, boot_id="an earlier conductor"))
    journal.close()
    PresetBatchConductor(directory, batch_plan, home, options, SearchCaller()).close()
    assert listed == [home]
