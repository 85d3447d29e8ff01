"""The screen on which a batch search is asked for, started and continued; the search outlives the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from textual.app import ComposeResult

from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.records.home import ANSWERED_STATES
from trainfast_runner.records.run_directory import state_text
from trainfast_runner.search.batch_decide import ALIGNED_UNIT, LARGE_ALIGNED_FROM, LARGE_ALIGNED_UNIT
from trainfast_runner.search.batch_journal import (
    CONFIRM_STEP,
    BatchSnapshot,
    ConfirmationRun,
    MemoryFit,
    Probe,
)
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import counted
from trainfast_tui.charts.scatter_chart import ChartPoint, fit_chart
from trainfast_tui.control.messages import Notified
from trainfast_tui.control.search_control import BatchControl
from trainfast_tui.next_run.next_run import NextRun, has_same_settings
from trainfast_tui.next_run.sources import next_run_from_search
from trainfast_tui.screens.search import SearchScreen, SearchView
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.batch_words import batch_question_rows, batch_search_words, limit_notice, limits_words
from trainfast_tui.text.format import DOUBT_SIGN, STRICT_MALLOC_NOTE, LabelledText, Line, Piece, Tone
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.memory_words import effect_words, phase_words
from trainfast_tui.text.search_words import REFUTED, outcome_of


class BatchScreen(SearchScreen[BatchSnapshot]):
    """Shows the search of the next run, or its question; Enter starts the search, or applies one of its answers."""

    SCOPE = "batch"

    def __init__(self, session: Session, next_run: NextRun) -> None:
        super().__init__(session)
        self._next_run = next_run
        machine = session.machine
        self._limit = limit_notice(next_run.spec, machine, next_run.ranks(machine), read_host_free_bytes())
        """The notice of the memory limit when the screen was opened, for the question and the start."""
        search = self._search_of_same_settings()
        has_answer = search is not None and search.state in ANSWERED_STATES
        self._is_asking = not (self.search_control.is_active or has_answer)

    def content(self) -> ComposeResult:
        yield BatchView(self._next_run.spec.name)

    @property
    def view(self) -> BatchView:
        return self.query_one(BatchView)

    @property
    def search_control(self) -> BatchControl:
        return self.session.searches.batch

    def on_mount(self) -> None:
        self.show_newest()

    def question(self) -> tuple[str, list[LabelledText]]:
        spec = self._next_run.spec
        if self._is_asking:
            return spec.name, batch_question_rows(spec, self._limit, self._search_of_same_settings())
        return spec.name, [self.starting_row(), ("", self._limit, "warning")]

    def _search_of_same_settings(self) -> BatchSnapshot | None:
        """Return the followed search if it has the next run's settings; else None."""
        search = self.search_control.current
        return search if search is not None and has_same_settings(search, self._next_run.spec) else None

    def answer_run_id(self) -> str | None:
        answer = self._search.answer if self._search is not None else None
        return None if answer is None else answer.confirmation_run_id

    def hidden_actions(self) -> set[str]:
        hidden = set()
        if self.view.offer is None and not self._is_asking:
            hidden.add("apply")
        if self.search_control.is_active or self._is_asking:
            hidden.add("again")
        return hidden

    def action_labels(self) -> Mapping[str, str]:
        return {
            "apply": "start" if self._is_asking else "apply",
            "again": "restart" if self._has_answer else "continue",
        }

    @property
    def _has_answer(self) -> bool:
        """True if the shown search has an answer, so that the next search starts over."""
        return self._search is not None and self._search.state in ANSWERED_STATES

    def search_to_start(self) -> tuple[RunSpec, bool]:
        """Return the settings of the search to start, and True to start it over: an answered search has no next step.

        Raises UserError if the preset of the shown search is gone.
        """
        search, spec = self._search, self._next_run.spec
        if search is not None and search.question is not None and not has_same_settings(search, spec):
            # The next run has other settings by now: continue the search on the screen.
            spec = next_run_from_search(search.question).spec
        return spec, self._has_answer

    def action_apply(self) -> None:
        offer, search = self.view.offer, self._search
        if self._is_asking:
            self.start_search()
        elif offer is not None and search is not None and search.question is not None:
            is_applied = self.apply_knobs(search.question, offer.knob_texts, "answer")
            next_run = self.session.next_run
            if is_applied and next_run is not None and not has_same_settings(search, next_run.spec):
                words = "Applied, but the search had other knobs: this may not fit with these."
                self.session.post(Notified(words, "warning"))
        elif not self.search_control.is_active:
            words = f"There is no answer to apply; {key_of('batch', 'again')} continues the search."
            self.notify(words, severity="warning")
        elif search is not None:
            # Without a search, the screen says already that the knobs are being checked.
            self.notify("There is no answer yet.", severity="warning")


