"""The diagnosis: the rules of `rules` applied to the figures of a window of a run."""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from trainfast_runner.records.result import Diagnosis
from trainfast_runner.results.bottleneck.figures import figure_text, figures_by_scope
from trainfast_runner.results.bottleneck.measured_window import MeasuredWindow
from trainfast_runner.results.bottleneck.rules import RULES, BottleneckRule, Figure

SEVERITIES = ("warning", "info")
MIN_STEPS_TO_DIAGNOSE = 3
"""Measured steps needed for a diagnosis."""


def diagnose(window: MeasuredWindow) -> list[Diagnosis]:
    """The bottlenecks, the costliest first; one for each rule, of the device or rank with the highest cost."""
    if not has_enough_steps(window):
        return []
    scopes = figures_by_scope(window)
    by_rule: dict[str, Diagnosis] = {}
    for rule in RULES:
        # Rules of one name differ in their advice, the special cases first: the first that holds is the one to follow.
        if rule.name not in by_rule:
            findings = list(filter(None, (_finding(rule, figures) for figures in scopes[rule.scope])))
            if findings:
                by_rule[rule.name] = max(findings, key=partial(_weight, rule))
    return sorted(
        by_rule.values(), key=lambda finding: (SEVERITIES.index(finding.severity), -(finding.cost_ms_per_step or 0.0))
    )


def _weight(rule: BottleneckRule, finding: Diagnosis) -> tuple[float, float]:
    """The sort key of a rule's finding: its cost, then the figure that the rule compares first."""
    first_figure = next((condition.figure for condition in rule.when if condition.operator == ">="), "")
    value = finding.figures.get(first_figure)
    return finding.cost_ms_per_step or 0.0, float(value) if isinstance(value, float | int) else 0.0


def has_enough_steps(window: MeasuredWindow) -> bool:
    """True if the window has enough steps, so that finding nothing means something."""
    return len(window.first_rank) >= MIN_STEPS_TO_DIAGNOSE


class _Sentence(string.Formatter):
    """`str.format` with `figure` as a format, which is `figure_text`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec != "figure":
            return str(super().format_field(value, format_spec))
        return figure_text(value)


_SENTENCE = _Sentence()
_ONE_OF_TWO = ("degrees_over_c", "degrees_under_c")
"""The distances from a limit: one of them is always None, and left out."""


def _finding(rule: BottleneckRule, figures: Mapping[str, Figure]) -> Diagnosis | None:
    """The rule's finding; None unless every condition holds and every figure in its sentences is known."""
    if not rule.holds(figures):
        return None
    if any(figures.get(name) is None for name in (*_fields(rule.line), *_fields(rule.advice))):
        return None
    cost = figures.get(rule.cost) if rule.cost else None
    step_ms = figures["step_ms"]
    cost_ms = float(cost) if isinstance(cost, float | int) else None
    shown = dict.fromkeys([condition.figure for condition in rule.when] + list(rule.shown_figures))
    device, rank = figures.get("index"), figures.get("rank")
    return Diagnosis(
        rule=rule.name,
        line=_SENTENCE.vformat(rule.line, (), figures),
        advice=_SENTENCE.vformat(rule.advice, (), figures),
        severity=rule.severity,
        cost_ms_per_step=cost_ms,
        cost_fraction=cost_ms / step_ms if cost_ms is not None and isinstance(step_ms, float) and step_ms else None,
        figures={name: figures.get(name) for name in shown if name not in _ONE_OF_TWO or figures.get(name) is not None},
        device=device if rule.scope == "device" and isinstance(device, int) else None,
        rank=rank if rule.scope == "rank" and isinstance(rank, int) else None,
    )


@cache
def _fields(template: str) -> tuple[str, ...]:
    return tuple(name for _, name, _, _ in _SENTENCE.parse(template) if name)
