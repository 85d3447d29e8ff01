"""Trace the model of the next run in a thread: one model at a time, given up when another is wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_tui.control.loop_thread import start_loop
from trainfast_tui.control.messages import Post

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.tracing import Tracing
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.settings.spec import RunSpec


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace that is wanted or under way; setting `cancelled` ends it."""

    spec: RunSpec
    machine: Machine
    key: str
    since_ns: int
    cancelled: threading.Event


class ModelTracer:
    """Traces the newest model that was wanted; the trace's result goes into the cache of traces."""

    def __init__(
        self, post: Post, python: str | None, tracer: Callable[[], WarmTracer | None], on_news: Callable[[], None]
    ) -> None:
        """`on_news` is called in the tracing thread, after a trace and when the Python that imports changes."""
        self._post = post
        self._python = python
        self._tracer = tracer
        self._on_news = on_news
        self.importing = ""
        """The Python that is importing the training stack for the trace under way."""
        self._wake = threading.Condition()
        self._trace: _Trace | None = None
        self._failures: dict[str, str] = {}
        """The reason why a model cannot be traced, by its key."""
        self._is_started = False
        self._is_idle = threading.Event()
        """Set while no trace is under way."""
        self._is_idle.set()

    def failure(self, spec: RunSpec, machine: Machine) -> str | None:
        """Return the reason why this model cannot be traced; None if it was not tried or was traced."""
        return self._failures.get(_key(spec, machine))

    def trace(self, spec: RunSpec, machine: Machine) -> int:
        """Have this model traced, giving up the trace of another, and return its begin (CLOCK_MONOTONIC, ns)."""
        key = _key(spec, machine)
        with self._wake:
            if self._trace is None or self._trace.key != key:
                self._give_up()
                self._trace = _Trace(spec, machine, key, time.monotonic_ns(), threading.Event())
                if not self._is_started:
                    self._is_started = True
                    start_loop("trace", self._trace_loop, self._post)
                self._wake.notify_all()
            return self._trace.since_ns

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the trace under way and wait at most this long until its process is gone."""
        with self._wake:
            self._give_up()
        self._is_idle.wait(wait_s)

    def _give_up(self) -> None:
        if self._trace is not None:
            self._trace.cancelled.set()
            self._trace = None

    def _trace_loop(self) -> None:
        from trainfast_runner.machine.worker_scripts import ScriptCancelled

        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._trace is not None)
                trace = self._trace
                self._is_idle.clear()
            assert trace is not None
            try:
                self._run_trace(trace)
            except ScriptCancelled:
                continue
            except UserError as error:
                self._failures[trace.key] = error.message
            except OSError as error:
                self._failures[trace.key] = str(error)
            finally:
                self.importing = ""
                self._is_idle.set()
            with self._wake:
                if self._trace is trace:
                    self._trace = None
            # The newest request may be another than this trace's, and yet be answered by it.
            self._on_news()

    def _run_trace(self, trace: _Trace) -> None:
        from trainfast_runner.memory.tracing import trace_model

        trace_model(
            trace.spec,
            trace.machine.device,
            self._python,
            cancelled=trace.cancelled,
            gpus=[gpu.uuid for gpu in trace.machine.gpus if gpu.uuid],
            on_traced=self._note_import,
            tracer=self._tracer(),
        )

    def _note_import(self, tracing: Tracing) -> None:
        if tracing.importing != self.importing:
            self.importing = tracing.importing
            self._on_news()


def _key(spec: RunSpec, machine: Machine) -> str:
    """Return everything that a trace depends on, as a text."""
    from trainfast_runner.memory.traces import request_fields

    return repr(request_fields(spec, machine.device))
