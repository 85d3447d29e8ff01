"""The screen on which a batch search is asked for, started and continued; the search outlives the screen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.records.home import ANSWERED_STATES
from trainfast_runner.records.run_directory import state_text
from trainfast_runner.results.comparison import RUN_TO_RUN
from trainfast_runner.search.batch_decide import ALIGNED_UNIT, LARGE_ALIGNED_FROM, LARGE_ALIGNED_UNIT
from trainfast_runner.search.batch_journal import CONFIRM_STEP, BatchAnswer, BatchSnapshot, ConfirmationRun, Probe
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.units import counted
from trainfast_tui.charts.scatter_chart import ChartPoint, fit_chart
from trainfast_tui.control.messages import Notified
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.next_run.next_run import NextRun, has_same_settings
from trainfast_tui.next_run.sources import next_run_from_search
from trainfast_tui.panels.ask import ask_text
from trainfast_tui.panels.table_view import TablePage, TableRow, table_lines
from trainfast_tui.screens.search import SearchScreen, SearchStart
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.batch_words import batch_question_rows, limit_notice, limits_words
from trainfast_tui.text.format import DOUBT_SIGN, STRICT_MALLOC_NOTE, LabelledText, Line, Piece
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.memory_words import effect_words, phase_words
from trainfast_tui.text.search_words import REFUTED, Outcome, outcome_of, state_words


class BatchScreen(SearchScreen[BatchSnapshot]):
    """Shows the search of the next run, or its question; Enter starts the search, or applies one of its answers."""

    SCOPE = KIND = SearchKind.BATCH
    TITLE_WORDS = "largest batch"

    def __init__(self, session: Session, next_run: NextRun) -> None:
        super().__init__(session, next_run)
        self._set_next_run(next_run)

    def _set_next_run(self, next_run: NextRun) -> None:
        """Ask about this run, with the notice of its memory limit as of now."""
        machine = self.session.machine
        self._next_run = next_run
        self._limit = limit_notice(next_run.spec, machine, next_run.ranks(machine), read_host_free_bytes())

    def is_answered_by(self, search: BatchSnapshot) -> bool:
        return has_same_settings(search, self._next_run.spec) and search.state in ANSWERED_STATES

    def question_rows(self) -> list[LabelledText]:
        spec, earlier = self._next_run.spec, self.search_control.current
        is_same = earlier is not None and has_same_settings(earlier, spec)
        return batch_question_rows(spec, self._limit, earlier if is_same else None)

    def search_page(self, search: BatchSnapshot, width: int, cursor: int) -> TablePage:
        return batch_page(search, self._now_ns, width, cursor)

    def answer_run_id(self) -> str | None:
        answer = self._search.answer if self._search is not None else None
        return None if answer is None else answer.confirmation_run_id

    def useless_keys(self) -> set[str]:
        useless = set() if self._is_asking or offers(self._search) else {"apply"}
        return useless | ({"limit"} if self.search_control.is_active else set())

    def search_to_start(self) -> SearchStart:
        """Return the search to start: an answered one starts over, as it has no next step."""
        search, spec = self._search, self._next_run.spec
        if search is not None and search.question is not None and not has_same_settings(search, spec):
            # The next run has other settings by now: continue the search on the screen.
            spec = next_run_from_search(search.question).spec
        return SearchStart(spec, fresh=search is not None and search.state in ANSWERED_STATES)

    def action_apply(self) -> None:
        search = self._search
        if self._is_asking:
            self.start_search()
        elif search is not None and search.question is not None and (offered := offers(search)):
            is_applied = self.apply_knobs(search.question, offered[self.view.cursor].knob_texts)
            next_run = self.session.next_run
            if is_applied and next_run is not None and not has_same_settings(search, next_run.spec):
                words = "Applied, but the search had other knobs: this may not fit with these."
                self.session.post(Notified(words, "warning"))
        else:
            self.notify("There is no answer to apply.", severity="warning")

    def action_limit(self) -> None:
        """Ask for the memory limit of the next search, in place of a search that has ended."""
        if self.search_control.is_active:
            self.notify("A live search keeps its limit.", severity="warning")
            return

        def set_limit(text: str) -> None:
            self._set_next_run(self.session.set_next_run(self._next_run.with_value("memory_limit", text)))
            self._is_asking = True
            self.show_newest()

        entry, present_text = KNOBS_BY_NAME["memory_limit"], self._next_run.text_of("memory_limit")
        ask_text(self.app, "Memory limit of the search", entry.values.describe(), present_text, set_limit)


OOM_ABOVE_LIMIT = 1.03
"""Chosen, not measured: a size that ran out of memory is drawn at least this far above the limit, clear of its line."""
MIN_CHART_LINES = 6
"""The least lines of a useful chart."""


def batch_page(search: BatchSnapshot, now_ns: int, width: int, cursor: int) -> TablePage:
    """Return a batch search as of `now_ns` (CLOCK_MONOTONIC); after its end a cursor stands on one of the answers."""
    sign, tone = fmt.state_sign(search.state)
    head = fmt.labelled((f"{sign} ", tone), state_words(search), width, "title")
    facts = "; ".join(filter(None, (_time_words(search, now_ns), _limit_words(search))))
    head += fmt.labelled(("  ", "text"), facts, width)
    if search.prediction is not None:
        head += fmt.paragraph(search.prediction.reason, width, "warning", 2)
    # On a CPU every step of a preset's search measures memory: its speeds rank against no others.
    is_doubtful = search.question is not None and search.question.measured_under is not None
    rows = list(_rows(search, f"{DOUBT_SIGN} " if is_doubtful else ""))
    note = STRICT_MALLOC_NOTE if is_doubtful and search.probes else ""
    foot = [*fmt.paragraph(note, width, "warning"), *_reason_lines(search, width)]
    offered = offers(search)
    if offered:
        left_bytes = search.answer.headroom_bytes if search.answer is not None else None
        applies = f"{key_of('batch', 'apply')} applies"
        leaves = "" if left_bytes is None else f"; the largest leaves {fmt.size(left_bytes)} of the limit"
        foot.append([(applies + leaves, "muted")])
    for index, offer in enumerate(offered):
        knobs = " ".join(f"{name}={text}" for name, text in offer.knob_texts)
        is_current = index == min(cursor, len(offered) - 1)
        label: Piece = (f"{'▸' if is_current else ' '} {offer.label:<12}{knobs}", "cursor" if is_current else "title")
        first, *rest = fmt.labelled(("  ", "text"), offer.reason, width - fmt.line_length([label]))
        indent: Piece = (" " * fmt.line_length([label]), "text")
        foot += [[label, *first], *([indent, *line] for line in rest)]
    table = table_lines(BATCH_HEADER, rows, width, dropped=("took", "step"))
    return TablePage(head, table if rows else (), foot, len(offered), partial(_chart, search))


def _time_words(search: BatchSnapshot, now_ns: int) -> str:
    """Return the elapsed time of the step under way, or the total time of an ended search."""
    if search.ended is not None:
        return f"took {fmt.duration(search.ended.seconds)}"
    return fmt.elapsed(search.since_ns, now_ns) if search.is_live and search.state != "paused" else ""


def _limit_words(search: BatchSnapshot) -> str:
    """Return the limits of the ranks; empty before they are known."""
    question, fit = search.question, search.tightest_fit
    limits = question.limits_bytes if question is not None else []
    if not limits and fit is not None:
        limits = [fit.limit_bytes]
    tightest = f", the tightest is rank {fit.rank}" if fit is not None and len(search.fits) > 1 else ""
    source = f" ({question.limit_words})" if question is not None and question.limit_words else ""
    return f"limit {limits_words(limits)}{tightest}{source}" if limits else ""


def _reason_lines(search: BatchSnapshot, width: int) -> list[Line]:
    """Return the next step and its reason; after the end the certainty of the answer."""
    ended, step = search.ended, search.newest_step
    if ended is not None:
        answer = search.answer
        if answer is None:
            # The reason of a failure is at the top already.
            return fmt.paragraph(ended.reason if search.state == "nothing_fits" else "", width, "muted")
        is_sure = answer.widths is None or answer.widths.has_widest
        widths_note = fmt.paragraph(answer.widths_note, width, "muted" if is_sure else "warning")
        return [*fmt.paragraph(answer.certainty, width, "muted"), *widths_note]
    if step is None:
        return [] if search.prediction is None else fmt.paragraph(search.prediction.basis, width, "muted")
    is_waiting = search.state in ("paused", "interrupted")
    if is_waiting and not search.is_decided:
        return [[("next: decided when the search goes on", "text")]]
    time_word = "next" if is_waiting or search.waits_for else "now"
    action = {"probe": "probe ", CONFIRM_STEP: "confirm "}.get(step.action, "")
    batch = f"{action}batch_size {step.batch_size:,}, " if step.batch_size is not None else ""
    return fmt.paragraph(f"{time_word}: {batch}{step.why}", width, "text", 3)


def _attempts(search: BatchSnapshot) -> tuple[Probe | ConfirmationRun, ...]:
    return (*search.probes, *search.confirmations)


def _chart(search: BatchSnapshot, width: int, height: int) -> list[Line]:
    """Return the chart of the tightest rank: its peaks as its limit counts them, the fit and the limit."""
    fit, question, step = search.tightest_fit, search.question, search.newest_step
    if height < MIN_CHART_LINES or (fit is None and all(probe.outcome == "oom" for probe in search.probes)):
        return []
    limit = fit.limit_bytes if fit is not None else question.lowest_limit_bytes if question else None
    points = []
    for attempt in _attempts(search):
        if needed := _charted_bytes(attempt, search, limit):
            outcome = outcome_of("confirmed" if isinstance(attempt, ConfirmationRun) else attempt.outcome)
            points.append(ChartPoint(attempt.batch_size, needed, outcome.sign, outcome.tone))
    next_size = step.batch_size if step is not None and search.is_live else None
    if next_size is not None and fit is not None:
        points.append(ChartPoint(next_size, int(fit.need_bytes(next_size)), "○", "accent"))
    largest = max([point.x for point in points] + [next_size or 0, 1])
    across = max(largest + max(1, largest // 8), 2)
    return fit_chart(points, None if fit is None else fit.need_bytes, limit, across, width, height)


def _charted_bytes(attempt: Probe | ConfirmationRun, search: BatchSnapshot, limit: int | None) -> int | None:
    """Return the peak of the fit's rank; for a probe out of memory the need by the fit, certainly above the limit."""
    fit = search.tightest_fit
    if isinstance(attempt, Probe) and attempt.outcome == "oom":
        needed = int(fit.need_bytes(attempt.batch_size)) if fit is not None else 0
        return max(needed, int((limit or 0) * OOM_ABOVE_LIMIT))
    if isinstance(attempt, ConfirmationRun) and attempt.state != "finished":
        return None
    rank = fit.rank if fit is not None else None
    peaks = next((peaks for peaks in attempt.ranks if peaks.rank == rank), None)
    return (search.counted_bytes(peaks) if peaks is not None else None) or attempt.peak_allocated_bytes


