"""Two runs side by side: the knobs that differ, and the change in throughput, memory and step time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import state_text
from trainfast_runner.results.comparison import BETTER, DOUBTFUL, WORSE, Comparison, compare
from trainfast_runner.units import counted
from trainfast_tui.screens.base import PageScreen
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.diagnosis_words import diagnosis_section, no_bottleneck_in_run, overlap_words
from trainfast_tui.text.format import DOUBT_SIGN, SYNTHETIC_BADGE, Line, Tone, labelled, paragraph, rule
from trainfast_tui.text.result_words import (
    difference_text,
    figure_with_unit,
    interval_text,
    value_text,
    verdict_reasons,
    verdict_words,
)

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.live.snapshot import Snapshot


VERDICT_TONES: dict[str, Tone] = {BETTER: "success", WORSE: "error", DOUBTFUL: "warning"}
DIFFERENCES_FROM, INTERVALS_FROM = 100, 132
"""Columns from which the figures have their difference, and from which its interval."""
VERDICT_SIGNS = {BETTER: "✓ ", WORSE: "✗ ", DOUBTFUL: f"{DOUBT_SIGN} "}
VALUE_CELLS, MIN_KNOB_CELLS = 16, 18
"""Cells of a knob's value, and the least of its name where there is room."""
CONDITION_CELLS, CONDITION_VALUE_CELLS = 30, 20
LABEL_CELLS, FIGURE_CELLS, NARROW_FIGURE_CELLS, PERCENT_CELLS, INTERVAL_CELLS = 18, 18, 15, 10, 20
"""Cells of the columns of figures; a figure has fewer where there are no differences."""


class CompareScreen(PageScreen):
    """Compares `b` with `a`: the settings that differ, and the figures of both runs."""

    SCOPE = "compare"

    def __init__(self, session: Session, a: Result, b: Result) -> None:
        super().__init__(session)
        self._a, self._b = a, b
        self._comparison = compare(a, b)
        self._labels = {result.run_id: session.run_words(result.run_id) for result in (a, b)}

    def answer_run_id(self) -> str:
        return self._b.run_id

    def reported(self) -> Sequence[str]:
        return self._a.run_id, self._b.run_id

    def action_swap(self) -> None:
        self._a, self._b = self._b, self._a
        self._comparison = compare(self._a, self._b)
        self.repaint()

    def body(self, width: int) -> list[Line]:
        comparison = self._comparison
        return [
            rule("compare", width),
            *(self._run_line(letter, result) for letter, result in (("A", self._a), ("B", self._b))),
            [],
            *_verdict_lines(comparison, width),
            *_knob_lines(comparison, width),
            [],
            *_figure_lines(comparison, width),
            *_condition_lines(comparison),
        ]

    def _run_line(self, letter: str, result: Result) -> Line:
        words = f"  {state_text(result.state)}, {counted(result.steps.measured, 'step')} measured"
        badge = SYNTHETIC_BADGE if result.synthetic_data else []
        return [(f"{letter}  ", "key"), (self._labels[result.run_id], "title"), (words, "muted"), *badge]


def _verdict_lines(comparison: Comparison, width: int) -> list[Line]:
    """Return the verdict, the reasons to doubt it, and the notes, with an empty line below."""
    verdict = comparison.rows[0].verdict
    sign, tone = VERDICT_SIGNS.get(verdict, ""), VERDICT_TONES.get(verdict, "text")
    lines = paragraph(f"{sign}{words}", width, tone) if (words := verdict_words(comparison)) else []
    for reason in verdict_reasons(comparison):
        lines += labelled((f"{DOUBT_SIGN} ", "warning"), reason, width, "warning")
    for note in map(fmt.with_sizes, comparison.notes):
        lines += labelled(("note: ", "muted"), note, width, "warning")
    return [*lines, []] if lines else []


def _knob_lines(comparison: Comparison, width: int) -> list[Line]:
    if not comparison.knobs:
        return [[("The same settings.", "text")]]
    # A field of the model has a longer name than any knob.
    longest = max(MIN_KNOB_CELLS, *(len(name) + 2 for name, _, _ in comparison.knobs))
    name_cells = max(8, min(longest, width - 2 * VALUE_CELLS))
    lines: list[Line] = [[(f"{'knob':<{name_cells}}{'A':>{VALUE_CELLS}}{'B':>{VALUE_CELLS}}", "muted")]]
    for name, *values in comparison.knobs:
        a, b = (fmt.to_width(fmt.plain(value_text(name, value)), VALUE_CELLS, "right") for value in values)
        lines.append([(fmt.to_width(fmt.plain(name), name_cells), "title"), (a, "text"), (b, "warning")])
    return lines


