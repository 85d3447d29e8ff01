"""The figures of a comparison in words, the same on the command line and on the screen."""

from __future__ import annotations

from typing import Any

from trainfast_runner.results.comparison.difference import DOUBTFUL, NOISE, Comparison, ComparisonRow
from trainfast_runner.results.comparison.ranking import DIFFERENT_SAMPLE_VERDICTS, DIFFERENT_SEQ_LEN, STRICT_THRESHOLDS
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_tui.text import format as fmt

NOT_BY_CONDITIONS = ("few_steps", "strict_malloc")
"""Kinds of doubt that equal conditions do not remove."""
REPEAT_ADVICE = "`bench --repeat 3` runs two variants in turn (A B A B), so that both have the same conditions"


def figure_with_unit(value: float | None, unit: str) -> str:
    """Return a figure with its unit."""
    if unit.endswith("/s"):
        return fmt.per_second(value, unit.removesuffix("/s"))
    return {"bytes": fmt.size, "ms": fmt.milliseconds, "J": fmt.joules}.get(unit, fmt.number)(value)


def value_text(name: str, value: Any) -> str:
    """Return a setting as it is typed.

    "the preset's" for a model or data field without an override, "not set" for a knob without a value.
    """
    if name in KNOBS_BY_NAME:
        return (
            "not set"
            if value is None and KNOBS_BY_NAME[name].default is not None
            else KNOBS_BY_NAME[name].text_of(value)
        )
    return "the preset's" if value is None else str(value)


def difference_text(row: ComparisonRow) -> str:
    """Return the difference of the two figures with its sign and unit; empty if one is unknown."""
    if row.a is None or row.b is None:
        return ""
    delta = row.b - row.a
    sign = "" if not delta else ("+" if delta > 0 else "-")
    return sign + figure_with_unit(abs(delta), row.unit)


def interval_text(row: ComparisonRow) -> str:
    """Return the 95 % CI in percent, `+1.4 to +5.5 %`; empty if it cannot be computed."""
    return "" if row.interval_percent is None else fmt.signed_interval(*row.interval_percent)


def verdict_words(comparison: Comparison) -> str | None:
    """Return the verdict; None if a run's throughput is unknown."""
    row = comparison.rows[0]
    if row.percent is None:
        return None
    if row.verdict == STRICT_THRESHOLDS:
        return "Speed is not comparable: one of the runs was measured under strict malloc thresholds."
    if row.verdict == DIFFERENT_SEQ_LEN:
        return f"Samples/s are {row.verdict}; compare tokens/s."
    if row.verdict in DIFFERENT_SAMPLE_VERDICTS:
        return f"Speed is {row.verdict}."
    certainty = f"95 % CI: {interval_text(row)}" if row.interval_percent else "too few steps for a 95 % CI"
    if row.verdict == NOISE:
        return f"No significant difference in throughput ({certainty})."
    direction = "more" if row.percent > 0 else "less"
    difference = f"B has {fmt.percent(abs(row.percent), 1)} {direction} throughput than A"
    if row.verdict == DOUBTFUL:
        return f"Doubtful: {difference}, but"
    return f"{difference} ({certainty})."


def verdict_reasons(comparison: Comparison) -> list[str]:
    """Return the reasons for doubt, and a way to a verdict without it; empty if no doubt touches the runs."""
    is_by_conditions = any(doubt.kind not in NOT_BY_CONDITIONS for doubt in comparison.doubts)
    return [*(fmt.plain(doubt.text) for doubt in comparison.doubts), *[REPEAT_ADVICE] * is_by_conditions]