NEEDS_NO_REASON = ("fits", "finished", "oom")
BATCH_HEADER = (*fmt.figure_headings("batch", "memory", "step", "samples/s", "took"), "outcome")


def _rows(search: BatchSnapshot, rate_sign: str) -> Iterator[TableRow]:
    """Yield a row for each probe and confirmation run in their order, and one for the step under way.

    `rate_sign` stands at each speed.
    """
    for attempt in _attempts(search):
        outcome, words = _outcome(attempt, search)
        end = attempt.outcome if isinstance(attempt, Probe) else attempt.state
        rate = fmt.number(attempt.samples_per_s)
        cells = (
            f"{attempt.batch_size:,}",
            fmt.size(None if end == "oom" else attempt.peak_allocated_bytes),
            fmt.milliseconds(attempt.step_ms),
            rate if attempt.samples_per_s is None else rate_sign + rate,
            fmt.duration(attempt.seconds),
            words,
        )
        yield TableRow((outcome.sign, outcome.tone), cells, attempt.reason if end not in NEEDS_NO_REASON else "")
    step = search.newest_step
    if search.state in ("running", "pausing") and step is not None and step.batch_size is not None:
        verb = "waiting…" if search.waits_for else "probing…" if step.action == "probe" else "confirming…"
        yield TableRow(("▸", "accent"), (f"{step.batch_size:,}", "", "", "", "", verb))


