"""Start, pause and end searches for the session. Every call returns at once; its result is posted."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic

import msgspec
from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import PAUSE_STATES, Home
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import counted
from trainfast_tui.control import messages
from trainfast_tui.control.run_control import PendingStart
from trainfast_tui.control.threads import CancellableWork, start_thread
from trainfast_tui.live.snapshot import SearchKind, SearchSnapshotT, Snapshot
from trainfast_tui.text.format import Piece, plain

if TYPE_CHECKING:
    from trainfast_runner.search.batch_journal import BatchSnapshot
    from trainfast_runner.search.best.answer import BestSnapshot
    from trainfast_runner.search.best_journal import BestQuestion, BestRequest
    from trainfast_runner.settings.knob_values import KnobValue


NOT_LIVE = messages.Notified("There is no live search.", "warning")
STILL_STARTING = messages.Notified("The search is starting; press the key again once it runs.", "warning")


class SearchControl(ABC, Generic[SearchSnapshotT]):
    """Talks to the conductors of one kind of search, which outlive the app."""

    KIND: ClassVar[SearchKind]

    def __init__(self, home: Home, post: messages.Post, python: messages.TrainingPython) -> None:
        self._home = home
        self._post = post
        self._python = python
        self._snapshot: SearchSnapshotT | None = None
        """The newest snapshot of the followed search, also while another one is starting."""
        self._unended_directory: Path | None = None
        """The search that was started here or was live, until its end is posted."""
        self._pending = PendingStart()
        """The search that was started here, until the reader shows it."""
        # The fields below are about the newest start: each `start` sets all of them anew.
        self.requested_ns: int | None = None
        """CLOCK_MONOTONIC at which the search was started."""
        self._seen_before_start: SearchSnapshotT | None = None
        """The followed search when the start began; a continued search may be seen as it was then."""
        self._stop_when_seen = False
        """True if the search is to be stopped as soon as the reader shows it; counts only while it is pending."""
        self._dismissed_directory: Path | None = None
        """The ended search that was followed when the start was refused; else None."""

    @property
    def current(self) -> SearchSnapshotT | None:
        """The newest snapshot of the followed search; None while another one is starting or after it was refused."""
        search = self._snapshot
        is_outdated = search is None or self._pending.is_pending or search.directory == self._dismissed_directory
        return None if is_outdated else search

    @property
    def is_starting(self) -> bool:
        """True from a search's start until it is seen or refused."""
        return self._pending.is_pending

    @property
    def is_active(self) -> bool:
        """True while a search works, and from its start until it is seen or refused."""
        return self._pending.is_pending or (self._snapshot is not None and self._snapshot.is_live)

    def badge(self, now_ns: int) -> str:
        """Return a few words on the active search: `● best fit 3/6 · 1:12 left`."""
        search = self.current
        return f"● {self.KIND.label.replace('-', ' ')} " + (
            "starting" if search is None else self._progress(search, now_ns)
        )

    @abstractmethod
    def _progress(self, search: SearchSnapshotT, now_ns: int) -> str:
        """Return how far a live search has come."""

    def note_started(self, directory: Path) -> None:
        """Record that the started search holds its lock; the reader may still show the search before."""
        self._pending.note_started(directory)
        self._unended_directory = directory

    def note_refused(self) -> None:
        """Record that the search to be started was refused."""
        self._pending.note_refused()
        search = self._snapshot
        self._dismissed_directory = search.directory if search is not None and not search.is_live else None

    def note_seen(self, search: SearchSnapshotT | None) -> list[messages.Notified]:
        """Record the search that the reader shows; return the notice that it was started elsewhere or has ended.

        A search that was to be stopped as soon as it started is stopped.
        """
        before, self._snapshot = self._snapshot, search
        if search is None:
            return []
        is_new = before is None or before.directory != search.directory
        was_pending = self._pending.is_pending
        is_started_here = self._pending.note_seen(search.directory)
        if is_started_here and self._stop_when_seen:
            # Not `stop`: this snapshot may be older than the lock of a continued search.
            start_thread("cancel", partial(self._cancel, search.directory), self._post)
        if search.is_live:
            self._unended_directory = search.directory
            if is_new and not was_pending:
                return [messages.Notified(f"A {self.KIND.label} search is live; {self.KIND.key} shows it.")]
        elif search.directory == self._unended_directory and search != self._seen_before_start:
            self._unended_directory = None
            words = f"The search has ended: {self._describe(search)}. {self.KIND.key} shows it."
            return [messages.Notified(words, except_on=self.KIND)]
        return []

    @abstractmethod
    def _describe(self, search: SearchSnapshotT) -> str:
        """Return the state of a search in words."""

    def start(self, spec: RunSpec, *, fresh: bool = False, stop_run_first: Callable[[], None] | None = None) -> None:
        """Start a search of `spec`, or unless `fresh` continue its unfinished one, once `stop_run_first` is done.

        Posts SearchStarted or SearchRefused.
        """
        self._pending.begin()
        self.requested_ns, self._seen_before_start = time.monotonic_ns(), self._snapshot
        self._stop_when_seen, self._dismissed_directory = False, None
        start = partial(self._start, spec, fresh, self._best_request(), stop_run_first)
        start_thread("search", start, self._post, lambda error: messages.SearchRefused(error, self.KIND))

    def _start(
        self, spec: RunSpec, fresh: bool, best: BestRequest | None, stop_run_first: Callable[[], None] | None
    ) -> messages.SearchStarted:
        from trainfast_runner.search.control import start_search

        if stop_run_first is not None:
            stop_run_first()
        return messages.SearchStarted(start_search(spec, self._home, self._python, fresh=fresh, best=best), self.KIND)

    def _best_request(self) -> BestRequest | None:
        """Return the question of a best-fit search as it is asked for now; None for a batch search."""
        return None

    def toggle_pause(self) -> messages.Notified:
        """Pause the live search after its present step, or resume it.

        Return the notice to show, empty if the search was paused or resumed.
        """
        from trainfast_runner.search.control import pause, resume

        search = self.current
        if search is None or not search.is_live:
            return self.no_search_notice()
        toggle = resume if search.state in PAUSE_STATES else pause
        start_thread("pause", partial(toggle, search.directory), self._post)
        return messages.Notified("")

    def no_search_notice(self) -> messages.Notified:
        """Return the notice that no search is live, or that one is starting."""
        return STILL_STARTING if self._pending.is_pending else NOT_LIVE

    def stop(self) -> messages.Notified:
        """End the live search, or a starting search as soon as the reader shows it; return the notice to show."""
        if self._pending.is_pending:
            # A search cannot be ended before it holds its lock.
            self._stop_when_seen = True
            return messages.Notified("Stopping as soon as the search has started…", "warning")
        search = self.current
        if search is None or not search.is_live:
            return NOT_LIVE
        start_thread("cancel", partial(self._cancel, search.directory), self._post)
        return messages.Notified("Stopping: the running process is ended, the journal is kept…", "warning")

    @staticmethod
    def _cancel(directory: Path) -> messages.Notified | None:
        from trainfast_runner.search.control import cancel

        return None if cancel(directory) else messages.Notified("The search has already ended.", "warning")


