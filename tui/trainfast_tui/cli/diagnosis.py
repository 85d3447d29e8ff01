"""A run's bottlenecks in lines of text: one line each, or with figures, thresholds and sources."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.records.result import Diagnosis
from trainfast_runner.results.bottleneck.rules import rule_that_spoke
from trainfast_tui.text.diagnosis_figures import cost_words, figure_text, named, overlap_words, wanted
from trainfast_tui.text.format import plain
from trainfast_tui.text.tables import pairs


def bottleneck_lines(findings: Sequence[Diagnosis]) -> list[str]:
    """Return the bottlenecks, the costliest first, each with advice."""
    found = []
    for place, finding in enumerate(findings):
        found += [f"{'also' if place else 'bottleneck'}: {plain(finding.line)}", f"  try: {plain(finding.advice)}"]
    return found


def explained_bottlenecks(findings: Sequence[Diagnosis], nothing: str) -> list[str]:
    """Return each bottleneck with its figures, its rule's thresholds and their sources; else `nothing`."""
    if not findings:
        return [nothing]
    found: list[str] = []
    for finding in findings:
        rule = rule_that_spoke(finding.rule, finding.evidence)
        figures = pairs((named(name), plain(figure_text(name, value))) for name, value in finding.evidence.items())
        cost = cost_words(finding)
        found += ["", plain(finding.line), *([f"  costs {cost}"] if cost else []), f"  try: {plain(finding.advice)}"]
        found += [f"  {line}" for line in figures]
        if rule is not None:
            held = "; ".join(f"{named(condition.figure)} is {wanted(condition)}" for condition in rule.when)
            found.append(f"  holds when: {held}")
            found.append(f"  source: {rule.source}")
    overlap = overlap_words(findings)
    return [*found[1:], *(["", overlap] if overlap else [])]
