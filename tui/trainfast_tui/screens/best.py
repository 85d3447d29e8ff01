"""The screen on which a best-fit search is planned, started and continued; the search outlives the screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import UNFINISHED_STATES
from trainfast_runner.search.best_journal import BestQuestion, BestRequest, Trial, read_budget
from trainfast_runner.settings.knob_values import KnobValue, whole_number
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, defaults, knob, read_vary
from trainfast_runner.units import counted
from trainfast_tui.charts.scatter_chart import ChartPoint, front_of, scatter_chart
from trainfast_tui.control.messages import Message, TrainingPython
from trainfast_tui.control.threads import CancellableWork
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.next_run.next_run import NextRun, has_same_model
from trainfast_tui.next_run.sources import next_run_from_search, spec_to_continue
from trainfast_tui.panels.ask import ask_choice, ask_text
from trainfast_tui.panels.table_view import TablePage, TableRow, table_lines
from trainfast_tui.screens.base import PostedMessage
from trainfast_tui.screens.search import SearchScreen, SearchStart
from trainfast_tui.session import Session
from trainfast_tui.text import best_words as wording
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import DOUBT_SIGN, LabelledText, Line, Piece, labelled, paragraph, state_sign
from trainfast_tui.text.keys import ASK_BATCH, ASK_BUDGET, ASK_OBJECTIVE, ASK_VARY, key_of
from trainfast_tui.text.search_words import outcome_of, state_words

if TYPE_CHECKING:
    from trainfast_runner.search.best.answer import BestSoFar
    from trainfast_runner.search.best_journal import ColdRun
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.live.snapshot import Snapshot


class BestPlanned(Message, frozen=True):
    """The plan of a best-fit search, in paragraphs with their tones."""

    request: BestRequest
    """The question that was planned."""
    texts: Sequence[Piece] = ()
    vary: Mapping[str, Sequence[KnobValue]] = msgspec.field(default_factory=dict)
    """The varied values; empty if the search is refused."""
    global_batch: int | None = None


def plan_best(spec: RunSpec, request: BestRequest, python: TrainingPython) -> BestPlanned:
    """Plan a search. Raises UserError."""
    from trainfast_runner.search.best.question import plan_spec_best

    plan = plan_spec_best(spec, request, python)
    question = plan.question
    lines = [wording.varied_line(question.vary, question.global_batch), *wording.estimate_lines(plan)]
    texts: list[Piece] = [(fmt.plain(line), "text") for line in lines]
    # The smallest screen may have no room for the knobs left alone: they come last.
    texts += [(fmt.plain(line), "muted") for line in wording.left_alone_lines(question.left_alone)]
    return BestPlanned(request, texts, question.vary, question.global_batch)


class BestScreen(SearchScreen["BestSoFar"]):
    """Shows the live best-fit search, else the newest of the next run's model; Enter takes its best setting."""

    SCOPE = KIND = SearchKind.BEST
    TITLE_WORDS = "best fit"

    def __init__(self, session: Session, next_run: NextRun) -> None:
        super().__init__(session, next_run)
        self._request = BestRequest()
        """The question of the next search."""
        self._is_fresh = False
        """True if the next search continues no unfinished one and uses no measured effects."""
        self._planned = BestPlanned(self._request)
        self._work = CancellableWork("plan")
        self._plans_after_run = False
        """True while the plan waits for the end of a live run."""

    def is_answered_by(self, search: BestSoFar) -> bool:
        question = search.question
        return question is not None and has_same_model(question, self._next_run.spec)

    def search_page(self, search: BestSoFar, width: int, cursor: int) -> TablePage:
        return best_page(search, self._now_ns, width)

    def on_mount(self) -> None:
        super().on_mount()
        if self._is_asking:
            self._make_plan()

    def show_snapshot(self, snapshot: Snapshot) -> None:
        super().show_snapshot(snapshot)
        if self._plans_after_run and self._is_asking and self.session.live_run is None:
            self._make_plan()

    def _make_plan(self) -> None:
        """Plan the search that is asked for, unless a run is being measured."""
        run, request = self.session.live_run, self._request
        self._plans_after_run = run is not None
        if run is not None:
            label = self.session.run_words(run.run_id)
            notice: Piece = (f"{label} is using the device: {key_of('best', 'apply')} stops it first.", "warning")
        else:
            notice = ("Listing the settings that can run here…", "muted")
            plan = partial(plan_best, self._next_run.spec, request, self.session.python)

            def refused(error: UserError) -> BestPlanned:
                return BestPlanned(request, [(f"Refused: {error.line_without_option()}", "error")])

            # After the plan under way, for the newest question alone.
            self._work.start(lambda _: plan(), self.post, refused)
        self._planned = BestPlanned(request, [notice])
        self.show_newest()

    def on_posted_message(self, message: PostedMessage) -> None:
        """Take in the plan; leave other messages to the app."""
        planned = message.content
        # The plan of an earlier question may come late.
        if isinstance(planned, BestPlanned) and planned.request == self._request:
            self._planned = planned
            self.show_newest()

    def question_rows(self) -> list[LabelledText]:
        parts = wording.best_question_rows(self._request, self._planned.global_batch, fresh=self._is_fresh)
        return [
            ("", wording.ABOUT_SCRIPT_SEARCH if self._next_run.script is not None else wording.ABOUT_SEARCH, "muted"),
            ("", wording.START_HINT, "title"),
            *((f"{name:<16}", value, "text") for name, value in parts),
            *(("", text, tone) for text, tone in self._planned.texts),
        ]

    def answer_run_id(self) -> str | None:
        answer = self._search.answer if self._search is not None else None
        return None if answer is None or not answer.best_run_ids else answer.best_run_ids[-1]

    def useless_keys(self) -> set[str]:
        useless = set() if self._is_asking else {ASK_BATCH, ASK_OBJECTIVE, ASK_BUDGET, "fresh"}
        if self.search_control.is_active:
            useless.add(ASK_VARY)  # beside an ended search the key asks a new question
        elif self._search is not None and not wording.is_final(self._search.answer, self._search.state):
            useless.discard(ASK_BUDGET)
        if not self._is_asking and (self._search is None or self._search.best is None):
            useless.add("apply")
        return useless

    def show_refusal(self, error: UserError) -> None:
        if not self._planned.vary:
            # The plan was refused for the same reason, which the notice gives.
            self._planned = BestPlanned(self._request)
        super().show_refusal(error)

    def action_apply(self) -> None:
        search = self._search
        if search is None:
            self.start_search()
        elif search.best is None or search.question is None:
            self.notify("Nothing was measured yet.", severity="warning")
        else:
            knobs = search.candidates[search.best.number].knobs
            self.apply_knobs(search.question, [(name, KNOBS_BY_NAME[name].text_of(knobs[name])) for name in knobs])

    def action_ask(self, part: str) -> None:
        """Ask for `vary`, `batch`, `objective` or `budget` of the next search's question, and plan with the answer."""
        request = self._request_to_change()
        if request is None:
            return
        fresh = self._is_fresh and self._search is None

        def ask(title: str, hint: str, value: str, read: Callable[[str], dict[str, Any]], **options: Any) -> None:
            def accept(text: str) -> None:
                self._ask_anew(msgspec.structs.replace(request, **read(text)), fresh=fresh)

            ask_text(self.app, title, hint, value, accept, **options)

        def on_objective(name: str) -> None:
            if name != "time":
                self._ask_anew(msgspec.structs.replace(request, objective=name, for_steps=None), fresh=fresh)
                return
            steps = request.for_steps or whole_number({**defaults(), **self._next_run.spec.knobs}, "steps")
            hint = "Steps of the real training; a slow start such as compilation pays off only in a long one."
            read_steps = knob("steps").read
            ask("Optimizer steps", hint, f"{steps}", lambda text: {"objective": name, "for_steps": read_steps(text)})

        match part:
            case "vary":
                varied = wording.vary_text(request.vary or self._planned.vary)
                hint = f"knob=a,b,c knob=d,e: the values to try. Empty: {wording.EVERY_KNOB}."
                choices = _values_to_vary(self._planned.vary)

                def read_varied(text: str) -> dict[str, Any]:
                    # A space after a comma does not end a knob's values.
                    typed = re.split(r"\s+(?=\w+\s*=)", text.strip()) if text.strip() else []
                    return {} if text.strip() == varied else {"vary": read_vary(typed)}

                ask("Knobs to vary", hint, varied, read_varied, choices=choices)
            case "batch":
                batch = "" if request.global_batch is None else str(request.global_batch)
                hint = "Samples of one optimizer step. Empty: as the knobs are set, or any if the batch is varied."
                read = knob("batch_size").read
                ask("Global batch", hint, batch, lambda text: {"global_batch": read(text) if text.strip() else None})
            case "objective":
                hints = [(name, objective.hint) for name, objective in wording.OBJECTIVES.items()]
                ask_choice(self.app, "Search for", hints, on_objective, current=request.objective)
            case "budget":
                minutes, seconds = divmod(request.budget_s, 60)
                budget = f"{request.budget_s:g}s" if seconds else f"{minutes:g}m"
                hint = "Time for finding the best: 90s, 10m, 1.5h; a number alone is seconds."
                ask("Time budget", hint, budget, lambda text: {"budget_s": read_budget(text)})

    def action_fresh(self) -> None:
        """Toggle whether the next search ignores earlier ones; after an answer, plan a fresh search of its question."""
        request = self._request_to_change()
        if request is not None:
            self._ask_anew(request, fresh=self._search is not None or not self._is_fresh)

    def _request_to_change(self) -> BestRequest | None:
        """Return the request of the shown search, else of the next one; None with a notice if a search is live."""
        if self.search_control.is_active:
            words = f"The search is live; stop it with {key_of('best', 'cancel')} to ask another question."
            self.notify(words, severity="warning")
            return None
        question = self._search.question if self._search is not None else None
        try:
            return self._request if question is None else self._request_of_shown(question)
        except UserError as error:
            self.show_refusal(error)
            return None

    def _request_of_shown(self, question: BestQuestion) -> BestRequest:
        """Return the request of the shown search, and ask about its preset. Raises UserError if that is gone."""
        if not has_same_model(question, self._next_run.spec):
            self._next_run = next_run_from_search(question)
        return BestRequest(**{name: getattr(question, name) for name in BestRequest.__struct_fields__})

    def _ask_anew(self, request: BestRequest, *, fresh: bool) -> None:
        """Show the plan of this search, in place of a search that has ended."""
        self._request, self._is_fresh, self._is_asking = request, fresh, True
        self.notify("")
        self._make_plan()

    def search_to_start(self) -> SearchStart:
        """Return the search of the question on the screen, or the shown search, which goes on or starts over.

        One that starts over takes the knobs of a next run of the same model.
        """
        question = self._search.question if self._search is not None else None
        if self._search is None or question is None:
            return SearchStart(self._next_run.spec, self._is_fresh, self._request)
        self._request = self._request_of_shown(question)
        spec = self._next_run.spec
        if self._search.state in UNFINISHED_STATES:
            spec = spec_to_continue(question, spec)
        return SearchStart(spec, False, self._request)


