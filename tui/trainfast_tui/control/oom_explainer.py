"""After a run out of memory: trace in a thread which changes would fit, while nothing is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.known_values import highest
from trainfast_runner.records.worker_lines import ExceptionLine, error_of
from trainfast_tui.control.messages import OomExplained, Post
from trainfast_tui.control.threads import CancellableWork

if TYPE_CHECKING:
    from trainfast_runner.memory.oom.explain import OutOfMemory
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.records.result import OomExplanation, RunError
    from trainfast_runner.running.follower import RunSnapshot


class OomExplainer:
    """Posts `OomExplained` each time more is known.

    `python` is the path of the training Python, None for the run's own; `tracer` traces.
    """

    def __init__(self, post: Post, python: str | None, tracer: Callable[[], WarmTracer]) -> None:
        self._post = post
        self._tracer = tracer
        self._python = python
        self._explained_run_id: str | None = None
        self._newest_message: OomExplained | None = None
        self._work = CancellableWork("explain")

    @property
    def is_tracing(self) -> bool:
        """True until the trace under way has ended, also after it was cancelled."""
        return self._work.is_running

    def explanation_of(self, run: RunSnapshot) -> tuple[OomExplanation | None, int]:
        """Return the explanation of an out-of-memory run, traced if it is, and the number of traces left.

        The explanation is None for a run that ended otherwise, or that cannot be explained.
        """
        if run.state != "oom":
            return None, 0
        explanation = _recorded_explanation(run)
        traced = self._newest_message
        if traced is None or traced.run_id != run.run_id:
            return explanation, 0
        if explanation is None or explanation.needed_bytes is None or traced.explanation.needed_bytes is not None:
            explanation = traced.explanation
        return explanation, traced.traces_left

    def explain_if_oom(self, run: RunSnapshot | None, *, may_trace: bool) -> None:
        """Explain this run if it ran out of memory; give up the trace under way unless `may_trace`.

        Nothing is traced for a script, which has no model here.
        """
        is_oom = run is not None and run.state == "oom" and run.run_file is not None and run.run_file.script is None
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
        self._newest_message = message

    def _explain(self, run: RunSnapshot, cancelled: threading.Event) -> OomExplained:
        from trainfast_runner.memory.oom.trace_changes import trace_changes

        oom_run = _out_of_memory(run)
        assert oom_run is not None
        python = self._python or oom_run.run.python or None
        try:
            for traces_left in trace_changes(oom_run, python, cancelled, self._tracer()):
                self._post(OomExplained(run.run_id, _explanation(oom_run, python), traces_left))
        except UserError:
            pass  # a change that cannot be traced stays an estimate
        return OomExplained(run.run_id, _explanation(oom_run, python), 0)


def _explanation(oom_run: OutOfMemory, python: str | None) -> OomExplanation:
    from trainfast_runner.memory.oom.explain_run import explain_run, models_of

    return explain_run(oom_run, models_of(oom_run.run, python))


def _recorded_explanation(run: RunSnapshot) -> OomExplanation | None:
    """Return the explanation in the result, else the one that the records of the run give."""
    if run.result is not None and run.result.oom is not None:
        return run.result.oom
    from trainfast_runner.memory.oom.explain_run import explain_run

    oom_run = _out_of_memory(run)
    return None if oom_run is None else explain_run(oom_run, lambda spec: None)


def _out_of_memory(run: RunSnapshot) -> OutOfMemory | None:
    """Return the error, limits and events of a followed run that ran out of memory; None without its `run.json`."""
    from trainfast_runner.memory.oom.explain import OutOfMemory

    if run.run_file is None:
        return None
    held_bytes = run.error.held_bytes if isinstance(run.error, ExceptionLine) else None
    available_bytes = highest(tick.host.memory_available_bytes for tick in run.ticks)
    return OutOfMemory(
        run=run.run_file,
        reason=run.reason,
        error=_error_of(run),
        held_bytes=held_bytes,
        host_bytes=available_bytes,
        events=run.events,
        tried=run.tried,
        in_first_step=not run.steps,
    )


def _error_of(run: RunSnapshot) -> RunError | None:
    """Return the exception in the result, or else the one that a rank recorded."""
    if run.result is not None and run.result.error is not None:
        return run.result.error
    line = run.error
    return None if line is None else error_of(line, line.rank or 0)