MIN_CHART_LINES, MAX_CHART_LINES = 6, 16
"""The least lines of a useful chart, and the most."""
MAX_REASON_LINES = 3
"""Lines of the reason for the answer under the cursor."""
MIN_REASON_CELLS = 20
"""The least cells of a reason, which stands right of its answer."""
LATE_FACTOR = 1.5
"""Chosen, not measured: a step is late once it has taken this many times its expected time."""
CONFIRMED_SIGN = "✓"
"""The confirmed size in the chart, as in the table."""
OOM_ABOVE_LIMIT = 1.03
"""Chosen, not measured: a size that ran out of memory is drawn at least this far above the limit, clear of its line."""


class BatchView(SearchView[BatchSnapshot]):
    """The view of a batch search; after its end a cursor stands on one of the answers."""

    TITLE = "largest batch"

    def __init__(self, spec_name: str) -> None:
        super().__init__(spec_name)
        self._cursor = 0
        """The answer under the cursor."""

    @property
    def offer(self) -> Offer | None:
        """The offer that Enter applies; None before the end."""
        offered = offers(self._search)
        return offered[min(self._cursor, len(offered) - 1)] if offered else None

    def show_search(self, search: BatchSnapshot, now_ns: int) -> None:
        is_other = self._search is None or self._search.directory != search.directory
        if is_other or search.ended is None:
            self._cursor = 0
        super().show_search(search, now_ns)

    def action_move(self, by: int) -> None:
        """Move the cursor among the answers that Enter can apply; without any scroll the table, or the question."""
        if offered := offers(self._search):
            self._cursor = fmt.moved_cursor(self._cursor, by, len(offered))
            self.repaint()
        else:
            self.scroll_lines(by)

    def search_lines(self, search: BatchSnapshot, width: int, height: int) -> list[Line]:
        name = search.question.name if search.question is not None else self._spec_name
        head = [self.title_line(name, width), *_state_lines(search, self._now_ns, width)]
        table = table_lines(search, width)
        foot = [*_next_lines(search, width), *_offer_lines(search, self._cursor, width)]
        if any(DOUBT_SIGN in text for line in table for text, _ in line):
            foot = [[(STRICT_MALLOC_NOTE, "warning")], *foot]
        foot = [[], *foot] if foot else []
        room = height - len(head) - 1 - len(foot)
        table, hidden = self.scrolled_table(table, room)
        room -= len(table) + 1
        chart = _chart(search, width, min(MAX_CHART_LINES, room)) if room >= MIN_CHART_LINES else []
        return [*head, hidden, *table, *([[], *chart] if chart else []), *foot]


def _state_lines(search: BatchSnapshot, now_ns: int, width: int) -> list[Line]:
    """Return the state of the search and its time, the limit, and why there is no prediction."""
    sign, tone = fmt.state_sign(search.state)
    lines = fmt.labelled((f"{sign} ", tone), batch_search_words(search), width, "title")
    time: Piece = (f"  {_time_words(search, now_ns)}", "muted")
    last_with_time = [*lines[-1], time]
    lines = [*lines[:-1], last_with_time] if fmt.line_length(last_with_time) <= width else [*lines, [time]]
    lines += [line] if (line := _limit_line(search)) else []
    if search.prediction is not None and search.prediction.reason:
        lines += fmt.paragraph(search.prediction.reason, width, "warning", 2)
    return lines


def _time_words(search: BatchSnapshot, now_ns: int) -> str:
    """Return the elapsed and predicted time of the step under way, or the total time of an ended search."""
    if search.ended is not None:
        return f"took {fmt.duration(search.ended.seconds)}"
    if not search.is_live or search.state == "paused":
        return ""
    elapsed, expected_s = fmt.elapsed(search.since_ns, now_ns), _expected_s(search)
    if expected_s is None or expected_s < 1 or search.state == "starting" or search.waits_for:
        return elapsed
    about = f"about {fmt.duration(expected_s)}"
    if search.newest_step is not None and search.newest_step.action == CONFIRM_STEP:
        # Its process starts first, which takes an unknown time.
        return f"{elapsed}, its steps take {about}"
    is_late = search.since_ns is not None and (now_ns - search.since_ns) / 1e9 > LATE_FACTOR * expected_s
    return f"{elapsed}, expected {about}" if is_late else f"{elapsed} of {about}"


