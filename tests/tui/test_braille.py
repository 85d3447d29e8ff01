"""How a chart chooses its range and columns."""

import pytest

from trainfast_tui.charts.time_columns import time_columns
from trainfast_tui.charts.y_range import YRange, nice_ceiling

S = 1_000_000_000


def test_the_range_grows_at_once_and_shrinks_late() -> None:
    y_range = YRange()
    assert y_range.fit(0, 95, 0) == (0, 100)
    assert y_range.fit(0, 310, 1 * S) == (0, 400)
    for second in range(2, 22):
        assert y_range.fit(0, 95, second * S) == (0, 400)
    assert y_range.fit(0, 95, 22 * S) == (0, 100)


def test_the_range_stays_while_the_data_returns() -> None:
    y_range = YRange()
    y_range.fit(0, 400, 0)
    for second in range(200):
        high = 300 if second % 15 == 0 else 90
        assert y_range.fit(0, high, second * S) == (0, 400)


def test_ends_of_the_range_are_round() -> None:
    assert nice_ceiling(0.73) == pytest.approx(0.8)
    assert nice_ceiling(1000) == 1000
    assert nice_ceiling(17 * 2**30, binary=True) == 20 * 2**30
    assert nice_ceiling(16 * 2**30, binary=True) == 16 * 2**30


def test_a_column_keeps_its_extremes() -> None:
    columns = time_columns([0, 1, 2, 10, 11], [5.0, 9.0, 1.0, 4.0, 4.0], 0, 10, 3, 100)
    assert columns == [(1.0, 9.0), (4.0, 4.0), None]


def test_samples_after_the_window_are_not_drawn() -> None:
    assert time_columns([0, 25, 99], [1.0, 2.0, 3.0], 0, 10, 3, 5) == [(1.0, 1.0), None, (2.0, 2.0)]


def test_times_and_values_of_different_length_are_refused_by_nobody_but_end_at_the_shorter() -> None:
    assert time_columns([0, 10, 20], [1.0], 0, 10, 3, 100) == [(1.0, 1.0), None, None]
