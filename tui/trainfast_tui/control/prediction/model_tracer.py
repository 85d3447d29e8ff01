"""Trace the model of the next run in a thread: one model at a time, given up when another is wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import Post, ThreadFailed, TrainingPython
from trainfast_tui.control.threads import CancellableWork
from trainfast_tui.text.wait_words import importing_words

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.tracing import TraceProgress
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.settings.spec import RunSpec


class ModelTracer:
    """Traces the newest wanted model into the cache of traces. Safe for several threads."""

    def __init__(
        self, post: Post, python: TrainingPython, tracer: Callable[[], WarmTracer], on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called in the tracing thread when a trace has ended or waits."""
        self._post = post
        self._python = python
        self._tracer = tracer
        self._on_change = on_change
        self.wait_words = ""
        """The wait of the trace under way: for a Python that imports the training stack, or for another process."""
        self._lock = threading.Lock()
        self._work = CancellableWork("trace")
        self._traced_key = ""
        """The key of the model that is being traced; empty without one."""
        self._since_ns = 0
        self._failures: dict[str, str] = {}
        """The reason a model cannot be traced, by its key."""

    @property
    def is_tracing(self) -> bool:
        """True until the trace under way has ended, also after it was cancelled."""
        return self._work.is_running

    def failure(self, spec: RunSpec, machine: Machine) -> str | None:
        """Return the reason this model cannot be traced; None if it was not tried or was traced."""
        return self._failures.get(_key(spec, machine))

    def trace(self, spec: RunSpec, machine: Machine) -> int:
        """Have this model traced, giving up the trace of another, and return its begin (CLOCK_MONOTONIC, ns)."""
        key = _key(spec, machine)
        with self._lock:
            if key != self._traced_key:
                self._traced_key, self._since_ns = key, time.monotonic_ns()
                self._work.start(partial(self._trace, spec, machine, key), self._post, ThreadFailed)
            return self._since_ns

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the trace under way and wait at most `wait_s` seconds until its process is gone."""
        with self._lock:
            self._traced_key = ""
            self._work.cancel()
        if wait_s:
            # Not under the lock, which the trace takes at its end.
            self._work.cancel(wait_s)

    def _trace(self, spec: RunSpec, machine: Machine, key: str, cancelled: threading.Event) -> None:
        from trainfast_runner.machine.worker_programs import ProgramCancelled
        from trainfast_runner.memory.tracing import trace_model

        gpus = [gpu.uuid for gpu in machine.gpus if gpu.uuid]
        try:
            trace_model(
                spec,
                machine.device,
                self._python,
                cancelled=cancelled,
                gpus=gpus,
                on_traced=self._note_wait,
                tracer=self._tracer(),
            )
        except ProgramCancelled:
            return
        except UserError as error:
            self._failures[key] = error.message
        finally:
            self.wait_words = ""
        with self._lock:
            if self._traced_key == key:
                self._traced_key = ""
        # The newest request may be another than this trace's, and yet be answered by it.
        self._on_change()

    def _note_wait(self, tracing: TraceProgress) -> None:
        words = importing_words(tracing.importing) or (f"waiting for {tracing.waits_for}" if tracing.waits_for else "")
        if words != self.wait_words:
            self.wait_words = words
            self._on_change()


def _key(spec: RunSpec, machine: Machine) -> str:
    """Return everything that a trace depends on, as a text."""
    from trainfast_runner.memory.tracing import request_fields

    return repr(request_fields(spec, machine.device))
