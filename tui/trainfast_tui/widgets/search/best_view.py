"""A best-fit search: the best so far, settings by memory and throughput, the table of trials, and the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainfast_runner.search.best.person_instructions import instructions_in_force
from trainfast_runner.units import counted
from trainfast_tui.charts.scatter_chart import CandidatePoint, front_of, scatter_chart
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Piece, labelled, paragraph
from trainfast_tui.text.search.best_figures import best_label, objective_of
from trainfast_tui.text.search.best_question import NAMED_BY_KEYS, question_lines
from trainfast_tui.text.search.best_state import (
    best_search_words,
    best_words,
    candidate_words,
    chance_words,
    instruction_words,
    is_doubtful,
)
from trainfast_tui.text.signs import DOUBT_SIGN, search_sign
from trainfast_tui.widgets.search.best_lines import effect_lines, footnote_lines, trial_lines, waiting_line
from trainfast_tui.widgets.search.search_view import SearchView

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot
    from trainfast_runner.search.best.best_so_far import BestSoFar

MIN_CHART_LINES, MAX_CHART_LINES = 7, 20
"""The least lines of a useful chart, and the most."""
SIGN_MEANINGS = {"■": "best", "•": "measured", "✗": "too large", "○": "now"}
"""The signs of the chart; a measured candidate on the line is ● instead of •."""
MIN_TABLE_LINES = 4
"""Lines of the table that the chart leaves."""
MAX_TIES, MAX_TIES_IN_FEW_LINES = 6, 2
MANY_TIES_FROM = 40
"""Settings within the noise that an answer names, and the lines of the screen from which it names the more."""
MIN_EFFECT_LINES, LINES_BESIDE_ANSWER = 4, 6
"""The least lines of the effects, and those that the answer leaves to the rest of the screen."""


class BestView(SearchView["BestSnapshot"]):
    """The view of a best-fit search."""

    TITLE = "best fit"

    def search_lines(self, search: BestSnapshot, notice: list[Line], width: int, height: int) -> list[Line]:
        name = search.so_far.question.name if search.so_far.question is not None else self._spec_name
        head = [self.title_line(name, width), *_state_lines(search, self._now_ns, width), *_varied_lines(search, width)]
        foot = [*_answer_lines(search, width, height), *_instruction_lines(search, width)]
        table = trial_lines(search.so_far, width) if search.so_far.space is not None else []
        line = waiting_line(search.so_far, width) if search.is_live else []
        step_lines = [line] if line else []
        end = [[], *foot, *notice] if foot or notice else []
        room = height - len(head) - len(end)
        if room < 0:
            text = [*head, [], *foot, [], *table, *step_lines]
            return [*self.scrolled_text(text, height - len(notice)), *notice]
        self._top = 0
        table_rows = len(table) + len(step_lines) + 1 if len(table) > 1 or step_lines else 0
        points = candidate_points(search.so_far, is_live=search.is_live)
        max_chart = min(MAX_CHART_LINES, room - 1 - min(table_rows, MIN_TABLE_LINES))
        chart = (
            scatter_chart(points, search.so_far.limit_bytes, width, max_chart - 1)
            if max_chart > MIN_CHART_LINES
            else []
        )
        if chart:
            chart = [[], _chart_title(search.so_far, points), *chart]
        room -= len(chart) + 1 + len(step_lines)
        shown, hidden = self.scrolled_table(table, room) if len(table) > 1 and room >= 2 else ([], [])
        body = [hidden, *shown, *step_lines] if shown or step_lines else []
        return [*head, *chart, *body, *end]


def _state_lines(search: BestSnapshot, now_ns: int, width: int) -> list[Line]:
    """Return the state of the search, the best setting so far, and the time."""
    so_far = search.so_far
    sign, tone = search_sign(search.state)
    mark: Piece = (f"{DOUBT_SIGN} ", "warning") if is_doubtful(search) else (f"{sign} ", tone)
    lines = labelled(mark, best_search_words(search), width, "title")
    if so_far.best is not None and so_far.space is not None:
        label = best_label(so_far.answer, search.state)
        best = candidate_words(so_far.space, so_far.best.number)
        lines += labelled((f"{label} {best_words(so_far)}  ", "accent"), best, width)
    for doubt in so_far.answer_doubts:
        lines += labelled((f"{DOUBT_SIGN} ", "warning"), doubt.text, width, "warning")
    facts = [chance_words(so_far) if search.is_live else "", _time_words(search, now_ns)]
    words = "; ".join(filter(None, facts))
    return [*lines, *paragraph(words, width, "muted", 2)]


def _chart_title(so_far: BestSoFar, points: list[CandidatePoint]) -> Line:
    """Return the axes, and the meaning of each sign on the chart."""
    title: Line = [(f"{objective_of(so_far.objective).unit or 'samples/s'} over memory", "muted")]
    title += [("  ⠤ ", "primary"), ("Pareto front", "muted")]
    for sign, words in SIGN_MEANINGS.items():
        tone = next((point.tone for point in points if point.sign == sign), None)
        if tone is not None:
            title += [(f"  {sign} ", tone), (words, "muted")]
    return title


def _varied_lines(search: BestSnapshot, width: int) -> list[Line]:
    """Return the varied knobs and the knobs left alone; empty after the first measurement."""
    question = search.so_far.question
    if question is None or search.so_far.attempts:
        return []
    lines = question_lines(question.vary, question.left_alone, question.global_batch, to_name=NAMED_BY_KEYS)
    return [[], *(row for line in lines for row in paragraph(line, width, "text", 2))]


def _time_words(search: BestSnapshot, now_ns: int) -> str:
    so_far = search.so_far
    measured = counted(len(so_far.attempts), "measurement")
    counts = f"{counted(len(so_far.candidates), 'setting')}, {measured}" if so_far.candidates else measured
    if not search.is_live:
        return f"{counts}, took {fmt.duration(so_far.spent_s())}"
    budget = "" if so_far.question is None else f", the budget is {fmt.duration(so_far.question.budget_s)}"
    return f"{counts}, {fmt.duration(so_far.spent_s(now_ns))} so far{budget}"


def _answer_lines(search: BestSnapshot, width: int, height: int) -> list[Line]:
    """Return the effects, the runner-ups and the verdict counts; empty before there is an answer."""
    ended = search.so_far.ended
    if ended is None or ended.answer is None or search.so_far.space is None:
        return []
    effects = effect_lines(ended.answer, width)
    max_ties = MAX_TIES if height >= MANY_TIES_FROM else MAX_TIES_IN_FEW_LINES
    rest = footnote_lines(search.so_far, ended.answer, width, max_ties)
    max_rows = max(MIN_EFFECT_LINES, height - LINES_BESIDE_ANSWER - len(rest))
    if len(effects) > max_rows:
        effects = [*effects[: max_rows - 1], [(f"and {len(effects) - max_rows + 1} values that gave less", "muted")]]
    return [*effects, *rest]


def _instruction_lines(search: BestSnapshot, width: int) -> list[Line]:
    """Return the instructions in force, and those that wait for the next step."""
    space = search.so_far.space
    in_force = instructions_in_force(search.so_far.instructions)
    words = [instruction_words(instruction, space) for instruction in in_force]
    words += [
        f"{instruction_words(instruction, space)} (before the next step)" for instruction in search.untaken_instructions
    ]
    return paragraph(f"your instructions: {', '.join(words)}", width, "secondary", 2) if words else []


def candidate_points(so_far: BestSoFar, *, is_live: bool) -> list[CandidatePoint]:
    """Return the candidates as points of the chart, the best last; the one under way stands at the bottom."""
    rates: dict[int, float | None] = {}
    signs: dict[int, Piece] = {}
    for index, attempt in enumerate(so_far.attempts):
        if attempt.outcome == "oom":
            rates[attempt.candidate_number], signs[attempt.candidate_number] = None, ("✗", "error")
        elif attempt.outcome in ("measured", "slow"):
            # A time is no throughput: the chart then shows samples/s.
            figures = so_far.rates if so_far.objective == "time" else so_far.values
            if (figure := figures.get(index)) is not None:
                rates[attempt.candidate_number], signs[attempt.candidate_number] = figure.median, ("•", "text")
    step = so_far.newest_step
    if is_live and step is not None and step.candidate_number is not None and so_far.is_under_way:
        signs[step.candidate_number] = ("○", "accent")
        rates.setdefault(step.candidate_number, None)
    answer, best, per_joule = so_far.answer, so_far.best, so_far.objective == "samples_per_joule"
    for verdict in answer.verdicts if answer is not None and not per_joule else ():
        number = verdict.candidate_number
        if verdict.rate is not None and rates.get(number) is not None:
            is_time = so_far.objective == "time"
            rates[number] = (verdict.rate if is_time else so_far.value_of(number, verdict.rate)).median
    if best is not None and rates.get(best.number) is not None:
        # The mark stands at the figure of the headline.
        rates[best.number] = (best.rate if so_far.objective == "time" else best.value).median
        signs[best.number] = ("■", "accent")
    points = []
    for number, rate in sorted(rates.items(), key=lambda item: best is not None and item[0] == best.number):
        needed = so_far.memory_bytes(number)
        if needed is not None:
            points.append(CandidatePoint(needed, rate, *signs[number]))
    front = front_of(points)
    return [
        replace(point, sign="●", tone="success") if point.sign == "•" and point in front else point for point in points
    ]
