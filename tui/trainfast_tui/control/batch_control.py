"""Start batch searches for the session. Every call returns at once; its result is posted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control.search_control import SearchControl
from trainfast_tui.live.search_kind import SearchKind

if TYPE_CHECKING:
    from trainfast_runner.search.batch.batch_follower import BatchSnapshot


class BatchControl(SearchControl["BatchSnapshot"]):
    """Batch searches."""

    KIND = SearchKind.BATCH

    def _describe(self, search: BatchSnapshot) -> str:
        from trainfast_tui.text.search.batch_state import batch_search_words

        return batch_search_words(search)

    def _starter(self, spec: RunSpec, *, fresh: bool) -> Callable[[], Path]:
        def start() -> Path:
            from trainfast_runner.search.control import start_search

            return start_search(spec, self._home, self._python, fresh=fresh)

        return start