def _outcome(attempt: Probe | ConfirmationRun, search: BatchSnapshot) -> tuple[Outcome, str]:
    """Return the outcome of a probe or a confirmation run, and its words in the table."""
    if isinstance(attempt, ConfirmationRun):
        outcome = outcome_of({"finished": "confirmed", "oom": "refuting"}.get(attempt.state, "failed"))
        return outcome, outcome.noun if outcome.noun != "failed" else f"confirmation run {state_text(attempt.state)}"
    outcome = outcome_of(REFUTED if search.refuted_by(attempt) is not None else attempt.outcome)
    phase = f" in {phase_words(attempt.phase)}" if attempt.phase and attempt.outcome == "oom" else ""
    rank = ""
    if len(search.fits) > 1 and attempt.rank is not None:
        rank = f", rank {attempt.rank} fullest" if attempt.outcome == "fits" else f" on rank {attempt.rank}"
    retried = attempt.alloc_retries
    retries = f", {counted(retried, 'allocator retry', 'allocator retries')}" if retried else ""
    return outcome, f"{outcome.noun}{phase}{rank}{retries}"


def _flat_from(search: BatchSnapshot, answer: BatchAnswer) -> tuple[int | None, str]:
    """Return the smallest tried size that is as fast as the largest, and the memory that it spares; None without one.

    There is none on a CPU, where the speeds of a search do not rank.
    """
    fit, largest = search.tightest_fit, answer.max_batch
    least = (answer.samples_per_s or 0.0) * (1 - RUN_TO_RUN)
    sizes = [
        run.batch_size for run in _attempts(search) if run.batch_size < largest and (run.samples_per_s or 0) >= least
    ]
    if answer.fastest_batch is None or fit is None or not least or not sizes:
        return None, ""
    spared_bytes = (answer.headroom_bytes or 0) + fit.need_bytes(largest) - fit.need_bytes(min(sizes))
    return min(sizes), f"as fast as {largest:,}, with {fmt.size(spared_bytes)} to spare"


class Offer(NamedTuple):
    """An offer at the end of a search."""

    label: str
    knob_texts: tuple[tuple[str, str], ...]
    """Names of knobs, and their values as they are typed."""
    reason: str
    """Why to take these knobs."""


def offers(search: BatchSnapshot | None) -> tuple[Offer, ...]:
    """Return the batch sizes found, the recommended one first; if nothing fits, the changes that would help."""
    ended = search.ended if search is not None else None
    if search is None or ended is None:
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
        ("flat from", *_flat_from(search, answer)),
        ("aligned", answer.aligned_batch, multiple),
        ("largest", answer.max_batch, "confirmed in a fresh process" if confirmation else "the largest that fits"),
        ("fastest", answer.fastest_batch, f"{fmt.per_second(answer.fastest_samples_per_s, 'samples')}, of those tried"),
    ]
    return tuple(
        Offer(label, (("batch_size", str(batch)),), reason) for label, batch, reason in batches if batch is not None
    )