def _values_to_vary(planned: Mapping[str, Sequence[KnobValue]]) -> dict[str, list[str]]:
    """Return the planned values of each knob, and those that a search may vary, as they are typed."""
    values = {entry.name: dict.fromkeys((*planned.get(entry.name, ()), *entry.search_values)) for entry in KNOBS}
    return {name: [*map(KNOBS_BY_NAME[name].text_of, found)] for name, found in values.items() if found}


MIN_CHART_LINES = 7
"""The least lines of a useful chart, its title among them."""
SIGN_MEANINGS = {"■": "best", "•": "measured", "✗": "too large", "○": "now"}
"""The signs of the chart; a measured candidate on the line is ● instead of •."""
ANSWER_ROWS = (
    "baseline",
    "trains",
    "bottleneck",
    "left alone",
    "note",
    "within the noise",
    "settings",
    "stopped because",
)
"""The rows of the command's answer that the screen shows; its head has the others."""


def best_page(so_far: BestSoFar, now_ns: int, width: int) -> TablePage:
    """Return a best-fit search as of `now_ns` (CLOCK_MONOTONIC)."""
    rows = list(_rows(so_far)) if so_far.space is not None else []
    unit = _unit(so_far)[0]
    header = ("setting", *fmt.figure_headings(f"{unit} (95 % CI)", "steps", "took", "process"))
    lines = table_lines(header, rows, width, dropped=("process", "steps", "took"))
    head = [*_state_lines(so_far, now_ns, width), *_varied_lines(so_far, width)]
    return TablePage(head, lines if rows else (), _answer_lines(so_far, width), chart=partial(_chart, so_far))


