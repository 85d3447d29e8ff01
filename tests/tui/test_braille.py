"""How a chart chooses its range and columns, and which cells it sends again."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.segment import Segment
from rich.style import Style

from trainfast_tui.widgets.braille import (
    LEAST_GAP,
    YRange,
    changed_cells,
    changed_spans,
    nice_ceiling,
    time_columns,
)

S = 1_000_000_000


def test_the_range_grows_at_once_and_shrinks_late() -> None:
    y_range = YRange(patience_ns=20 * S)
    assert y_range.fit(0, 95, 0) == (0, 100)
    assert y_range.fit(0, 310, 1 * S) == (0, 400)
    for second in range(2, 22):
        assert y_range.fit(0, 95, second * S) == (0, 400)
    assert y_range.fit(0, 95, 22 * S) == (0, 100)


def test_the_range_stays_while_the_data_returns() -> None:
    y_range = YRange(patience_ns=20 * S)
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


def test_only_the_cells_that_differ_are_dirty() -> None:
    red, blue = Style(color="red"), Style(color="blue")
    old = [Segment("abc", red), Segment("defg", blue)]
    assert changed_cells(old, list(old), 7) is None
    assert changed_cells(old, [Segment("abc", red), Segment("dXfg", blue)], 7) == (4, 5)
    assert changed_cells(old, [Segment("abcd", red), Segment("efg", blue)], 7) == (3, 4)
    assert changed_cells([Segment("aaa", red)], [Segment("aba", red)], 3) == (1, 2)
    assert changed_cells([Segment("温 ", red)], [Segment("温x", red)], 3) == (0, 3)


_rows = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["red", "blue"])), min_size=8, max_size=8)


@given(_rows, _rows)
def test_what_lies_outside_the_dirty_cells_is_the_same(old: list[tuple[str, str]], new: list[tuple[str, str]]) -> None:
    def row(cells: list[tuple[str, str]]) -> list[Segment]:
        return [Segment(text, Style(color=color)) for text, color in cells]

    span = changed_cells(row(old), row(new), 8)
    if span is None:
        assert old == new
    else:
        assert old[: span[0]] == new[: span[0]]
        assert old[span[1] :] == new[span[1] :]


_changes = st.lists(
    st.tuples(st.integers(0, 119), st.sampled_from("ab "), st.sampled_from(["red", "blue"])), max_size=6
)


@given(_changes, _changes)
def test_of_a_long_row_only_the_stretches_that_differ_are_sent(
    first: list[tuple[int, str, str]], second: list[tuple[int, str, str]]
) -> None:
    def row(changes: list[tuple[int, str, str]]) -> list[Segment]:
        cells = [("a", "red")] * 120
        for at, text, color in changes:
            cells[at] = text, color
        return [Segment(text, Style(color=color)) for text, color in cells]

    old, new = row(first), row(second)
    spans = changed_spans(old, new, 120)
    sent = {cell for start, end in spans for cell in range(start, end)}
    for cell, (before, after) in enumerate(zip(old, new, strict=True)):
        blank = before.text == after.text == " "
        assert cell in sent or before == after or blank
    assert all(after[0] - before[1] >= LEAST_GAP for before, after in pairwise(spans))
    changed = [cell for cell in range(120) if old[cell] != new[cell]]
    assert len(sent) <= max(0, len(changed) * (LEAST_GAP + 1))
