"""Predict the next run's memory and speed in threads: at once from an earlier trace, or after tracing the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import NextRunPredicted, Post, ThreadFailed, TrainingPython
from trainfast_tui.control.prediction.model_tracer import ModelTracer
from trainfast_tui.control.prediction.prediction_request import PredictionRequest
from trainfast_tui.control.prediction.speed_predictor import SpeedPredictor, TracedSpec
from trainfast_tui.control.threads import start_thread
from trainfast_tui.next_run.memory_and_speed import NextRunMemory

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.memory.model import MemoryModel
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.records.home import Home
    from trainfast_tui.next_run.memory_and_speed import NextRunSpeed

NO_TRACE_NOW = "no prediction: a trace would slow the run"


class Predictor:
    """Posts `NextRunPredicted`. Only the newest request is answered, and only its trace goes on."""

    def __init__(
        self,
        post: Post,
        python: TrainingPython,
        tracer: Callable[[], WarmTracer],
        home: Home,
    ) -> None:
        self._post = post
        self._python = python
        self._speeds = SpeedPredictor(home, python)
        self._model_tracer = ModelTracer(post, python, tracer, self._answer_newest)
        self._lock = threading.Lock()
        self._newest_request: PredictionRequest | None = None
        self._unanswered_request: PredictionRequest | None = None
        self._is_answering = False
        """True while a thread answers requests."""

    @property
    def is_tracing(self) -> bool:
        """True while a model is traced."""
        return self._model_tracer.is_tracing

    def request(self, request: PredictionRequest) -> None:
        """Answer this request from now on. Returns at once."""
        with self._lock:
            self._newest_request = request
            if not request.may_trace:
                self._model_tracer.cancel()
        self._answer_newest()

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the trace under way and wait at most `wait_s` seconds until its process is gone."""
        self._model_tracer.cancel(wait_s)

    def _answer_newest(self) -> None:
        """Answer the newest request, or answer it again when more is known."""
        with self._lock:
            self._unanswered_request = self._newest_request
            if not self._is_answering:
                self._is_answering = True
                start_thread("predict", self._answer_requests, self._post, ThreadFailed)

    def _answer_requests(self) -> None:
        while (request := self._next_request()) is not None:
            memory, speed = self._answer(request)
            with self._lock:
                is_outdated = self._unanswered_request is not None
            if not is_outdated:
                self._post(NextRunPredicted(memory, speed))

    def _next_request(self) -> PredictionRequest | None:
        """Return the request to be answered next; None, which ends the thread, if there is none."""
        with self._lock:
            request, self._unanswered_request = self._unanswered_request, None
            self._is_answering = request is not None
            return request

    def _answer(self, request: PredictionRequest) -> tuple[NextRunMemory, NextRunSpeed | None]:
        from trainfast_runner.memory.tracing import cached_models

        try:
            model_of = cached_models(request.machine.device, self._python)
            if (model := model_of(request.spec)) is not None:
                return self._predict_from_model(
                    request, model, None if request.reference is None else model_of(request.reference)
                )
        except UserError as error:
            return NextRunMemory(reason=f"no prediction: {error.message}", failed=True), None
        except OSError as error:
            return NextRunMemory(reason=f"no prediction: {error}", failed=True), None
        return self._reason_or_trace(request), None

    def _predict_from_model(
        self, request: PredictionRequest, model: MemoryModel, reference_model: MemoryModel | None
    ) -> tuple[NextRunMemory, NextRunSpeed | None]:
        """Predict memory and speed from the model of a trace, each with that of the reference."""
        spec, machine = request.spec, request.machine
        reference = (
            None
            if request.reference is None or reference_model is None
            else TracedSpec(request.reference, reference_model)
        )
        memory = NextRunMemory(
            predicted_fit(model, request),
            spec,
            reference_bytes=None if reference is None else _peak_bytes(reference, machine),
        )
        return memory, self._speeds.predict(TracedSpec(spec, model), reference, machine, request.speed_key)

    def _reason_or_trace(self, request: PredictionRequest) -> NextRunMemory:
        """Return the reason for no prediction, or begin the trace that will give one."""
        failure = self._model_tracer.failure(request.spec, request.machine)
        if failure is not None:
            return NextRunMemory(reason=f"no prediction: {failure}", failed=True)
        if not request.may_trace:
            return NextRunMemory(reason=NO_TRACE_NOW)
        with self._lock:
            is_newest = request is self._newest_request
            since_ns = self._model_tracer.trace(request.spec, request.machine) if is_newest else None
        words = self._model_tracer.wait_words or "tracing the model"
        return NextRunMemory(reason=f"{words}…", since_ns=since_ns)


def predicted_fit(model: MemoryModel, request: PredictionRequest) -> PredictedFit:
    """Predict this spec on this machine. Raises UserError for settings unknown to the model."""
    from trainfast_runner.machine.cgroup import free_within_limits
    from trainfast_runner.memory.headroom import predict_headroom
    from trainfast_runner.settings.device_counts import world_size

    spec, machine = request.spec, request.machine
    free_bytes = None if request.free_bytes is None else free_within_limits(request.free_bytes)
    return predict_headroom(model, spec, machine, world_size(spec, machine), free_bytes)


def _peak_bytes(traced: TracedSpec, machine: Machine) -> int | None:
    """Predict the peak of another spec; None if it cannot run on this machine."""
    from trainfast_runner.settings.device_counts import first_gpu_name, world_size

    try:
        ranks = world_size(traced.spec, machine)
        return traced.model.corrected_for(first_gpu_name(traced.spec, machine)).predict(traced.spec, ranks).total_bytes
    except UserError:
        return None
