"""A diagnosis in words: its one line, and its figures with their units, their thresholds and what to try."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainfast_tui import format as fmt
from trainfast_tui.widgets.painted import Line, rule, wrap

if TYPE_CHECKING:
    from trainfast_runner.diagnosis_rules import Rule
    from trainfast_runner.follow import RunSnapshot
    from trainfast_runner.records import Diagnosis

TONES = {"warning": "warning", "info": "secondary"}
NOTHING_LIVE = "nothing that was measured holds this run back now"
NOTHING = "nothing that was measured held this run back"

UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_fraction", lambda value: fmt.percent(100 * value, 1)),
    ("_share", lambda value: fmt.percent(100 * value, 1)),
    ("_percent", lambda value: fmt.percent(value, 1)),
    ("_ms", fmt.milliseconds),
    ("_ms_per_step", lambda value: f"{fmt.milliseconds(value)} a step"),
    ("_bytes", fmt.size),
    ("_c", fmt.celsius),
    ("_w", fmt.watts),
    ("_mhz", fmt.megahertz),
    ("_joules", fmt.joules),
    ("_j", fmt.joules),
    ("_seconds", fmt.duration),
    ("_s", fmt.duration),
    ("_bytes_per_s", fmt.bytes_per_second),
)
"""How a figure is shown, by the unit at the end of its name; the longest ending that fits counts."""


def one_line(run: RunSnapshot) -> Line:
    """What holds the run back most, or that nothing was found."""
    if not run.diagnosis:
        return [(NOTHING_LIVE if run.is_live else NOTHING, "muted")]
    first, more = run.diagnosis[0], len(run.diagnosis) - 1
    return [
        ("d ", "key"),
        (first.line, TONES.get(first.severity, "text")),
        (f"  and {more} more" if more else "", "muted"),
    ]


def explained(run: RunSnapshot, width: int) -> list[Line]:
    """Every diagnosis opened to its numbers, in lines of `width` cells."""
    if not run.diagnosis:
        return [[(NOTHING_LIVE if run.is_live else NOTHING, "text")]]
    lines: list[Line] = []
    for place, diagnosis in enumerate(run.diagnosis):
        lines += [[]] if place else []
        lines += _opened(diagnosis, width)
    return lines


def _opened(diagnosis: Diagnosis, width: int) -> list[Line]:
    cost, found = diagnosis.cost_fraction, rule_of(diagnosis)
    head = found.title if found is not None else diagnosis.rule
    head += f", {fmt.percent(100 * cost)} of a step" if cost is not None else ""
    thresholds = {condition.figure: condition for condition in found.when} if found is not None else {}
    lines: list[Line] = [rule(head, width)]
    lines += [[(line, "title")] for line in wrap(diagnosis.line, width)]
    for name, value in diagnosis.evidence.items():
        line: Line = [(f"  {named(name)}  ", "muted"), (shown(name, value), "text")]
        if (condition := thresholds.get(name)) is not None:
            line.append((f"   the rule: {condition.words().removeprefix(name).strip()}", "muted"))
        lines.append(line)
    source = found.source if found is not None else ""
    return [*lines, *_labelled("try", diagnosis.advice, width), *_labelled("source", source, width)]


def rule_of(diagnosis: Diagnosis) -> Rule | None:
    """The rule that spoke: of those of its name the first that its figures fulfil. None for one of another version."""
    from trainfast_runner.diagnosis_rules import RULES

    return next(
        (
            rule
            for rule in RULES
            if rule.name == diagnosis.rule
            and all(condition.holds(diagnosis.evidence.get(condition.figure)) for condition in rule.when)
        ),
        None,
    )


def named(name: str) -> str:
    """The name of a figure without the unit at its end."""
    ending = _ending(name)
    return (name.removesuffix(ending) if ending else name).replace("_", " ")


def shown(name: str, value: float | int | str | None) -> str:
    """A figure with the unit that its name carries."""
    if value is None:
        return fmt.ABSENT
    if isinstance(value, str):
        return value
    ending = _ending(name)
    if ending:
        return dict(UNITS)[ending](value)
    return f"{value:,}" if isinstance(value, int) else fmt.number(value)


def _ending(name: str) -> str:
    return max((ending for ending, _ in UNITS if name.endswith(ending)), key=len, default="")


def _labelled(label: str, text: str, width: int) -> list[Line]:
    first, *rest = wrap(text, max(10, width - 12)) or [""]
    head: Line = [(f"  {label:<10}", "key"), (first, "text")]
    return [head, *([(" " * 12 + line, "text")] for line in rest)] if text else []
