"""After a run out of memory: trace in a thread which changes would fit, while nothing is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import WARM_ROLES
from trainfast_tui.control.background import CancellableWork
from trainfast_tui.control.messages import OomExplained, Post
from trainfast_tui.text.oom import out_of_memory

if TYPE_CHECKING:
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.records.result import OomExplanation
    from trainfast_runner.results.explained_run import OutOfMemory
    from trainfast_runner.running.follower import RunSnapshot


class OomExplainer:
    """Posts `OomExplained` each time more is known. `python` trains, None for the run's own; `tracer` traces."""

    def __init__(
        self,
        post: Post,
        python: str | None = None,
        tracer: Callable[[], WarmTracer | None] = lambda: None,
    ) -> None:
        self._post = post
        self._tracer = tracer
        self._python = python
        self._explained_run_id: str | None = None
        self._newest: OomExplained | None = None
        self._work = CancellableWork("explain")

    def about(self, run: RunSnapshot) -> OomExplained | None:
        """Return the newest explanation of this run; None before it is posted."""
        return self._newest if self._newest is not None and self._newest.run_id == run.run_id else None

    def explain_if_oom(self, run: RunSnapshot | None, *, may_trace: bool) -> None:
        """Explain this run if it ran out of memory; give up the trace under way if it may not go on.

        Nothing is traced for a search's warm process, which needs no change, and for a script, which has no model here.
        """
        is_oom = (
            run is not None
            and run.state == "oom"
            and run.run_file is not None
            and run.run_file.role not in WARM_ROLES
            and run.run_file.script is None
        )
        if not may_trace or not is_oom:
            self.cancel()
        elif run is not None and run.run_id != self._explained_run_id:
            self._explained_run_id = run.run_id
            self._work.start(partial(self._explain, run), self._post)

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the trace under way and wait at most `wait_s` seconds until its process is gone.

        The same run may be explained again afterwards.
        """
        self._explained_run_id = None
        self._work.cancel(wait_s)

    def note(self, message: OomExplained) -> None:
        """Keep the newest explanation."""
        self._newest = message

    def _explain(self, run: RunSnapshot, cancelled: threading.Event) -> OomExplained:
        from trainfast_runner.results.explained_run import trace_changes

        oom_run = out_of_memory(run)
        assert oom_run is not None
        python = self._python or oom_run.run.python or None
        try:
            for left in trace_changes(oom_run, python, cancelled, self._tracer()):
                self._post(OomExplained(run.run_id, _explanation(oom_run, python), left))
        except (UserError, OSError):
            pass  # a change that cannot be traced stays an estimate
        return OomExplained(run.run_id, _explanation(oom_run, python), 0)


def _explanation(oom_run: OutOfMemory, python: str | None) -> OomExplanation:
    from trainfast_runner.results.explained_run import models_of

    return oom_run.explained(models_of(oom_run.run, python))
