"""The screen on which a best-fit search is planned, started and continued; the search outlives the screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replaced_struct
from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import UNFINISHED_STATES
from trainfast_runner.search.best_journal import BestRequest
from trainfast_runner.settings.knob_values import whole_number
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.units import counted
from trainfast_tui.charts.scatter_chart import ChartPoint, front_of, scatter_chart
from trainfast_tui.control.search_control import BestControl, BestOptions, BestPlanned, request_of
from trainfast_tui.next_run.next_run import has_same_model
from trainfast_tui.next_run.sources import next_run_from_search, spec_to_continue
from trainfast_tui.panels.best_dialogs import ask_part
from trainfast_tui.screens.base import PostedMessage
from trainfast_tui.screens.search import SearchScreen, SearchView
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.best_words import (
    ABOUT_SCRIPT_SEARCH,
    ABOUT_SEARCH,
    EFFECT_HEADER,
    NAMED_BY_KEYS,
    START_HINT,
    best_answer_rows,
    best_label,
    best_question_rows,
    best_search_words,
    best_words,
    candidate_knob_texts,
    candidate_words,
    chance_words,
    count_rows,
    effect_rows,
    figure_with_interval_text,
    is_doubtful,
    objective_of,
    question_lines,
    unit_of,
)
from trainfast_tui.text.format import (
    DOUBT_SIGN,
    LabelledText,
    Line,
    Piece,
    Tone,
    labelled,
    paragraph,
    state_sign,
    table,
)
from trainfast_tui.text.keys import ASK_BATCH, ASK_BUDGET, ASK_OBJECTIVE, ASK_VARY, key_of
from trainfast_tui.text.search_words import outcome_of, role_of

if TYPE_CHECKING:
    from trainfast_runner.search.best.answer import BestSnapshot, BestSoFar
    from trainfast_runner.search.best_journal import ColdRun, Trial
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.live.snapshot import Snapshot


PLANNING_NOTICE = "Listing the settings that can run here…"
QUESTION_ACTIONS = (ASK_VARY, ASK_BATCH, ASK_OBJECTIVE, ASK_BUDGET, "fresh")
"""The actions that change the question of the next search."""


class BestScreen(SearchScreen["BestSnapshot"]):
    """Shows the live best-fit search, else the newest of the next run's model; Enter takes its best setting."""

    SCOPE = "best"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._planned = BestPlanned(session.searches.best.options, [])
        self._plans_after_run = False
        """True while the plan waits for the end of a live run."""
        current, next_run = self.search_control.current, session.next_run
        question = current.so_far.question if current is not None else None
        is_same_model = question is not None and next_run is not None and has_same_model(question, next_run.spec)
        self._is_asking = not (self.search_control.is_active or is_same_model)

    def content(self) -> ComposeResult:
        yield BestView()

    @property
    def search_control(self) -> BestControl:
        return self.session.searches.best

    def on_mount(self) -> None:
        self.show_newest()
        if self._is_asking:
            self._make_plan()

    def show_snapshot(self, snapshot: Snapshot) -> None:
        super().show_snapshot(snapshot)
        if self._plans_after_run and self._is_asking and self.session.live_run is None:
            self._make_plan()

    def _make_plan(self) -> None:
        """Plan a search of the next run, unless a run is being measured."""
        next_run, run, control = self.session.next_run, self.session.live_run, self.search_control
        assert next_run is not None
        self._plans_after_run = run is not None
        if run is not None:
            label = self.session.run_words(run.run_id)
            words = f"{label} is using the device: {key_of('best', 'apply')} stops it first."
            self._planned = BestPlanned(control.options, [(words, "warning")])
        else:
            control.plan(next_run.spec, self.post)
            self._planned = BestPlanned(control.options, [(PLANNING_NOTICE, "muted")])
        self.show_newest()

    def on_posted_message(self, message: PostedMessage) -> None:
        """Take in the plan; leave other messages to the app."""
        planned = message.content
        # The plan of an earlier question may come late.
        if isinstance(planned, BestPlanned) and planned.options == self.search_control.options:
            self._planned = planned
            self.show_newest()

    def on_unmount(self) -> None:
        self.search_control.give_up_plan()

    def question(self) -> tuple[str, list[LabelledText]]:
        next_run, control = self.session.next_run, self.search_control
        rows = [self.starting_row()]
        if self._is_asking:
            question = best_question_rows(control.request, self._planned.global_batch, fresh=control.options.is_fresh)
            is_script = next_run is not None and next_run.script is not None
            rows = [("", ABOUT_SCRIPT_SEARCH if is_script else ABOUT_SEARCH, "muted"), ("", START_HINT, "title")]
            rows += [(f"{name:<16}", value, "text") for name, value in question]
            rows += [("", text, tone) for text, tone in self._planned.texts]
        return next_run.spec.name if next_run is not None else "", rows

    def answer_run_id(self) -> str | None:
        answer = self._search.so_far.answer if self._search is not None else None
        return None if answer is None or not answer.best_run_ids else answer.best_run_ids[-1]

    def hidden_actions(self) -> set[str]:
        search = self._search
        is_live = search is not None and search.is_live
        can_take = search is not None and search.so_far.best is not None
        hidden: set[str] = set()
        if not (self._is_asking or can_take):
            hidden.add("apply")
        if is_live or search is None:
            hidden.add("again")
        if not self._is_asking:
            hidden.update(QUESTION_ACTIONS)
        if not self.search_control.is_active:
            hidden.discard(ASK_VARY)  # beside an ended search the key asks a new question
        return hidden

    def action_labels(self) -> Mapping[str, str]:
        search = self._search
        is_unfinished = search is not None and search.state in UNFINISHED_STATES
        return {
            "apply": "start" if search is None else "take",
            ASK_VARY: "vary" if search is None else "new question",
            "again": "continue" if is_unfinished else "restart",
        }

    def show_refusal(self, error: UserError) -> None:
        if not self._planned.vary:
            # The plan was refused for the same reason, which the notice gives.
            self._planned = BestPlanned(self._planned.options, [])
        super().show_refusal(error)

    def action_leave(self) -> None:
        if self._is_asking:
            self.search_control.options = BestOptions()
        super().action_leave()

    def action_apply(self) -> None:
        so_far = self._search.so_far if self._search is not None else None
        if so_far is None:
            self.start_search()
        elif so_far.best is None or so_far.question is None:
            self.notify("Nothing was measured yet.", severity="warning")
        else:
            knob_texts = candidate_knob_texts(so_far, so_far.best.number)
            self.apply_knobs(so_far.question, knob_texts, "best setting")

    def action_ask(self, part: str) -> None:
        """Ask for a part of the next search's question, and plan with the answer."""
        request, next_run = self._request_to_change(), self.session.next_run
        if request is not None:
            assert next_run is not None
            steps = whole_number({**defaults(), **next_run.spec.knobs}, "steps")
            ask_part(self.app, part, request, self._planned.vary, steps, self._plan_request)

    def action_fresh(self) -> None:
        """Toggle whether the next search ignores earlier ones; after an answer, plan a fresh search of its question."""
        request = self._request_to_change()
        if request is not None:
            is_fresh = self._search is not None or not self.search_control.options.is_fresh
            self._plan_question(BestOptions(request, is_fresh))

    def _request_to_change(self) -> BestRequest | None:
        """Return the request of the shown search, else of the next one; None with a notice if a search is live."""
        control, search = self.search_control, self._search
        if control.is_active:
            words = f"The search is live; stop it with {key_of('best', 'cancel')} to ask another question."
            self.notify(words, severity="warning")
            return None
        if search is not None and search.so_far.question is not None:
            return request_of(search.so_far.question)
        return control.request

    def _plan_request(self, request: BestRequest) -> None:
        self._plan_question(replaced_struct(self.search_control.options, request=request))

    def _plan_question(self, options: BestOptions) -> None:
        """Show the plan of a search with these options, in place of a search that has ended."""
        self.search_control.options = options
        self._is_asking = True
        self.notify("")
        self._make_plan()

    def search_to_start(self) -> tuple[RunSpec, bool]:
        """Return the settings of the shown search, else of the question on the screen, and True to start it over.

        The request of the shown search becomes that of the next one. An unfinished search goes on. An ended one starts
        over, with the knobs of a next run of the same model. Only a question on the screen may be fresh. Raises
        UserError if the preset of the shown search is gone.
        """
        search, control, next_run = self._search, self.search_control, self.session.next_run
        assert next_run is not None
        spec = next_run.spec
        question = search.so_far.question if search is not None else None
        if search is not None and question is not None:
            if not has_same_model(question, spec):
                spec = next_run_from_search(question).spec
            control.options = replaced_struct(control.options, request=request_of(question))
            if search.state in UNFINISHED_STATES:
                spec = spec_to_continue(question, spec)
        return spec, search is None and control.options.is_fresh


