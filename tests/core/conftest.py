"""A tracer that takes the place of the training Python's."""

from types import SimpleNamespace

import pytest
from layered_model import Tracer

from trainfast_runner.memory import tracing


@pytest.fixture
def tracer(tmp_path, monkeypatch):
    """Takes the place of the training Python's traces, for a home and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRAINFAST_HOME", str(tmp_path / "home"))
    found = Tracer()
    monkeypatch.setattr(tracing, "WARM", SimpleNamespace(ask_each=found, is_warm=bool))
    return found
