"""Predicts the next run's memory beside the event loop: at once from an earlier trace, or after tracing the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from textual.message import Message

from trainfast_runner.errors import UserError
from trainfast_tui.control.memory_view import Forecast, MemoryView, importing
from trainfast_tui.control.messages import Broke, MemoryForeseen

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.model import MemoryModel
    from trainfast_runner.memory.tracing import Tracing
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.control.next_run import NextRun
    from trainfast_tui.live.snapshot import Snapshot

NOT_NOW = "no prediction: a trace would slow the run"


@dataclass(frozen=True, slots=True)
class Question:
    """The knobs as they stand. `may_trace` is False while a run is measured: a trace would take its CPU."""

    spec: RunSpec
    machine: Machine
    free_bytes: int | None
    """What the host has free now."""
    may_trace: bool


def knows_free(snapshot: Snapshot | None) -> bool:
    """Whether a snapshot says what the host has free."""
    tick = snapshot.tick if snapshot is not None else None
    return tick is not None and _host_free(tick, None) is not None


def question_about(next_run: NextRun, machine: Machine, snapshot: Snapshot | None, *, may_trace: bool) -> Question:
    """What there is to ask about the next run."""
    tick = snapshot.tick if snapshot is not None else None
    machine = machine.used_by(next_run.spec.knobs["devices"])
    if tick is None:
        return Question(_with_devices(next_run.spec, machine), machine, None, may_trace)
    run = snapshot.run if snapshot is not None else None
    live = run if run is not None and run.is_live else None
    spec = _with_devices(next_run.spec, machine)
    return Question(spec, _with_free(machine, tick, live), _host_free(tick, live), may_trace)


def _with_devices(spec: RunSpec, machine: Machine) -> RunSpec:
    """With the number of devices where a prediction depends on it; what is wrong with them is said elsewhere."""
    from trainfast_runner.settings.world import with_devices

    try:
        return with_devices(spec, machine)
    except UserError:
        return spec


def _host_free(tick: Tick, live: RunSnapshot | None) -> int | None:
    """What the host has free; what a live run holds is free again when the next one starts."""
    host = tick.host
    if host is None or host.memory_available_bytes is None:
        return None
    held = host.run.memory_rss_bytes if live is not None and host.run is not None else None
    return host.memory_available_bytes + (held or 0)


def _with_free(machine: Machine, tick: Tick, live: RunSnapshot | None) -> Machine:
    """The machine with what its GPUs have free now, or had before the live run."""
    now = {device.uuid: device for device in tick.devices if device.uuid}
    before = live.run.used_before_bytes if live is not None and live.run is not None else {}
    gpus = []
    for gpu in machine.gpus:
        seen = now.get(gpu.uuid or "")
        if seen is not None and seen.memory_free_bytes is not None:
            used, old = seen.memory_used_bytes, before.get(gpu.uuid or "")
            held = max(0, used - old) if used is not None and old is not None else 0
            gpu = msgspec.structs.replace(gpu, memory_free_bytes=seen.memory_free_bytes + held)
        gpus.append(gpu)
    return replace(machine, gpus=tuple(gpus))


@dataclass(frozen=True, slots=True)
class _Trace:
    """One that is wanted or under way; setting `given_up` ends it."""

    question: Question
    key: str
    since_ns: int
    given_up: threading.Event


class Forecaster:
    """Posts `MemoryForeseen`. Of several questions only the newest is answered, and only its trace goes on."""

    def __init__(
        self,
        post: Callable[[Message], object],
        python: str | None = None,
        tracer: Callable[[], WarmTracer | None] = lambda: None,
    ) -> None:
        self._post = post
        self._tracer = tracer
        self._importing = ""
        """The Python that is importing the training stack for the trace under way."""
        self._python = python
        self._wake = threading.Condition()
        self._question: Question | None = None
        self._answered = True
        self._trace: _Trace | None = None
        self._failed: dict[str, str] = {}
        """Why a model cannot be traced, by what it was."""
        self._started = False
        self._idle = threading.Event()
        """Set while no trace is under way."""
        self._idle.set()

    def ask(self, question: Question) -> None:
        """Answer this one from now on. Returns at once."""
        with self._wake:
            self._question, self._answered = question, False
            if not question.may_trace:
                self._drop_trace()
            if not self._started:
                self._started = True
                for name, work in (("forecast", self._answer_on), ("trace", self._trace_on)):
                    threading.Thread(target=self._guarded, args=(work,), name=f"trainfast-{name}", daemon=True).start()
            self._wake.notify_all()

    def stop(self, wait_s: float = 0.0) -> None:
        """End the trace that is under way and wait at most this long for its process to be gone."""
        with self._wake:
            self._drop_trace()
        self._idle.wait(wait_s)

    def _drop_trace(self) -> None:
        if self._trace is not None:
            self._trace.given_up.set()
            self._trace = None

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            # A thread that died in silence would leave the last bar standing as if it were about these knobs.
            self._post(Broke(error))

    def _answer_on(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: not self._answered)
                question = self._question
                self._answered = True
            if question is None:
                continue
            view = self._answer(question)
            with self._wake:
                outdated = not self._answered
            if not outdated:
                self._post(MemoryForeseen(view))

    def _answer(self, question: Question) -> MemoryView:
        from trainfast_runner.memory.tracing import cached_model

        try:
            model = cached_model(question.spec, question.machine.device, self._python)
            if model is not None:
                return MemoryView(forecast(model, question))
        except UserError as problem:
            return MemoryView(words=f"no prediction: {problem.message}", failed=True)
        why = self._failed.get(_key(question))
        if why is not None:
            return MemoryView(words=f"no prediction: {why}", failed=True)
        if not question.may_trace:
            return MemoryView(words=NOT_NOW)
        since_ns = self._want_trace(question)
        return MemoryView(words=f"{importing(self._importing) or 'tracing the model'}…", since_ns=since_ns)

    def _want_trace(self, question: Question) -> int | None:
        """Have the model traced; when that began. Another trace under way is given up."""
        with self._wake:
            if question is not self._question:
                return None
            key = _key(question)
            if self._trace is None or self._trace.key != key:
                self._drop_trace()
                self._trace = _Trace(question, key, time.monotonic_ns(), threading.Event())
                self._wake.notify_all()
            return self._trace.since_ns

    def _hear(self, tracing: Tracing) -> None:
        with self._wake:
            if tracing.importing != self._importing:
                self._importing, self._answered = tracing.importing, False
                self._wake.notify_all()

    def _trace_on(self) -> None:
        from trainfast_runner.machine.worker_scripts import GivenUp
        from trainfast_runner.memory.tracing import trace_model

        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._trace is not None)
                trace = self._trace
            assert trace is not None
            spec, machine = trace.question.spec, trace.question.machine
            gpus = [gpu.uuid for gpu in machine.gpus if gpu.uuid]
            self._idle.clear()
            try:
                trace_model(
                    spec,
                    machine.device,
                    self._python,
                    given_up=trace.given_up,
                    gpus=gpus,
                    on_traced=self._hear,
                    tracer=self._tracer(),
                )
            except GivenUp:
                continue
            except UserError as problem:
                self._failed[trace.key] = problem.message
            except OSError as error:
                self._failed[trace.key] = str(error)
            finally:
                self._importing = ""
                self._idle.set()
            with self._wake:
                if self._trace is trace:
                    self._trace = None
                # Whatever is asked by now: the trace may answer it.
                self._answered = False
                self._wake.notify_all()


def forecast(model: MemoryModel, question: Question) -> Forecast:
    """What the model says of these knobs, on this machine. Raises UserError for a combination it does not know."""
    from trainfast_runner.memory.available import within_container
    from trainfast_runner.memory.fitting import fit_of
    from trainfast_runner.memory.prediction import CATEGORIES
    from trainfast_runner.settings.world import world_size

    spec = question.spec
    free = None if question.free_bytes is None else within_container(question.free_bytes)
    fit = fit_of(model, spec, question.machine, world_size(spec, question.machine), free)
    found = fit.predicted
    return Forecast(
        total_bytes=found.total_bytes,
        parts=tuple((name, found.category(name)) for name in CATEGORIES),
        phase=found.phase,
        batch_size=int(str(spec.knobs["batch_size"])),
        room=fit.room,
        max_batch=fit.max_batch,
        context_bytes=found.context_bytes,
        basis=found.basis,
        attention=found.attention,
        margin_bytes=fit.margin_bytes,
        cannot_run="" if fit.cannot_run is None else fit.cannot_run.line(),
    )


def _key(question: Question) -> str:
    """What a trace depends on."""
    from trainfast_runner.memory.parts import requests_of

    return repr(requests_of(question.spec, question.machine.device))