def _expected_s(search: BatchSnapshot) -> float | None:
    """Predict the seconds of the steps under way from the largest size that fitted; None before one did."""
    step = search.newest_step
    fitting = [probe for probe in search.probes if probe.outcome == "fits" and probe.step_ms is not None]
    if step is None or step.batch_size is None or not fitting:
        return None
    last = max(fitting, key=lambda probe: probe.batch_size)
    share = step.batch_size / last.batch_size
    if step.action == "probe":
        return share * last.seconds
    return (
        None if search.confirmation_steps is None else share * search.confirmation_steps * (last.step_ms or 0.0) / 1e3
    )


def _limit_line(search: BatchSnapshot) -> Line:
    question, fit = search.question, search.tightest_fit
    limits = list(question.limits_bytes) if question is not None else []
    if not limits and fit is not None:
        limits = [fit.limit_bytes]
    if not limits:
        return []
    line: Line = [("limit ", "muted"), (limits_words(limits), "text")]
    if fit is not None and len(search.fits) > 1:
        line.append((f", the tightest is rank {fit.rank}", "text"))
    if question is not None and question.limit_words:
        line.append((f" ({question.limit_words})", "muted"))
    return line


def _next_lines(search: BatchSnapshot, width: int) -> list[Line]:
    """Return the next step and its reason; after the end the certainty of the answer."""
    ended, step = search.ended, search.newest_step
    if ended is not None:
        certainty = search.answer.certainty if search.answer is not None else ""
        # The reason of a failure is at the top already.
        text = certainty or (ended.reason if search.state == "nothing_fits" else "")
        note, is_sure = "", True
        if search.answer is not None and search.answer.widths is not None:
            note, is_sure = search.answer.widths_note, search.answer.widths.has_widest
        return [*fmt.paragraph(text, width, "muted"), *fmt.paragraph(note, width, "muted" if is_sure else "warning")]
    if step is None:
        return [] if search.prediction is None else fmt.paragraph(search.prediction.basis, width, "muted")
    is_waiting = search.state in ("paused", "interrupted")
    if is_waiting and not search.is_decided:
        return [[("next: decided when the search goes on", "text")]]
    time_word = "next" if is_waiting or search.waits_for else "now"
    action = {"probe": "probe ", CONFIRM_STEP: "confirm "}.get(step.action, "")
    batch = f"{action}batch_size {step.batch_size:,}, " if step.batch_size is not None else ""
    return fmt.paragraph(f"{time_word}: {batch}{step.why}", width, "text", 3)


def _offer_lines(search: BatchSnapshot, cursor: int, width: int) -> list[Line]:
    offered = offers(search)
    if not offered:
        return []
    left_bytes = search.answer.headroom_bytes if search.answer is not None else None
    applies = f"{key_of('batch', 'apply')} applies"
    title = applies if left_bytes is None else f"{applies}; the largest leaves {fmt.size(left_bytes)} of the limit"
    lines: list[Line] = [[(title, "muted")]]
    cursor = min(cursor, len(offered) - 1)
    for index, offer in enumerate(offered):
        knobs = " ".join(f"{name}={text}" for name, text in offer.knob_texts)
        head = f"{'▸' if index == cursor else ' '} {offer.label:<12}{knobs}"
        first, *rest = fmt.wrap(offer.reason, max(MIN_REASON_CELLS, width - len(head) - 2)) or [""]
        lines.append([(head, "cursor" if index == cursor else "title"), ("  ", "text"), (first, "text")])
        if index == cursor:
            lines += [[(" " * (len(head) + 2) + line, "text")] for line in rest[: MAX_REASON_LINES - 1]]
        elif rest:
            lines[-1][-1] = (f"{first} …", "text")
    return lines