def _condition_lines(comparison: Comparison) -> list[Line]:
    if not comparison.conditions:
        return []
    head = f"{'condition':<{CONDITION_CELLS}}{'A':>{CONDITION_VALUE_CELLS}}{'B':>{CONDITION_VALUE_CELLS}}"
    lines: list[Line] = [[], [(head, "muted")]]
    for row in comparison.conditions:
        values = [fmt.plain(value or fmt.ABSENT) for value in (row.a, row.b)]
        text = "".join(fmt.to_width(value, CONDITION_VALUE_CELLS, "right") for value in values)
        line: Line = [(fmt.to_width(row.label, CONDITION_CELLS), "title")]
        lines.append([*line, (text, "warning"), ("  differs", "warning")] if row.differs else [*line, (text, "text")])
    return lines


def _figure_lines(comparison: Comparison, width: int) -> list[Line]:
    rows = comparison.shown_rows
    note = _no_speed_words(comparison)
    if note:
        rows = [row for row in rows if row.delta is not None]
    lines: list[Line] = [[(note, "text")]] if note else []
    if note and not rows:
        return lines
    has_differences, has_intervals = width >= DIFFERENCES_FROM, width >= INTERVALS_FROM
    figure_cells = FIGURE_CELLS if has_differences else NARROW_FIGURE_CELLS
    head = f"{'figure':<{LABEL_CELLS}}{'A':>{figure_cells}}{'B':>{figure_cells}}"
    head += (f"{'change':>{FIGURE_CELLS}}" if has_differences else "") + " " * PERCENT_CELLS
    head += f"{'95 % CI':>{INTERVAL_CELLS}}" if has_intervals else ""
    lines.append([(head, "muted")])
    for row in rows:
        texts = [(figure_with_unit(value, row.unit), figure_cells) for value in (row.a, row.b)]
        texts += [(difference_text(row), FIGURE_CELLS)] if has_differences else []
        tone = VERDICT_TONES.get(row.verdict, "muted")
        percent = "" if row.percent is None else fmt.signed_percent(row.percent)
        interval = fmt.to_width(interval_text(row), INTERVAL_CELLS, "right") if has_intervals else ""
        lines.append(
            [
                (f"{row.label:<{LABEL_CELLS}}", "title"),
                ("".join(fmt.to_width(text, cells, "right") for text, cells in texts), "text"),
                (fmt.to_width(percent, PERCENT_CELLS, "right"), "text" if tone == "muted" else tone),
                (f"{interval}  ", "text"),
                (VERDICT_SIGNS.get(row.verdict, "") + row.verdict, tone),
            ]
        )
    return lines


def _no_speed_words(comparison: Comparison) -> str:
    """Explain why there is no speed to compare; empty if both runs measured a step."""
    step = next(row for row in comparison.rows if row.label == "step")
    missing_letters = [letter for letter, value in (("A", step.a), ("B", step.b)) if value is None]
    if not missing_letters:
        return ""
    run_words = "Neither run has" if len(missing_letters) == 2 else f"{missing_letters[0]} has not"
    return f"{run_words} measured a step: there is no speed to compare."


class DiagnosisScreen(PageScreen):
    """Follows the run that is on the main screen when it is opened."""

    SCOPE = "diagnosis"

    def __init__(self, session: Session, run: RunSnapshot) -> None:
        super().__init__(session)
        self._run, self._label = run, session.run_words(run.run_id)

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the newest snapshot of this run, and none of another run."""
        run = snapshot.run
        if run is not None and run.run_id == self._run.run_id:
            self._run = run
            self.repaint()

    def body(self, width: int) -> list[Line]:
        period_words = "now" if self._run.is_live else "in all"
        title = rule(f"bottlenecks of {self._label}, {period_words}", width)
        return [title, [], *_diagnosis_lines(self._run, width)]


def _diagnosis_lines(run: RunSnapshot, width: int) -> list[Line]:
    """Return every diagnosis with its figures, in lines of `width` cells."""
    if not run.diagnosis:
        return [[(no_bottleneck_in_run(run), "text")]]
    lines = paragraph(overlap_words(run.diagnosis), width, "muted")
    for index, diagnosis in enumerate(run.diagnosis):
        title, section = diagnosis_section(diagnosis, width)
        lines += [*([[]] if index else []), rule(title, width), *section]
    return lines
