"""A run's bottlenecks in lines of text: one line each, or with figures, thresholds and sources."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.records.result import Diagnosis
from trainfast_tui.cli.output import terminal_width
from trainfast_tui.text.diagnosis import sections
from trainfast_tui.text.diagnosis_figures import overlap_words
from trainfast_tui.text.format import plain
from trainfast_tui.text.lines import line_text

UNCUT = 10_000
"""The width of lines for a pipe, which gets each one whole."""


def bottleneck_lines(findings: Sequence[Diagnosis]) -> list[str]:
    """Return the bottlenecks, the costliest first, each with advice."""
    lines = []
    for number, finding in enumerate(findings):
        lines += [f"{'also' if number else 'bottleneck'}: {plain(finding.line)}", f"  try: {plain(finding.advice)}"]
    return lines


def explained_bottlenecks(findings: Sequence[Diagnosis], nothing: str) -> list[str]:
    """Return each bottleneck with its figures, its rule's thresholds and their sources; else `nothing`."""
    if not findings:
        return [nothing]
    lines: list[str] = []
    for title, section in sections(findings, terminal_width() or UNCUT):
        lines += ["", plain(title), *(plain(line_text(line)) for line in section)]
    overlap = overlap_words(findings)
    return [*lines[1:], *(["", overlap] if overlap else [])]
