"""A synthetic space of settings for each test that asks for one."""

from __future__ import annotations

import pytest
from benchmarks.best_fit_spaces import Synthetic


@pytest.fixture
def space() -> Synthetic:
    return Synthetic(10)