class Searches:
    """The controls of both kinds of search."""

    def __init__(self, home: Home, post: messages.Post, python: messages.TrainingPython) -> None:
        self.batch = BatchControl(home, post, python)
        self.best = BestControl(home, post, python)

    def of(self, kind: SearchKind) -> BestControl | BatchControl:
        """Return the control of this kind of search."""
        return self.best if kind is SearchKind.BEST else self.batch

    @property
    def running_kind(self) -> SearchKind | None:
        """The kind of the search that uses the device; None without one."""
        return next((kind for kind in SearchKind if self.of(kind).is_active), None)

    def note_snapshot(self, snapshot: Snapshot) -> list[messages.Notified]:
        """Note the followed search of each kind, and return the notices about them."""
        return [*self.batch.note_seen(snapshot.batch_search), *self.best.note_seen(snapshot.best_search)]

    def badge(self, now_ns: int) -> str:
        """Return a few words on the search that is going on, for every screen; empty without one."""
        kind = self.running_kind
        return "" if kind is None else self.of(kind).badge(now_ns)


class BatchControl(SearchControl["BatchSnapshot"]):
    """Batch searches."""

    KIND = SearchKind.BATCH

    def _describe(self, search: BatchSnapshot) -> str:
        from trainfast_tui.text.batch_words import batch_search_words

        return batch_search_words(search)

    def _progress(self, search: BatchSnapshot, now_ns: int) -> str:
        probes = counted(len(search.probes), "probe")
        return f"{probes} · {search.state}" if search.state != "running" else probes


