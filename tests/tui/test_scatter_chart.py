"""The chart of settings: rate over memory, the Pareto front and the limit."""

from __future__ import annotations

from recorded import MIB

from trainfast_tui.charts.scatter_chart import CandidatePoint, front_of, scatter_chart


def test_the_front_is_the_settings_that_none_beats_in_both() -> None:
    points = [
        CandidatePoint(300, 9.0, "•", "text"),
        CandidatePoint(200, 9.0, "•", "text"),
        CandidatePoint(100, 5.0, "•", "text"),
    ]
    assert front_of([*points, CandidatePoint(50, None, "✗", "error"), CandidatePoint(150, 4.0, "•", "text")]) == [
        points[2],
        points[1],
    ]


def test_a_limit_far_beyond_the_settings_is_written_not_drawn() -> None:
    points = [CandidatePoint(100 * MIB, 9.0, "•", "text"), CandidatePoint(200 * MIB, 19.0, "•", "text")]
    text = "\n".join("".join(piece for piece, _ in line) for line in scatter_chart(points, 80 << 30, 70, 10))
    assert "┊" not in text
    assert "the limit 80.0 GiB is far right" in text
    assert scatter_chart(points, None, 70, 4) == [], "too small for a chart"
