"""The chart of a Markdown report, as a person reads it."""

from __future__ import annotations

import pytest

from trainfast_tui.charts.chart_data import ChartData, Series
from trainfast_tui.charts.time_axis import TimeAxis
from trainfast_tui.report.sparkline import sparklines


@pytest.mark.parametrize("end_ns", [6400, 6401])
def test_a_sample_at_the_end_of_the_axis_is_drawn(end_ns: int) -> None:
    series = Series("speed", (1000, end_ns), (5.0, 9.0), "primary")
    line, *_ = sparklines(ChartData("speed", (series,), TimeAxis(0, end_ns, is_live=False), gap_ns=10_000), 0)
    assert "5.00 to 9.00" in line