class BestOptions(msgspec.Struct, frozen=True):
    """The options of the next search."""

    request: BestRequest | None = None
    """The options typed; None for the defaults."""
    is_fresh: bool = False
    """True if the search ignores earlier ones: it continues no unfinished one and uses no measured effects."""


class BestPlanned(messages.Message, frozen=True):
    """The plan of a best-fit search, in paragraphs with their tones."""

    options: BestOptions
    """The search that was planned."""
    texts: list[Piece]
    vary: Mapping[str, Sequence[KnobValue]] = msgspec.field(default_factory=dict)
    """The varied values; empty if the search is refused."""
    global_batch: int | None = None


class BestControl(SearchControl["BestSnapshot"]):
    """Best-fit searches."""

    KIND = SearchKind.BEST

    def __init__(self, home: Home, post: messages.Post, python: messages.TrainingPython) -> None:
        super().__init__(home, post, python)
        self.options = BestOptions()
        """The next search."""
        self._planning = CancellableWork("plan")

    def _describe(self, search: BestSnapshot) -> str:
        from trainfast_tui.text.best_words import best_search_words

        return best_search_words(search)

    def _progress(self, search: BestSnapshot, now_ns: int) -> str:
        so_far = search.so_far
        tried = len({attempt.candidate_number for attempt in so_far.attempts})
        words = f"{tried}/{len(so_far.candidates)} · " if so_far.candidates else ""
        if search.state != "running" or so_far.question is None:
            return f"{words}{search.state}"
        minutes, seconds = divmod(round(max(0.0, so_far.question.budget_s - so_far.spent_s(now_ns))), 60)
        return f"{words}{minutes}:{seconds:02} left"

    def plan(self, spec: RunSpec, post: messages.Post) -> None:
        """Plan a search of `spec` with the present options, giving up an earlier plan; `post` gets BestPlanned."""
        options = self.options

        def refusal(error: UserError) -> BestPlanned:
            return BestPlanned(options, [(f"Refused: {error.line_without_option()}", "error")])

        self._planning.start(partial(self._plan, spec, options), post, refusal)

    def give_up_plan(self) -> None:
        """Post no plan any more."""
        self._planning.cancel()

    def note_started(self, directory: Path) -> None:
        """Record that the started search holds its lock; the next one is not fresh again."""
        super().note_started(directory)
        self.options = replace(self.options, is_fresh=False)

    @property
    def request(self) -> BestRequest:
        """The next search's request; the default before one is typed."""
        from trainfast_runner.search.best_journal import BestRequest

        return self.options.request or BestRequest()

    def _best_request(self) -> BestRequest:
        return self.request

    def _plan(self, spec: RunSpec, options: BestOptions, cancelled: threading.Event) -> BestPlanned | None:
        from trainfast_runner.search.best.question import plan_spec_best
        from trainfast_runner.search.best_journal import BestRequest
        from trainfast_tui.text.best_words import NAMED_BY_KEYS, estimate_lines, left_alone_lines, varied_line

        plan = plan_spec_best(spec, options.request or BestRequest(), self._python)
        question = plan.question
        if cancelled.is_set():
            return None
        lines = [varied_line(question.vary, question.global_batch), *estimate_lines(plan)]
        texts: list[Piece] = [(plain(line), "text") for line in lines]
        # The smallest screen may have no room for the knobs left alone: they come last.
        texts += [(plain(line), "muted") for line in left_alone_lines(question.left_alone, to_name=NAMED_BY_KEYS)]
        return BestPlanned(options, texts, question.vary, question.global_batch)


def request_of(question: BestQuestion) -> BestRequest:
    """Return the request that would ask this question again."""
    from trainfast_runner.search.best_journal import BestRequest

    return BestRequest(
        vary=question.vary,
        global_batch=question.global_batch,
        objective=question.objective,
        for_steps=question.for_steps,
        budget_s=question.budget_s,
    )