def _state_lines(so_far: BestSoFar, now_ns: int, width: int) -> list[Line]:
    """Return the state of the search, the best setting so far, and the time."""
    doubt: Piece = (f"{DOUBT_SIGN} ", "warning")
    sign, tone = state_sign(so_far.state)
    lines = labelled(doubt if wording.is_doubtful(so_far) else (f"{sign} ", tone), state_words(so_far), width, "title")
    if so_far.best is not None and so_far.space is not None:
        label = wording.best_label(so_far.answer, so_far.state)
        best = wording.candidate_words(so_far.space, so_far.best.number)
        if so_far.best.number == so_far.space.baseline_number:
            best += f": {wording.candidate_text(so_far, so_far.best.number)}"
        lines += labelled((f"{label} {wording.best_words(so_far)}  ", "accent"), best, width)
    if so_far.is_live:
        lines += [row for text in so_far.diagnosis[:1] for row in labelled(("  baseline: ", "muted"), text, width)]
    for doubted in so_far.answer_doubts:
        lines += labelled(doubt, doubted.text, width, "warning")
    measured = counted(len(so_far.attempts), "measurement")
    counts = f"{counted(len(so_far.candidates), 'setting')}, {measured}" if so_far.candidates else measured
    words = f"{counts}, took {fmt.duration(so_far.spent_s())}"
    if so_far.is_live:
        budget = "" if so_far.question is None else f", the budget is {fmt.duration(so_far.question.budget_s)}"
        words = f"{counts}, {fmt.duration(so_far.spent_s(now_ns))} so far{budget}"
        words = "; ".join(filter(None, (wording.chance_words(so_far), words)))
    return [*lines, *paragraph(words, width, "muted", 2)]


