"""The threads of the app that predict and explain share one tracer process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from trainfast_runner.memory import warm_tracer
from trainfast_runner.records.home import Home
from trainfast_tui.session import Session


def test_two_threads_that_trace_first_at_once_get_one_tracer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, found = Session(Home(tmp_path)), []
    other = threading.Thread(target=lambda: found.append(session.background.tracer.get()))

    class SlowlyMade(warm_tracer.WarmTracer):
        def __init__(self) -> None:
            super().__init__()
            if not other.ident:
                other.start()
                other.join(0.5)  # without a lock the other thread gets a tracer of its own meanwhile

    monkeypatch.setattr(warm_tracer, "WarmTracer", SlowlyMade)
    found.append(session.background.tracer.get())
    other.join(60)
    assert len(found) == 2
    assert found[0] is found[1]
