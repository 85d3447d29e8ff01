"""Two runs side by side: the knobs that differ, and the change in throughput, memory and step time."""

from __future__ import annotations

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_states import state_text
from trainfast_runner.results.comparison.difference import Comparison, compare
from trainfast_runner.units import counted
from trainfast_tui.screens.base import PageScreen
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.comparison_words import (
    difference_text,
    figure_with_unit,
    interval_text,
    value_text,
    verdict_text,
)
from trainfast_tui.text.lines import Line, Tone, paragraph, rule
from trainfast_tui.text.signs import SYNTHETIC_BADGE

VERDICT_TONES: dict[str, Tone] = {"better": "success", "worse": "error"}
DIFFERENCES_FROM, INTERVALS_FROM = 100, 132
"""Columns from which the figures have their difference, and from which its interval."""
VERDICT_SIGNS = {"better": "✓ ", "worse": "✗ "}


class CompareScreen(PageScreen):
    """Compares `b` with `a`: the settings that differ, and the figures of both runs."""

    SCOPE = "compare"

    def __init__(self, session: Session, a: Result, b: Result) -> None:
        super().__init__(session)
        self._a, self._b = a, b
        self._comparison = compare(a, b)

    def action_swap(self) -> None:
        self._a, self._b = self._b, self._a
        self._comparison = compare(self._a, self._b)
        self.repaint()

    def body(self, width: int) -> list[Line]:
        comparison = self._comparison
        return [
            rule("compare", width),
            _run_line("A", self._a),
            _run_line("B", self._b),
            [],
            *_knob_lines(comparison, width),
            [],
            *_figure_lines(comparison, width),
            [],
            *paragraph(verdict_text(comparison) or "", width, "text"),
            *_condition_lines(comparison),
            *(
                line
                for note in map(fmt.with_sizes, comparison.notes)
                for line in paragraph(f"note: {note}", width, "warning")
            ),
        ]


def _run_line(letter: str, result: Result) -> Line:
    measured = result.steps.measured
    line: Line = [
        (f"{letter}  ", "key"),
        (result.run_id, "title"),
        (
            f"  {state_text(result.state)}, {counted(measured, 'step')} measured",
            "muted",
        ),
    ]
    if result.synthetic_data:
        line += SYNTHETIC_BADGE
    return line


def _knob_lines(comparison: Comparison, width: int) -> list[Line]:
    if not comparison.knobs:
        return [[("The same settings.", "text")]]
    # A field of the model has a longer name than any knob.
    label_width = max(8, min(max(18, *(len(name) + 2 for name, _, _ in comparison.knobs)), width - 32))
    lines: list[Line] = [[(f"{'knob':<{label_width}}{'A':>16}{'B':>16}", "muted")]]
    for name, a, b in comparison.knobs:
        lines.append(
            [
                (fmt.to_width(fmt.plain(name), label_width), "title"),
                (fmt.to_width(fmt.plain(value_text(name, a)), 16, "right"), "text"),
                (fmt.to_width(fmt.plain(value_text(name, b)), 16, "right"), "warning"),
            ]
        )
    return lines


def _condition_lines(comparison: Comparison) -> list[Line]:
    if not comparison.conditions:
        return []
    lines: list[Line] = [[], [(f"{'condition':<30}{'A':>20}{'B':>20}", "muted")]]
    for row in comparison.conditions:
        cells = [fmt.to_width(fmt.plain(value or fmt.ABSENT), 20, "right") for value in (row.a, row.b)]
        lines.append(
            [
                (fmt.to_width(row.label, 30), "title"),
                ("".join(cells), "warning" if row.differs else "text"),
                ("  differs" if row.differs else "", "warning"),
            ]
        )
    return [*lines, []]


def _figure_lines(comparison: Comparison, width: int) -> list[Line]:
    rows = [row for row in comparison.rows if row.a is not None or row.b is not None]
    step = next(row for row in comparison.rows if row.label == "step")
    without = [letter for letter, value in (("A", step.a), ("B", step.b)) if value is None]
    note: list[Line] = []
    if without:
        run_words = "Neither run has" if len(without) == 2 else f"{without[0]} has not"
        note = [[(f"{run_words} measured a step: there is no speed to compare.", "text")]]
        rows = [row for row in rows if row.delta is not None]
        if not rows:
            return note
    has_differences, has_intervals = width >= DIFFERENCES_FROM, width >= INTERVALS_FROM
    column_width = 18 if has_differences else 15
    head = f"{'figure':<18}{'A':>{column_width}}{'B':>{column_width}}"
    head += (f"{'change':>18}" if has_differences else "") + f"{'':>10}"
    head += f"{'95 % CI':>20}" if has_intervals else ""
    lines: list[Line] = [*note, [(head, "muted")]]
    for row in rows:
        figures: Line = [
            (fmt.to_width(figure_with_unit(value, row.unit), column_width, "right"), "text") for value in (row.a, row.b)
        ]
        if has_differences:
            figures.append((fmt.to_width(difference_text(row), 18, "right"), "text"))
        percent = "" if row.percent is None else fmt.signed_percent(row.percent)
        tone = VERDICT_TONES.get(row.verdict, "muted")
        lines.append(
            [
                (f"{row.label:<18}", "title"),
                *figures,
                (fmt.to_width(percent, 10, "right"), "text" if tone == "muted" else tone),
                (fmt.to_width(interval_text(row), 20, "right") if has_intervals else "", "text"),
                ("  ", "text"),
                (VERDICT_SIGNS.get(row.verdict, "") + row.verdict, tone),
            ]
        )
    return lines