def _varied_lines(so_far: BestSoFar, width: int) -> list[Line]:
    """Return the varied knobs and the knobs left alone; empty after the first measurement."""
    question = so_far.question
    if question is None or so_far.attempts:
        return []
    lines = wording.question_lines(question.vary, question.left_alone, question.global_batch)
    return [[], *(row for line in lines for row in paragraph(line, width, "text", 2))]


def _answer_lines(so_far: BestSoFar, width: int) -> list[Line]:
    """Return the rows of the command's answer that the head lacks; empty before there is an answer."""
    answer = so_far.answer
    if answer is None or so_far.space is None or so_far.ended is None:
        return []
    effects = [*wording.effect_rows(answer)]
    lines = fmt.toned_table(wording.EFFECT_HEADER, effects, ["text"] * len(effects), width) if effects else []
    for label, words in (*wording.best_answer_rows(so_far, answer), *wording.count_rows(so_far)):
        if label in ANSWER_ROWS:
            lines += labelled((f"{label:<18}", "muted"), words, width)
    return lines


def _chart(so_far: BestSoFar, width: int, height: int) -> list[Line]:
    """Return the chart of throughput over memory, below a title that explains its signs."""
    points = candidate_points(so_far)
    chart = scatter_chart(points, so_far.limit_bytes, width, height - 1) if height >= MIN_CHART_LINES else []
    if not chart:
        return []
    title: Line = [(f"{wording.objective_of(so_far.objective).unit or 'samples/s'} over memory", "muted")]
    title += [("  ⠤ ", "primary"), ("Pareto front", "muted")]
    tones = {point.sign: point.tone for point in points}
    for sign, words in SIGN_MEANINGS.items():
        if sign in tones:
            title += [(f"  {sign} ", tones[sign]), (words, "muted")]
    return [title, *chart]


