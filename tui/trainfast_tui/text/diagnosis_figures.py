"""The figures of a diagnosis with their units; each carries its unit at the end of its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from trainfast_tui.text import format as fmt

if TYPE_CHECKING:
    from trainfast_runner.records.result import Diagnosis
    from trainfast_runner.results.bottleneck.rules import Condition

FORMATTERS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_fraction", lambda value: fmt.fraction(value, 1)),
    ("_share", lambda value: fmt.fraction(value, 1)),
    ("_percent", lambda value: fmt.percent(value, 1)),
    ("_ms", fmt.milliseconds),
    ("_ms_per_step", lambda value: f"{fmt.milliseconds(value)} a step"),
    ("_bytes", fmt.size),
    ("_mib", lambda value: f"{fmt.number(value)} MiB"),
    ("_c", fmt.celsius),
    ("_w", fmt.watts),
    ("_mhz", fmt.megahertz),
    ("_joules", fmt.joules),
    ("_j", fmt.joules),
    ("_seconds", fmt.duration),
    ("_s", fmt.duration),
    ("_bytes_per_s", fmt.bytes_per_second),
)
"""The formatter of each unit at the end of a name; the longest ending that matches counts."""


def figure_name(name: str) -> str:
    """Return a figure's name without its unit."""
    if words := _throttling().get(name):
        return words
    ending = _ending(name)
    return (name.removesuffix(ending) if ending else name).replace("_", " ")


def figure_text(name: str, value: float | int | str | None) -> str:
    """Return a figure with the unit of its name."""
    if value is None:
        return fmt.ABSENT
    if isinstance(value, str):
        return value
    ending = _ending(name)
    if ending:
        return dict(FORMATTERS)[ending](value)
    return f"{value:,}" if isinstance(value, int) else fmt.number(value)


def threshold_text(condition: Condition) -> str:
    """Return a rule's threshold for a figure, with its unit."""
    threshold = condition.threshold
    if isinstance(threshold, tuple):
        return f"one of {', '.join(threshold)}"
    words = {">=": "at least ", "<": "below ", "is": "must be "}.get(condition.is_, "")
    return f"{words}{figure_text(condition.figure, threshold)}"


def cost_words(finding: Diagnosis) -> str:
    """Return the cost of a bottleneck per step; empty if none was measured. Older results know only the share."""
    if finding.cost_fraction is None:
        return ""
    share = f"{fmt.fraction(finding.cost_fraction)} of a step"
    return share if finding.cost_ms_per_step is None else f"{share}: {fmt.milliseconds(finding.cost_ms_per_step)}"


def overlap_words(findings: Sequence[Diagnosis]) -> str:
    """Explain why the shares add up to more than a step; empty if they do not."""
    if sum(finding.cost_fraction or 0.0 for finding in findings) <= 1:
        return ""
    return "The shares add up to more than a step: causes that held at the same time are each given all of it."


def nothing_found(*, live: bool, measured: int, diagnosed: bool) -> str:
    """Explain an empty diagnosis of a run with so many measured steps; `diagnosed` is False if no rule was asked."""
    from trainfast_runner.results.bottleneck.diagnose import LEAST_STEPS_TO_DIAGNOSE

    if measured < LEAST_STEPS_TO_DIAGNOSE:
        return f"too few measured steps {'yet ' if live else ''}to find a bottleneck"
    if not diagnosed:
        return "recorded by an earlier version, which did not look for bottlenecks"
    return "no bottleneck measured now" if live else "no bottleneck measured"


@cache
def _throttling() -> dict[str, str]:
    """The figures of one cause; their names differ only in their units."""
    from trainfast_runner.machine.telemetry.throttle import CAUSES

    figures: dict[str, str] = {}
    for cause in CAUSES:
        figures |= dict.fromkeys((f"{cause.name}_percent", f"{cause.name}_ms_per_step"), f"throttled by {cause.words}")
        figures |= dict.fromkeys((f"{cause.name}_lost_percent", f"{cause.name}_lost_ms_per_step"), "lost to it")
        figures[f"{cause.name}_source"] = "known from"
    return figures


def _ending(name: str) -> str:
    return max((ending for ending, _ in FORMATTERS if name.endswith(ending)), key=len, default="")
