"""A diagnosis in words: one line, or its figures with units, thresholds and advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len

from trainfast_tui.text import format as fmt
from trainfast_tui.text.diagnosis_figures import (
    cost_words,
    figure_name,
    figure_text,
    nothing_found,
    overlap_words,
    threshold_text,
)
from trainfast_tui.text.lines import Line, Tone, labelled, paragraph, rule

if TYPE_CHECKING:
    from trainfast_runner.records.result import Diagnosis
    from trainfast_runner.running.follower import RunSnapshot

SEVERITY_TONES: dict[str, Tone] = {"warning": "warning", "info": "secondary"}


def worst_bottleneck_line(run: RunSnapshot) -> Line:
    """Return the worst bottleneck in one line, or that none was found."""
    if not run.diagnosis:
        return [(_nothing(run), "muted")]
    first, more = run.diagnosis[0], len(run.diagnosis) - 1
    return [
        ("d ", "key"),
        (first.line, SEVERITY_TONES.get(first.severity, "text")),
        (f"  and {more} more" if more else "", "muted"),
    ]


def diagnosis_lines(run: RunSnapshot, width: int) -> list[Line]:
    """Return every diagnosis with its figures, in lines of `width` cells."""
    if not run.diagnosis:
        return [[(_nothing(run), "text")]]
    lines = paragraph(overlap_words(run.diagnosis), width, "muted")
    for index, (title, section) in enumerate(sections(run.diagnosis, width)):
        lines += [*([[]] if index else []), rule(title, width), *section]
    return lines


def sections(findings: Sequence[Diagnosis], width: int) -> list[tuple[str, list[Line]]]:
    """Return a title with cost and the lines of each diagnosis: its figures beside their thresholds, advice, source."""
    return [_section(finding, width) for finding in findings]


def _nothing(run: RunSnapshot) -> str:
    result = run.result
    if result is not None:
        return nothing_found(live=False, measured=result.steps.measured, diagnosed=result.diagnosed)
    measured = sum(not step.warmup for step in run.steps)
    return nothing_found(live=run.is_live, measured=measured, diagnosed=True)


def _section(diagnosis: Diagnosis, width: int) -> tuple[str, list[Line]]:
    from trainfast_runner.results.bottleneck.rules import matching_rule

    rule = matching_rule(diagnosis.rule, diagnosis.evidence)
    title = ", ".join(filter(None, (rule.title if rule is not None else diagnosis.rule, cost_words(diagnosis))))
    thresholds = {condition.figure: condition for condition in rule.when} if rule is not None else {}
    lines = paragraph(diagnosis.line, width, "title")
    wide = max((cell_len(figure_name(name)) for name in diagnosis.evidence), default=0)
    for name, value in diagnosis.evidence.items():
        line: Line = [(f"  {fmt.to_width(figure_name(name), wide)}  ", "muted"), (figure_text(name, value), "text")]
        if (condition := thresholds.get(name)) is not None:
            line.append((f"   the rule: {threshold_text(condition)}", "muted"))
        lines.append(line)
    source = rule.source if rule is not None else ""
    for label, text in (("try", diagnosis.advice), ("source", source)):
        lines += labelled((f"  {label:<10}", "key"), text, width)
    return title, lines