def candidate_points(so_far: BestSoFar) -> list[ChartPoint]:
    """Return the candidates as points of the chart, the best last; the one under way stands at the bottom."""
    # A time is no throughput: the chart then shows samples/s.
    figures = so_far.rates if so_far.objective == "time" else so_far.values
    marks: dict[int, tuple[float | None, Piece]] = {}
    for index, attempt in enumerate(so_far.attempts):
        if attempt.outcome == "oom":
            marks[attempt.candidate_number] = None, ("✗", "error")
        elif attempt.outcome in ("measured", "slow") and (figure := figures.get(index)) is not None:
            marks[attempt.candidate_number] = figure.median, ("•", "text")
    if (number := _number_under_way(so_far)) is not None:
        marks[number] = marks[number][0] if number in marks else None, ("○", "accent")
    best = so_far.best
    if best is not None and best.number in marks and marks[best.number][0] is not None:
        # The mark stands at the figure of the headline, over all others.
        del marks[best.number]
        marks[best.number] = (best.rate if so_far.objective == "time" else best.value).median, ("■", "accent")
    needs = {number: so_far.memory_bytes(number) for number in marks}
    points = [
        ChartPoint(need, rate, *sign) for number, (rate, sign) in marks.items() if (need := needs[number]) is not None
    ]
    front = front_of(points)
    return [
        replace(point, sign="●", tone="success") if point.sign == "•" and point in front else point for point in points
    ]


def _number_under_way(so_far: BestSoFar) -> int | None:
    """Return the number of the candidate under way; None without one."""
    step = so_far.newest_step if so_far.is_live and so_far.is_under_way else None
    return None if step is None else step.candidate_number


def _unit(so_far: BestSoFar) -> tuple[str, float]:
    """Return the unit of the table and its divisor, chosen for the first figure and kept for all."""
    first = next(iter(so_far.values.values()), None)
    return wording.unit_of(so_far.objective, first.median if first is not None else 0.0)


def _rows(so_far: BestSoFar) -> Iterator[TableRow]:
    """Yield a row for each trial or run in their order, and one for the candidate under way."""
    assert so_far.space is not None
    divisor = _unit(so_far)[1]
    for index, attempt in enumerate(so_far.attempts):
        outcome = outcome_of(attempt.outcome)
        sign: Piece = (DOUBT_SIGN, "warning") if attempt.counts_disturbed else (outcome.sign, outcome.tone)
        words = "" if attempt.outcome in ("measured", "slow") else outcome.noun
        if (value := so_far.values.get(index)) is not None:
            words = wording.figure_with_interval_text(value, divisor)
        if attempt.outcome == "slow":
            words += ", given up"
        elif attempt.outcome == "void" and words != "void":
            words = f"void: {words}"
        candidate = wording.candidate_words(so_far.space, attempt.candidate_number, short=True)
        steps, process = _process_of(attempt)
        if not isinstance(attempt, Trial) and attempt.knob is not None:
            candidate = f"{attempt.knob} of {candidate}"
        note = fmt.with_sizes(attempt.reason) if attempt.outcome not in ("oom", "slow") else ""
        yield TableRow(sign, (candidate, words, steps, fmt.duration(attempt.seconds), process), note)
    number = _number_under_way(so_far)
    if number is not None and so_far.newest_step is not None:
        candidate = wording.candidate_words(so_far.space, number, short=True)
        yield TableRow(("▸", "accent"), (candidate, "", "", "", ""), so_far.newest_step.why, "title")


def _process_of(attempt: Trial | ColdRun) -> tuple[str, str]:
    """Return the measured steps and the process of a trial or a run."""
    if not isinstance(attempt, Trial):
        return fmt.ABSENT, wording.role_of(attempt.role).short
    process = "repeat" if attempt.repeats else "warm" if attempt.warm else "new"
    return f"{len(attempt.step_ms)}" if attempt.step_ms else fmt.ABSENT, process
