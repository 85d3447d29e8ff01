"""The work beside runs gives way to everything that is measured."""

from __future__ import annotations

import queue
import threading

import pytest
from recorded import a_run
from still import CPU, a_snapshot
from traced import Tracer

from trainfast_runner.records.home import Home
from trainfast_runner.search.advice import gather_situation
from trainfast_runner.search.advice.facts import Situation
from trainfast_tui.control.background_work import BackgroundWork
from trainfast_tui.control.messages import SituationGathered
from trainfast_tui.live.search_kind import SearchKind
from trainfast_tui.next_run.sources import next_run_from_preset


def test_no_facts_are_gathered_while_a_search_measures(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def gather(*_: object) -> Situation:
        go.wait(60)
        return Situation()

    monkeypatch.setattr(gather_situation, "gather", gather)
    Tracer(lambda spec: "any", "any").stand_in(monkeypatch)
    posted: queue.Queue[object] = queue.Queue()
    work = BackgroundWork(home, posted.put, None)
    next_run = next_run_from_preset("tiny-llama")
    snapshot = a_snapshot(a_run(home))
    work.update(next_run, CPU, snapshot, SearchKind.BATCH, is_device_used=True, has_other_live_run=False)
    assert "trainfast-advice" not in [thread.name for thread in threading.enumerate()]
    go.set()
    work.update(next_run, CPU, snapshot, None, is_device_used=False, has_other_live_run=False)
    while not isinstance(posted.get(timeout=60), SituationGathered):
        pass