MIN_CHART_LINES, MAX_CHART_LINES = 7, 20
"""The least lines of a useful chart, and the most."""
SIGN_MEANINGS = {"■": "best", "•": "measured", "✗": "too large", "○": "now"}
"""The signs of the chart; a measured candidate on the line is ● instead of •."""
MIN_TABLE_LINES = 4
"""Lines of the table that the chart leaves."""
ANSWER_ROWS = ("baseline", "trains", "note", "within the noise", "settings", "stopped because")
"""The rows of the command's answer that the screen shows; its head has the others."""
LABEL_CELLS = 18
"""Cells of the labels of these rows."""


class BestView(SearchView["BestSnapshot"]):
    """The view of a best-fit search."""

    TITLE = "best fit"

    def search_lines(self, search: BestSnapshot, width: int, height: int) -> list[Line]:
        name = search.so_far.question.name if search.so_far.question is not None else self._spec_name
        head = [self.title_line(name, width), *_state_lines(search, self._now_ns, width), *_varied_lines(search, width)]
        foot = _answer_lines(search.so_far, width)
        trials = trial_lines(search.so_far, width) if search.so_far.space is not None else []
        line = waiting_line(search.so_far, width) if search.is_live else []
        step_lines = [line] if line else []
        end = [[], *foot] if foot else []
        room = height - len(head) - len(end)
        if room < 0:
            text = [*head, [], *foot, [], *trials, *step_lines]
            return self.scrolled_text(text, height)
        self._top = 0
        table_rows = len(trials) + len(step_lines) + 1 if len(trials) > 1 or step_lines else 0
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
        shown, hidden = self.scrolled_table(trials, room) if len(trials) > 1 and room >= 2 else ([], [])
        body = [hidden, *shown, *step_lines] if shown or step_lines else []
        return [*head, *chart, *body, *end]


