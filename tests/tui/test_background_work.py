"""The work beside runs gives way to everything that is measured."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from recorded import a_run
from still import CPU, a_snapshot
from test_idle_calibrator import QUIET, seen
from test_predictor import wait_for
from traced import Tracer

from trainfast_runner.machine import calibration
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.machine.worker_programs import ProgramCancelled
from trainfast_runner.records.home import Home
from trainfast_runner.search.advice import gather_situation
from trainfast_runner.search.advice.facts import Situation
from trainfast_tui.control.background_work import BackgroundWork
from trainfast_tui.control.idle_calibrator import IDLE_S
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


def test_a_trace_that_begins_ends_the_calibration(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def calibrate(home: Home, python: str | None, cancelled: threading.Event, **_: Any) -> Ceiling:
        begun.set()
        if not cancelled.wait(60):
            return QUIET
        ended.set()
        raise ProgramCancelled

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    tracer = Tracer(lambda spec: spec.knobs["seq_len"], 128).stand_in(monkeypatch)
    work = BackgroundWork(home, lambda message: None, None)
    known = next_run_from_preset("tiny-llama").with_value("seq_len", "128")
    for second in (0.0, IDLE_S):
        work.update(known, CPU, seen(second, 1.0), None, is_device_used=False, has_other_live_run=False)
    assert begun.wait(60)
    unknown = known.with_value("seq_len", "64")

    def is_ended_after_the_next_snapshot() -> bool:
        work.update(unknown, CPU, seen(IDLE_S + 1, 1.0), None, is_device_used=False, has_other_live_run=False)
        return ended.is_set()

    wait_for(is_ended_after_the_next_snapshot)
    assert tracer.traced == [64]
    tracer.go.set()
    work.stop(60)
