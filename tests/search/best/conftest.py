"""A synthetic space of settings for each test that asks for one, and how a search of it begins."""

import pytest
from benchmarks.best_fit_spaces import Synthetic

from trainfast_runner.search.best_journal import BestLine

from .synthetic import process_ready, trial


@pytest.fixture
def space() -> Synthetic:
    return Synthetic(10)


@pytest.fixture
def base(space) -> int:
    """The number of the baseline."""
    return space.space.baseline_number


@pytest.fixture
def other(space, base) -> int:
    """The number of the first setting beside the baseline."""
    return next(number for number in sorted(space.truth) if number != base)


@pytest.fixture
def begun(space, base) -> list[BestLine]:
    """The lines of the baseline's process and of its first trial."""
    return [*process_ready(space, base), trial(base, warm=False)]
