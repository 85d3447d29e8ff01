"""Plan, start and order best-fit searches for the session. Every call returns at once; its result is posted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.settings.spec import RunSpec, spec_of_record
from trainfast_tui.control.background import in_background
from trainfast_tui.control.messages import BestPlanned, Post, SearchRefused, SearchStarted
from trainfast_tui.control.search_control import SearchConductors
from trainfast_tui.text.search_kind import SearchKind

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot
    from trainfast_runner.search.best.journal import BestQuestion


class BestControl(SearchConductors["BestSnapshot"]):
    """Best-fit searches."""

    def words(self, search: BestSnapshot) -> str:
        """Describe the state of a search."""
        from trainfast_tui.text.best_state import state_of

        return state_of(search)

    def plan(self, spec: RunSpec, post: Post) -> None:
        """Find out how a search of `spec` would go; `post` gets BestPlanned."""

        def refused(error: UserError) -> BestPlanned:
            return BestPlanned(spec, [(f"Refused: {error.line()}", "error")])

        in_background("plan", partial(self._plan, spec), post, refused)

    def start(self, spec: RunSpec, cool_to_c: float | None, first: Callable[[], None] | None = None) -> None:
        """Start a search of `spec`, or continue its unfinished one, after `first` is done: posts SearchStarted or
        SearchRefused.

        With `cool_to_c` each of its processes waits until its GPUs are below that temperature in degrees Celsius.
        """
        self._begin(partial(self._start, spec, None, cool_to_c, first))

    def go_on(self, question: BestQuestion, cool_to_c: float | None, first: Callable[[], None] | None = None) -> None:
        """Continue the search of this question, after `first` is done: posts SearchStarted or SearchRefused."""
        self._begin(partial(self._start, spec_of_record(question), question, cool_to_c, first))

    def order(self, directory: Path, do: str, name: str, value: str | None = None) -> None:
        """Order a live search to skip or pin a value of a knob, or to unpin the knob."""
        in_background("order", partial(self._order, directory, do, name, value), self._post)

    def _begin(self, start: Callable[[], SearchStarted]) -> None:
        self.note_starting()
        in_background("search", start, self._post, lambda error: SearchRefused(error, SearchKind.BEST))

    def _plan(self, spec: RunSpec) -> BestPlanned:
        from trainfast_runner.search.best.asked import BestAsked
        from trainfast_runner.search.best.estimate import estimate
        from trainfast_runner.search.best.opening import BestOptions, plan_best
        from trainfast_tui.text.best_search import estimate_lines

        found = estimate(plan_best(spec, BestAsked(), BestOptions(), self._python), self._home)
        lines = estimate_lines(dataclasses.asdict(found))
        # The smallest screen may have no room for the knobs left alone: they come last.
        left = [line for line in lines if line.startswith("left alone")]
        return BestPlanned(
            spec, [*((line, "text") for line in lines if line not in left), *((line, "muted") for line in left)]
        )

    def _start(
        self, spec: RunSpec, question: BestQuestion | None, cool_to_c: float | None, first: Callable[[], None] | None
    ) -> SearchStarted:
        from trainfast_runner.search.best.asked import BestAsked
        from trainfast_runner.search.control import resume, start_search

        if first is not None:
            first()
        asked = BestAsked()
        if question is not None:
            asked = BestAsked(
                vary=question.vary,
                global_batch=question.global_batch,
                objective=question.objective,
                for_steps=question.for_steps,
                budget_s=question.budget_s,
            )
        directory = start_search(spec, self._home, self._python, cool_to_c=cool_to_c, best=asked)
        # A pause of the conductor before is over.
        resume(directory)
        return SearchStarted(directory, SearchKind.BEST)

    @staticmethod
    def _order(directory: Path, do: str, name: str, value: str | None) -> None:
        from trainfast_runner.search.best.orders import give_order

        give_order(directory, do, name, value)
