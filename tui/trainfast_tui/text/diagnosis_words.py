"""A diagnosis in words: its figures with units, thresholds and advice, or why there is none.

A figure carries its unit at the end of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from rich.cells import cell_len

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line, labelled, paragraph, rule

if TYPE_CHECKING:
    from trainfast_runner.records.result import Diagnosis, Result
    from trainfast_runner.results.bottleneck_rules import Condition
    from trainfast_runner.running.follower import RunSnapshot

OVERLAP_WORDS = "The shares add up to more than a step: causes active at the same time each count in full."
MAX_RULE_CELLS = 120
"""The longest line beside a title: a pipe has lines of any length."""
FORMATTERS: dict[str, Callable[[float], str]] = {
    "_fraction": lambda value: fmt.fraction(value, 1),
    "_share": lambda value: fmt.fraction(value, 1),
    "_percent": lambda value: fmt.percent(value, 1),
    "_ms": fmt.milliseconds,
    "_ms_per_step": lambda value: f"{fmt.milliseconds(value)} a step",
    "_bytes": fmt.size,
    "_mib": lambda value: f"{fmt.number(value)} MiB",
    "_c": fmt.celsius,
    "_w": fmt.watts,
    "_mhz": fmt.megahertz,
    "_joules": fmt.joules,
    "joules_per_sample": fmt.joules,
    "_j": fmt.joules,
    "_seconds": fmt.duration,
    "_s": fmt.duration,
    "_bytes_per_s": fmt.bytes_per_second,
}
"""The formatter of each unit at the end of a name; the longest suffix that matches counts."""


def diagnosis_lines(diagnoses: Sequence[Diagnosis], nothing: str, width: int) -> list[Line]:
    """Return each bottleneck with its figures, its rule's thresholds and their sources; else `nothing`."""
    if not diagnoses:
        return [[(nothing, "text")]]
    overlap = OVERLAP_WORDS if sum(diagnosis.cost_fraction or 0.0 for diagnosis in diagnoses) > 1 else ""
    lines = paragraph(overlap, width, "muted")
    for index, diagnosis in enumerate(diagnoses):
        lines += [*([[]] if index else []), *_section(diagnosis, width)]
    return lines


def _section(diagnosis: Diagnosis, width: int) -> list[Line]:
    """Return a title with the cost, then figures beside their thresholds, advice, source."""
    from trainfast_runner.results.bottleneck_rules import matching_rule

    matched = matching_rule(diagnosis.rule, diagnosis.figures)
    rule_title = matched.title if matched is not None else diagnosis.rule
    title = ", ".join(filter(None, (rule_title, cost_words(diagnosis))))
    thresholds = {condition[0]: condition for condition in matched.when} if matched is not None else {}
    lines = [rule(title, min(width, MAX_RULE_CELLS)), *paragraph(diagnosis.line, width, "title")]
    name_width = max((cell_len(figure_name(name)) for name in diagnosis.figures), default=0)
    for name, value in diagnosis.figures.items():
        condition = thresholds.get(name)
        threshold = "" if condition is None or condition[1] == "is" else _threshold_words(condition)
        label = f"  {fmt.to_width(figure_name(name), name_width)}  "
        lines.append([(label, "muted"), (figure_text(name, value), "text"), (threshold, "muted")])
    source = matched.source if matched is not None else ""
    for label, text in (("try", diagnosis.advice), ("source", source)):
        lines += labelled((f"  {label:<10}", "key"), text, width)
    return lines


def figure_name(name: str) -> str:
    """Return a figure's name without its unit."""
    if words := _throttling_words().get(name):
        return words
    suffix = _unit_suffix(name)
    return (name.removesuffix(suffix) if suffix else name).replace("_", " ")


def figure_text(name: str, value: float | int | str | None) -> str:
    """Return a figure with the unit of its name."""
    if value is None:
        return fmt.ABSENT
    if isinstance(value, str):
        return value
    suffix = _unit_suffix(name)
    if suffix:
        return FORMATTERS[suffix](value)
    return f"{value:,}" if isinstance(value, int) else fmt.number(value)


def _threshold_words(condition: Condition) -> str:
    """Return a rule's threshold for a figure, with its unit."""
    figure, operator, threshold = condition
    if operator == "in":
        return f"   counts if {' or '.join(threshold)}"
    return f"   counts {'below' if operator == '<' else 'from'} {figure_text(figure, threshold)}"


def cost_words(diagnosis: Diagnosis) -> str:
    """Return the cost of a bottleneck per step; empty if none was measured. Older results know only the share."""
    if diagnosis.cost_fraction is None:
        return ""
    share = f"{fmt.fraction(diagnosis.cost_fraction)} of a step"
    return share if diagnosis.cost_ms_per_step is None else f"{share}: {fmt.milliseconds(diagnosis.cost_ms_per_step)}"


def no_bottleneck_in_run(run: RunSnapshot) -> str:
    """Explain why no bottleneck is listed for a run, live or ended."""
    if run.result is not None:
        return no_bottleneck_in_result(run.result)
    measured = sum(not step.warmup for step in run.steps)
    return _nothing_found(is_live=run.is_live, measured=measured, is_diagnosed=True)


def no_bottleneck_in_result(result: Result) -> str:
    """Explain why a result lists no bottleneck."""
    return _nothing_found(is_live=False, measured=result.steps.measured, is_diagnosed=result.diagnosed)


def _nothing_found(*, is_live: bool, measured: int, is_diagnosed: bool) -> str:
    """Explain an empty diagnosis of a run with so many measured steps; `is_diagnosed` is False if no rule was asked."""
    from trainfast_runner.results.bottleneck import MIN_STEPS_TO_DIAGNOSE

    if measured < MIN_STEPS_TO_DIAGNOSE:
        return f"too few measured steps {'yet ' if is_live else ''}to find a bottleneck"
    if not is_diagnosed:
        return "bottlenecks were not looked for"
    return "no bottleneck measured now" if is_live else "no bottleneck measured"


@cache
def _throttling_words() -> dict[str, str]:
    """Return the words of each throttling figure by its name."""
    figures: dict[str, str] = {}
    for cause in CAUSES:
        figures |= dict.fromkeys((f"{cause.name}_percent", f"{cause.name}_ms_per_step"), f"throttled by {cause.text}")
        figures |= dict.fromkeys(
            (f"{cause.name}_lost_percent", f"{cause.name}_lost_ms_per_step"), f"lost to {cause.text}"
        )
    return figures


def _unit_suffix(name: str) -> str:
    return max(filter(name.endswith, FORMATTERS), key=len, default="")