def _state_lines(search: BestSnapshot, now_ns: int, width: int) -> list[Line]:
    """Return the state of the search, the best setting so far, and the time."""
    so_far = search.so_far
    sign, tone = state_sign(search.state)
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


def _chart_title(so_far: BestSoFar, points: list[ChartPoint]) -> Line:
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


def _answer_lines(so_far: BestSoFar, width: int) -> list[Line]:
    """Return the rows of the command's answer that the head lacks; empty before there is an answer."""
    answer = so_far.answer
    if answer is None or so_far.space is None or so_far.ended is None:
        return []
    effects = table(EFFECT_HEADER, effect_rows(answer)) if answer.effects else []
    lines: list[Line] = [[(text, "text" if index else "muted")] for index, text in enumerate(effects)]
    for label, words in (*best_answer_rows(so_far, answer), *count_rows(so_far, answer.verdicts)):
        if label in ANSWER_ROWS:
            lines += labelled((f"{label:<{LABEL_CELLS}}", "muted"), words, width)
    return lines


def candidate_points(so_far: BestSoFar, *, is_live: bool) -> list[ChartPoint]:
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
            points.append(ChartPoint(needed, rate, *signs[number]))
    front = front_of(points)
    return [
        replace(point, sign="●", tone="success") if point.sign == "•" and point in front else point for point in points
    ]


