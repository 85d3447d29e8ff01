"""Plan and start best-fit searches for the session. Every call returns at once; its result is posted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control.messages import Post, ScreenMessage, TrainingPython
from trainfast_tui.control.search_control import SearchControl
from trainfast_tui.control.threads import start_thread
from trainfast_tui.live.search_kind import SearchKind
from trainfast_tui.text.format import plain
from trainfast_tui.text.lines import Piece

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot
    from trainfast_runner.search.best.planning.request import BestRequest
    from trainfast_runner.search.journal.best import BestQuestion
    from trainfast_runner.settings.knob_values import KnobValue


class BestOptions(msgspec.Struct, frozen=True):
    """The options of the next search."""

    request: BestRequest | None = None
    """The options typed; None for the defaults."""
    is_fresh: bool = False
    """True if the search ignores earlier ones: it continues no unfinished one and uses no measured effects."""


class BestPlanned(ScreenMessage, frozen=True):
    """The plan of a best-fit search, in paragraphs with their tones."""

    plan_id: int
    """The number that `BestControl.plan` gave this plan."""
    texts: list[Piece]
    vary: Mapping[str, Sequence[KnobValue]] = msgspec.field(default_factory=dict)
    """The varied values; empty if the search is refused."""
    global_batch: int | None = None


class BestControl(SearchControl["BestSnapshot"]):
    """Best-fit searches."""

    KIND = SearchKind.BEST

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        super().__init__(home, post, python)
        self.options = BestOptions()
        """The next search."""
        self._plan_id = 0

    def _describe(self, search: BestSnapshot) -> str:
        from trainfast_tui.text.search.best_state import best_search_words

        return best_search_words(search)

    def plan(self, spec: RunSpec, post: Post) -> int:
        """Plan a search of `spec` and return the plan's number, with which `post` gets BestPlanned."""
        self._plan_id += 1
        plan_id = self._plan_id

        def refusal(error: UserError) -> BestPlanned:
            return BestPlanned(plan_id, [(f"Refused: {error.line_without_option()}", "error")])

        start_thread("plan", partial(self._plan, spec, self.options, plan_id), post, refusal)
        return plan_id

    def note_started(self, directory: Path) -> None:
        """Record that the started search holds its lock; the next one is not fresh again."""
        super().note_started(directory)
        self.options = replace(self.options, is_fresh=False)

    @property
    def request(self) -> BestRequest:
        """The next search's request; the default before one is typed."""
        from trainfast_runner.search.best.planning.request import BestRequest

        return self.options.request or BestRequest()

    def _starter(self, spec: RunSpec, *, fresh: bool) -> Callable[[], Path]:
        request = self.request

        def start() -> Path:
            from trainfast_runner.search.control import start_search

            return start_search(spec, self._home, self._python, fresh=fresh, best=request)

        return start

    def _plan(self, spec: RunSpec, options: BestOptions, plan_id: int) -> BestPlanned:
        from trainfast_runner.search.best.planning.estimate import estimate
        from trainfast_runner.search.best.planning.plan_preset import plan_spec_best
        from trainfast_runner.search.best.planning.request import BestRequest
        from trainfast_runner.search.options import SearchOptions
        from trainfast_tui.text.search.best_question import NAMED_BY_KEYS, estimate_lines, left_alone_lines, varied_line

        search_options = SearchOptions(fresh=options.is_fresh)
        plan = plan_spec_best(spec, options.request or BestRequest(), search_options, self._python)
        best_estimate = estimate(plan, self._home, search_options)
        lines = [varied_line(best_estimate.vary, best_estimate.global_batch), *estimate_lines(best_estimate)]
        texts: list[Piece] = [(plain(line), "text") for line in lines]
        # The smallest screen may have no room for the knobs left alone: they come last.
        texts += [(plain(line), "muted") for line in left_alone_lines(best_estimate.left_alone, to_name=NAMED_BY_KEYS)]
        return BestPlanned(plan_id, texts, best_estimate.vary, best_estimate.global_batch)


def request_of(question: BestQuestion) -> BestRequest:
    """Return the request that would ask this question again."""
    from trainfast_runner.search.best.planning.request import BestRequest

    return BestRequest(
        vary=question.vary,
        global_batch=question.global_batch,
        objective=question.objective,
        for_steps=question.for_steps,
        budget_s=question.budget_s,
    )
