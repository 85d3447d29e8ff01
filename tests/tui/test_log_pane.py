"""The log stays in place under a reader while the training prints on."""

from __future__ import annotations

import pytest

from trainfast_tui.widgets.main.log_pane import added_lines

LOG = tuple(f"line {number}" for number in range(30))


@pytest.mark.parametrize(
    ("before", "now", "added"),
    [
        (LOG[:20], LOG[:25], 5),
        (LOG[:20], LOG[5:25], 5),
        ((*LOG[:19], "10 %"), (*LOG[:19], "20 %"), 0),
        ((*LOG[:19], "10 %"), (*LOG[:19], "100 %", "done"), 1),
        ((), LOG[:3], 3),
        (LOG[:20], ("another run's log",), 0),
    ],
)
def test_lines_that_came_since_are_counted_in_a_bounded_window(
    before: tuple[str, ...], now: tuple[str, ...], added: int
) -> None:
    assert added_lines(before, now) == added