def _chart(search: BatchSnapshot, width: int, height: int) -> list[Line]:
    """Return the chart of the tightest rank: its peaks as its limit counts them, the fit and the limit."""
    fit = search.tightest_fit
    question = search.question
    limit = fit.limit_bytes if fit is not None else question.lowest_limit_bytes if question else None
    step = search.newest_step
    next_size = step.batch_size if step is not None and search.is_live else None
    points = [point for probe in search.probes if (point := _point(probe, fit, limit)) is not None]
    points += [point for run in search.confirmations if (point := _confirmed_point(run, fit)) is not None]
    if fit is None and all(probe.outcome == "oom" for probe in search.probes):
        return []
    largest = max([point.x for point in points] + [next_size or 0, 1])
    if next_size is not None and fit is not None:
        points.append(ChartPoint(next_size, int(fit.need_bytes(next_size)), "○", "accent"))
    across = max(largest + max(1, largest // 8), 2)
    return fit_chart(points, None if fit is None else fit.need_bytes, limit, across, width, height)


def _confirmed_point(confirmation: ConfirmationRun, fit: MemoryFit | None) -> ChartPoint | None:
    """Return the peak of a confirmation run that finished, drawn over the probe of its size."""
    rank_peaks = next((peaks for peaks in confirmation.ranks if fit is not None and peaks.rank == fit.rank), None)
    peak = rank_peaks.peak_allocated_bytes if rank_peaks is not None else confirmation.peak_allocated_bytes
    if confirmation.state != "finished" or peak is None:
        return None
    return ChartPoint(confirmation.batch_size, peak, CONFIRMED_SIGN, "success")


def _point(probe: Probe, fit: MemoryFit | None, limit: int | None) -> ChartPoint | None:
    outcome = outcome_of(probe.outcome)
    sign, tone = outcome.sign, outcome.tone
    if probe.outcome == "oom":
        # Only the fit knows the need of this size, which is certainly above the limit.
        needed = max(
            int(fit.need_bytes(probe.batch_size)) if fit is not None else 0, int((limit or 0) * OOM_ABOVE_LIMIT)
        )
        return ChartPoint(probe.batch_size, needed, sign, tone) if needed else None
    rank = fit.rank if fit is not None else probe.rank
    rank_peaks = next((peaks for peaks in probe.ranks if peaks.rank == rank), None)
    peak = (rank_peaks.limit_peak_bytes or rank_peaks.peak_allocated_bytes) if rank_peaks is not None else None
    peak = peak or probe.peak_allocated_bytes
    return None if peak is None else ChartPoint(probe.batch_size, peak, sign, tone)


PHASE_COLUMNS = (("forward_backward", "fwd+bwd"), ("optimizer", "optimizer"))
STEP_COLUMNS = (("step", "memory"), ("", ""))
"""Columns of a script's search: its hooks see no phases of memory."""
WIDE_CELLS: tuple[int, ...] = (8, 12, 12, 12, 12, 12)
NARROW_CELLS: tuple[int, ...] = (7, 10, 10, 10, 10, 11)
"""Cells of each column before the outcome."""
WIDE_CELLS_FROM, ALL_CELLS_FROM = 100, 76
"""Columns from which cells are wide, and below which some are left out."""


def table_lines(search: BatchSnapshot, width: int) -> list[Line]:
    """Return a title, a row for each probe and confirmation run in their order, and one for the step under way."""
    rows: list[Line] = []
    # On a CPU every step of a preset's search measures memory: its speeds rank against no others.
    sign = f"{DOUBT_SIGN} " if search.question is not None and search.question.measured_under is not None else ""
    columns = STEP_COLUMNS if any("step" in probe.phase_peaks for probe in search.probes) else PHASE_COLUMNS
    for probe in search.probes:
        rows.append(_probe_row(probe, search, columns, sign, width))
        if probe.outcome == "void" and probe.reason:
            # The person has to fix the reason, so it is shown in full.
            rows += fmt.labelled((" " * 10, "text"), probe.reason, width, "warning")
    for confirmation in search.confirmations:
        rows.append(_confirmation_row(confirmation, columns, sign, width))
        if confirmation.state not in ("finished", "oom") and confirmation.reason:
            rows += fmt.labelled((" " * 10, "text"), confirmation.reason, width, "error")
    step = search.newest_step
    if search.state in ("running", "pausing") and step is not None and step.batch_size is not None:
        verb = "probing…" if step.action == "probe" else "confirming…"
        if search.waits_for:
            verb = "waiting…"
        rows.append(_row([f"▸{step.batch_size:,}"], [(verb, "secondary")], width))
    title = ["batch", *(name for _, name in columns), "step", "samples/s", "took"]
    return [_row(title, [("outcome", "muted")], width, "muted"), *rows]


def _row(cells: Sequence[str], end: Line, width: int, tone: Tone = "text") -> Line:
    widths = WIDE_CELLS if width >= WIDE_CELLS_FROM else NARROW_CELLS
    padded = [*cells, *([""] * (len(widths) - len(cells)))]
    if width < ALL_CELLS_FROM:
        # The outcome matters more than the time.
        widths, padded = (*widths[:3], widths[4]), [*padded[:3], padded[4]]
    texts = [" " + fmt.to_width(cell, cell_width - 1, "right") for cell, cell_width in zip(padded, widths, strict=True)]
    return [("".join(texts), tone), ("  ", "text"), *end]


def _rate(samples_per_s: float | None, sign: str) -> str:
    """Return samples per second, with the sign of a speed that ranks against no other."""
    return (sign if samples_per_s is not None else "") + fmt.number(samples_per_s)


def _probe_row(probe: Probe, search: BatchSnapshot, columns: Sequence[tuple[str, str]], sign: str, width: int) -> Line:
    outcome = outcome_of(REFUTED if search.refuted_by(probe) is not None else probe.outcome)
    words = "OOM" if width < WIDE_CELLS_FROM and probe.outcome == "oom" else outcome.noun
    phase_piece = f" in {phase_words(probe.phase)}" if probe.phase and probe.outcome == "oom" else ""
    rank = ""
    if len(search.fits) > 1 and probe.rank is not None:
        rank = f", rank {probe.rank} fullest" if probe.outcome == "fits" else f" on rank {probe.rank}"
    retries = f", {counted(probe.alloc_retries, 'allocator retry', 'allocator retries')}" if probe.alloc_retries else ""
    cells = [
        f"{probe.batch_size:,}",
        *(fmt.size(probe.phase_peaks.get(key)) if key else "" for key, _ in columns),
        fmt.milliseconds(probe.step_ms),
        _rate(probe.samples_per_s, sign),
        fmt.duration(probe.seconds),
    ]
    return _row(cells, [(f"{outcome.sign} {words}{phase_piece}{rank}{retries}", outcome.tone)], width)


def _confirmation_row(confirmation: ConfirmationRun, columns: Sequence[tuple[str, str]], sign: str, width: int) -> Line:
    is_confirmed = confirmation.state == "finished"
    if is_confirmed:
        words = f"confirmed: {confirmation.run_id}" if width >= WIDE_CELLS_FROM else "confirmed"
    elif confirmation.state == "oom":
        words = "out of memory in the confirmation run"
    else:
        words = f"confirmation run {state_text(confirmation.state)}"
    optimizer_bytes = max((rank.phase_peaks.get("optimizer", 0) for rank in confirmation.ranks), default=0) or None
    cells = [
        f"{confirmation.batch_size:,}",
        fmt.size(confirmation.peak_allocated_bytes),
        fmt.size(optimizer_bytes) if columns is PHASE_COLUMNS else "",
        fmt.milliseconds(confirmation.step_ms),
        _rate(confirmation.samples_per_s, sign),
        fmt.duration(confirmation.seconds),
    ]
    return _row(cells, [(f"{'✓' if is_confirmed else '✗'} {words}", "success" if is_confirmed else "error")], width)


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer at the end of a search."""

    label: str
    knob_texts: tuple[tuple[str, str], ...]
    """Names of knobs, and their values as they are typed."""
    reason: str
    """Why to take these knobs."""


def offers(search: BatchSnapshot | None) -> tuple[Offer, ...]:
    """Return the batch sizes found, the recommended one first; if nothing fits, the changes that would help."""
    ended = search.ended if search is not None else None
    if ended is None:
        return ()
    if ended.answer is None:
        return tuple(
            Offer(f"change {index}", tuple(change.settings.items()), effect_words(change))
            for index, change in enumerate(ended.changes, 1)
        )
    answer = ended.answer
    confirmation = answer.confirmation_run_id
    is_large = (answer.aligned_batch or 0) >= LARGE_ALIGNED_FROM
    multiple = f"the largest multiple of {LARGE_ALIGNED_UNIT}" if is_large else f"a multiple of {ALIGNED_UNIT}"
    batches = [
        ("recommended", answer.recommended_batch, answer.recommended_why),
        ("aligned", answer.aligned_batch, multiple),
        ("largest", answer.max_batch, f"confirmed by {confirmation}" if confirmation else "the largest that fits"),
        ("fastest", answer.fastest_batch, f"{fmt.per_second(answer.fastest_samples_per_s, 'samples')}, of those tried"),
    ]
    return tuple(
        Offer(label, (("batch_size", str(batch)),), reason) for label, batch, reason in batches if batch is not None
    )
