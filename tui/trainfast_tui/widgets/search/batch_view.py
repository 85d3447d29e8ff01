"""A batch search: a row for each probe, the fit against the limit, the next step and its reason."""

from __future__ import annotations

from trainfast_runner.search.batch.batch_follower import BatchSnapshot
from trainfast_runner.search.journal.batch import CONFIRM_STEP, ConfirmationRun, Probe
from trainfast_runner.search.journal.fitted_memory import MemoryFit
from trainfast_tui.charts.fit_chart import PeakPoint, fit_chart
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.lines import Line, Piece, labelled, line_length, moved_cursor, paragraph, wrap
from trainfast_tui.text.search.batch_question import limits_words
from trainfast_tui.text.search.batch_state import batch_search_words
from trainfast_tui.text.search.outcomes import outcome_of
from trainfast_tui.text.signs import DOUBT_SIGN, STRICT_MALLOC_NOTE, search_sign
from trainfast_tui.widgets.search.batch_lines import table_lines
from trainfast_tui.widgets.search.batch_offers import Offer, offers
from trainfast_tui.widgets.search.search_view import SearchView

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
            self._cursor = moved_cursor(self._cursor, by, len(offered))
            self.repaint()
        else:
            self.scroll_lines(by)

    def search_lines(self, search: BatchSnapshot, notice: list[Line], width: int, height: int) -> list[Line]:
        name = search.question.name if search.question is not None else self._spec_name
        head = [self.title_line(name, width), *_state_lines(search, self._now_ns, width)]
        table = table_lines(search, width)
        foot = [*_next_lines(search, width), *_offer_lines(search, self._cursor, width)]
        if any(DOUBT_SIGN in text for line in table for text, _ in line):
            foot = [[(STRICT_MALLOC_NOTE, "warning")], *foot]
        foot += [[], *notice] if notice else []
        foot = [[], *foot] if foot else []
        room = height - len(head) - 1 - len(foot)
        table, hidden = self.scrolled_table(table, room)
        room -= len(table) + 1
        chart = _chart(search, width, min(MAX_CHART_LINES, room)) if room >= MIN_CHART_LINES else []
        return [*head, hidden, *table, *([[], *chart] if chart else []), *foot]


def _state_lines(search: BatchSnapshot, now_ns: int, width: int) -> list[Line]:
    """Return the state of the search and its time, the limit, and why there is no prediction."""
    sign, tone = search_sign(search.state)
    lines = labelled((f"{sign} ", tone), batch_search_words(search), width, "title")
    time: Piece = (f"  {_time_words(search, now_ns)}", "muted")
    last_with_time = [*lines[-1], time]
    lines = [*lines[:-1], last_with_time] if line_length(last_with_time) <= width else [*lines, [time]]
    lines += [line] if (line := _limit_line(search)) else []
    if search.prediction is not None and search.prediction.reason:
        lines += paragraph(search.prediction.reason, width, "warning", 2)
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
    if fit is not None and len(search.memory_fits) > 1:
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
        return [*paragraph(text, width, "muted"), *paragraph(note, width, "muted" if is_sure else "warning")]
    if step is None:
        return [] if search.prediction is None else paragraph(search.prediction.basis, width, "muted")
    is_waiting = search.state in ("paused", "interrupted")
    if is_waiting and not search.is_decided:
        return [[("next: decided when the search goes on", "text")]]
    time_word = "next" if is_waiting or search.waits_for else "now"
    action = {"probe": "probe ", CONFIRM_STEP: "confirm "}.get(step.action, "")
    batch = f"{action}batch_size {step.batch_size:,}, " if step.batch_size is not None else ""
    return paragraph(f"{time_word}: {batch}{step.why}", width, "text", 3)


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
        first, *rest = wrap(offer.reason, max(MIN_REASON_CELLS, width - len(head) - 2)) or [""]
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
    largest = max([point.batch_size for point in points] + [next_size or 0, 1])
    if next_size is not None and fit is not None:
        points.append(PeakPoint(next_size, int(fit.need_bytes(next_size)), "○", "accent"))
    across = max(largest + max(1, largest // 8), 2)
    return fit_chart(points, None if fit is None else fit.need_bytes, limit, across, width, height)


def _confirmed_point(confirmation: ConfirmationRun, fit: MemoryFit | None) -> PeakPoint | None:
    """Return the peak of a confirmation run that finished, drawn over the probe of its size."""
    rank_peaks = next((peaks for peaks in confirmation.ranks if fit is not None and peaks.rank == fit.rank), None)
    peak = rank_peaks.peak_allocated_bytes if rank_peaks is not None else confirmation.peak_allocated_bytes
    if confirmation.state != "finished" or peak is None:
        return None
    return PeakPoint(confirmation.batch_size, peak, CONFIRMED_SIGN, "success")


def _point(probe: Probe, fit: MemoryFit | None, limit: int | None) -> PeakPoint | None:
    outcome = outcome_of(probe.outcome)
    sign, tone = outcome.sign, outcome.tone
    if probe.outcome == "oom":
        # Only the fit knows the need of this size, which is certainly above the limit.
        needed = max(
            int(fit.need_bytes(probe.batch_size)) if fit is not None else 0, int((limit or 0) * OOM_ABOVE_LIMIT)
        )
        return PeakPoint(probe.batch_size, needed, sign, tone) if needed else None
    rank = fit.rank if fit is not None else probe.rank
    rank_peaks = next((peaks for peaks in probe.ranks if peaks.rank == rank), None)
    peak = (rank_peaks.limit_peak_bytes or rank_peaks.peak_allocated_bytes) if rank_peaks is not None else None
    peak = peak or probe.peak_allocated_bytes
    return None if peak is None else PeakPoint(probe.batch_size, peak, sign, tone)
