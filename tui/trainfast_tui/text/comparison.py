"""The figures of a comparison as a person reads them, on the command line and on the screen alike."""

from __future__ import annotations

from typing import Any

from trainfast_runner.results.comparison.difference import NOISE, STRICT_THRESHOLDS, Comparison, ComparisonRow
from trainfast_runner.settings.knobs import BY_NAME
from trainfast_tui.text import format as fmt


def figure(value: float | None, unit: str) -> str:
    """A figure of a comparison in its unit."""
    if unit.endswith("/s"):
        return fmt.per_second(value, unit.removesuffix("/s"))
    return {"bytes": fmt.size, "ms": fmt.milliseconds, "J": fmt.joules}.get(unit, fmt.number)(value)


def setting(name: str, value: Any) -> str:
    """A setting as it is typed; a field of model or data that only the other run changed has the preset's value."""
    if name in BY_NAME:
        return BY_NAME[name].show(value)
    return "the preset's" if value is None else str(value)


def change(row: ComparisonRow) -> str:
    """The difference of the two figures as they are shown, so that it is what a person gets by subtracting."""
    if row.a is None or row.b is None:
        return ""
    shown_a, shown_b = (fmt.as_shown(figure(value, row.unit)) for value in (row.a, row.b))
    delta = shown_b - shown_a
    sign = "" if not delta else ("+" if delta > 0 else "-")
    return sign + figure(abs(delta), row.unit)


def interval(row: ComparisonRow) -> str:
    """Where the true difference lies, in percent: `+1.4 to +5.5 %`; empty where nothing can tell."""
    if row.interval_percent is None:
        return ""
    low, high = row.interval_percent
    return f"{low:+.1f} to {high:+.1f} %"


def sentence(found: Comparison) -> str | None:
    """What the comparison comes to; None where the throughput of one is not known."""
    row = found.rows[0]
    if row.percent is None:
        return None
    if row.verdict == STRICT_THRESHOLDS:
        return "Speed is not comparable: one of the runs was measured under strict malloc thresholds."
    sure = f"95 % sure: {interval(row)}" if row.interval_percent else "too few steps to say how sure that is"
    if row.verdict == NOISE:
        return f"No significant difference in throughput ({sure})."
    more = "more" if row.percent > 0 else "less"
    return f"B has {fmt.percent(abs(row.percent), 1)} {more} throughput than A ({sure})."