RATE_CELLS, STEPS_CELLS, TOOK_CELLS, PROCESS_CELLS = 26, 6, 12, 11
"""Cells of the columns right of the candidate."""
NARROW_RATE_CELLS, NARROW_TOOK_CELLS, NARROW_PROCESS_CELLS = 22, 9, 9
WIDE_COLUMNS_FROM = 100
"""Width of the table from which its columns are wide and its words long."""


def trial_lines(so_far: BestSoFar, width: int) -> list[Line]:
    """Return a title, and a row for each trial or run in their order."""
    title = f"{_unit(so_far)[0]} (95 % CI)"
    rows = [_row((" ", "text"), ("setting", title, "steps", "took", "process"), width, "muted")]
    for index, attempt in enumerate(so_far.attempts):
        rows.append(_attempt_row(so_far, index, attempt, width))
        if attempt.reason and attempt.outcome not in ("oom", "slow"):
            rows += labelled(("  └ ", "muted"), fmt.with_sizes(attempt.reason), width, "muted")
    return rows


def _unit(so_far: BestSoFar) -> tuple[str, float]:
    """Return the unit of the table and its divisor, chosen for the first figure and kept for all."""
    first = next(iter(so_far.values.values()), None)
    return unit_of(so_far.objective, first.median if first is not None else 0.0)


def _attempt_row(so_far: BestSoFar, index: int, attempt: Trial | ColdRun, width: int) -> Line:
    from trainfast_runner.search.best_journal import Trial

    outcome = outcome_of(attempt.outcome)
    sign: Piece = (DOUBT_SIGN, "warning") if attempt.counts_disturbed else (outcome.sign, outcome.tone)
    words = "" if attempt.outcome in ("measured", "slow") else outcome.noun
    assert so_far.space is not None
    candidate = candidate_words(so_far.space, attempt.candidate_number, short=width < WIDE_COLUMNS_FROM)
    value, divisor = so_far.values.get(index), _unit(so_far)[1]
    if value is not None:
        words = figure_with_interval_text(value, divisor)
    if isinstance(attempt, Trial):
        steps = f"{len(attempt.step_ms)}" if attempt.step_ms else fmt.ABSENT
        process = "repeat" if attempt.repeats else "warm" if attempt.warm else "new"
    else:
        if attempt.knob is not None:
            candidate = f"{attempt.knob} of {candidate}"
        steps, process = fmt.ABSENT, role_of(attempt.role).short if width >= WIDE_COLUMNS_FROM else "cold"
    if attempt.outcome == "slow":
        words = f"{words}, given up" if width >= WIDE_COLUMNS_FROM else words
    elif attempt.outcome == "void" and words != "void":
        words = f"void: {words}"
    return _row(sign, (candidate, words, steps, fmt.duration(attempt.seconds), process), width)


def _row(sign: Piece, cells: tuple[str, str, str, str, str], width: int, tone: Tone = "text") -> Line:
    """Return a sign and the cells of candidate, rate, steps, time and process."""
    candidate, *figures, process = cells
    widths = (
        (RATE_CELLS, STEPS_CELLS, TOOK_CELLS, PROCESS_CELLS)
        if width >= WIDE_COLUMNS_FROM
        else (NARROW_RATE_CELLS, STEPS_CELLS, NARROW_TOOK_CELLS, NARROW_PROCESS_CELLS)
    )
    room = max(12, width - 2 - sum(widths))
    right = "".join(fmt.to_width(cell, cell_width, "right") for cell, cell_width in zip(figures, widths, strict=False))
    last = fmt.to_width(f"  {process}", widths[3])
    return [(f"{sign[0]} ", sign[1]), (fmt.to_width(candidate, room) + right + last, tone)]


def waiting_line(so_far: BestSoFar, width: int) -> Line:
    """Return the candidate under way, with its reason; empty without one."""
    step, space = so_far.newest_step, so_far.space
    if step is None or step.candidate_number is None or space is None or not so_far.is_under_way:
        return []
    return [
        ("▸ ", "accent"),
        (candidate_words(space, step.candidate_number, short=width < WIDE_COLUMNS_FROM), "title"),
        (f"  {step.why}", "muted"),
    ]
