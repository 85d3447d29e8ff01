"""Predict the next run's memory and speed in threads.

BackgroundWork asks when an input has changed; Predictor answers the newest request in a thread; ModelTracer fills the
cache of traces; SpeedPredictor adds the speed; SharedTracer holds the one process that traces.

Modules of the runner that the first frame does not need are imported where they are used.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import NextRunPredicted, Post, ThreadFailed, TrainingPython
from trainfast_tui.control.threads import CancellableWork, start_thread
from trainfast_tui.next_run.sources import NextRunMemory, NextRunSpeed
from trainfast_tui.text.event_words import importing_words

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.memory.model import MemoryModel
    from trainfast_runner.memory.tracing import TraceProgress
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.records.home import Home
    from trainfast_runner.records.run_file import PredictedSpeed
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.search.predicted_speed import DeviceSpeedModel
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.next_run.next_run import NextRun


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
        from trainfast_runner.machine.training_python import ProgramCancelled
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


SpeedKey = tuple[object, ...]
"""A value that changes with the runs and searches that speeds are predicted from."""
MOVED_SHARE = 0.01
"""Chosen, not measured: a smaller change of free memory is noise of an idle machine, and starts no prediction."""


class PredictionRequest(msgspec.Struct, frozen=True):
    """The spec to predict for, and the machine with the memory that is free now."""

    spec: RunSpec
    machine: Machine
    free_bytes: int | None
    """Free memory of the host now."""
    may_trace: bool
    """False while a run is measured: a trace would take its CPU."""
    reference: RunSpec | None = None
    """The spec to compare with (`NextRun.reference_spec`); None if no knob differs from it."""
    speed_key: SpeedKey = ()
    """Changes when there are new runs or searches to predict the speed from."""


def free_memory_bytes(machine: Machine, snapshot: Snapshot | None) -> tuple[int | None, ...]:
    """Return the memory that the host and each GPU have free for the next run; empty without a reading of the host."""
    tick = snapshot.tick if snapshot is not None else None
    if snapshot is None or tick is None or (host_bytes := _host_free_bytes(tick, snapshot.live_run)) is None:
        return ()
    return host_bytes, *(gpu.memory_free_bytes for gpu in _with_free_memory(machine, tick, snapshot.live_run).gpus)


def has_moved(before: tuple[int | None, ...], after: tuple[int | None, ...]) -> bool:
    """True if free memory of the host or of a GPU has changed by `MOVED_SHARE`, or a reading has come or gone."""
    if len(before) != len(after):
        return True
    return any(
        old_bytes != new_bytes
        and (old_bytes is None or new_bytes is None or abs(new_bytes - old_bytes) >= MOVED_SHARE * old_bytes)
        for old_bytes, new_bytes in zip(before, after, strict=True)
    )


def request_for(
    next_run: NextRun, machine: Machine, snapshot: Snapshot | None, *, may_trace: bool, speed_key: SpeedKey = ()
) -> PredictionRequest:
    """Return the request for the next run, with the memory that is free by the newest sample."""
    tick = snapshot.tick if snapshot is not None else None
    reference = next_run.reference_spec()
    spec, free_bytes = spec_on(machine, next_run), None
    machine = machine.used_by(next_run.spec.knobs["devices"])
    if tick is not None:
        live_run = snapshot.live_run if snapshot is not None else None
        machine, free_bytes = _with_free_memory(machine, tick, live_run), _host_free_bytes(tick, live_run)
    return PredictionRequest(spec, machine, free_bytes, may_trace, reference, speed_key)


def spec_on(machine: Machine, next_run: NextRun) -> RunSpec:
    """Return the spec with the number of devices on this machine.

    They are unchanged if the devices are refused, which the run's start reports.
    """
    from trainfast_runner.settings.device_counts import with_devices

    spec = next_run.spec
    try:
        return with_devices(spec, machine.used_by(spec.knobs["devices"]))
    except UserError:
        return spec


def _host_free_bytes(tick: Tick, live_run: RunSnapshot | None) -> int | None:
    """Return the free memory of the host in bytes; the memory of a live run is free again when the next one starts."""
    host = tick.host
    if host.memory_available_bytes is None:
        return None
    run_bytes = host.run.memory_rss_bytes if live_run is not None and host.run is not None else None
    return host.memory_available_bytes + (run_bytes or 0)


def _with_free_memory(machine: Machine, tick: Tick, live_run: RunSnapshot | None) -> Machine:
    """Return the machine with the memory that its GPUs have free now, or had before the live run."""
    readings = {device.uuid: device for device in tick.devices if device.uuid}
    before = live_run.run_file.used_before_bytes if live_run is not None and live_run.run_file is not None else {}
    gpus = []
    for gpu in machine.gpus:
        reading = readings.get(gpu.uuid or "")
        if reading is not None and reading.memory_free_bytes is not None:
            used, used_before = reading.memory_used_bytes, before.get(gpu.uuid or "")
            run_bytes = max(0, used - used_before) if used is not None and used_before is not None else 0
            gpu = msgspec.structs.replace(gpu, memory_free_bytes=reading.memory_free_bytes + run_bytes)
        gpus.append(gpu)
    return dataclasses.replace(machine, gpus=tuple(gpus))


NO_TRACE_NOW = "no prediction: a trace would slow the run"


class Predictor:
    """Posts `NextRunPredicted`. Only the newest request is answered, and only its trace goes on."""

    def __init__(self, post: Post, python: TrainingPython, tracer: Callable[[], WarmTracer], home: Home) -> None:
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
    from trainfast_runner.machine.resource_limits import free_within_limits
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


class SharedTracer:
    """Holds the tracer, which the first thread that traces makes: the app's first frame imports nothing for it."""

    def __init__(self) -> None:
        self._tracer: WarmTracer | None = None
        self._lock = threading.Lock()

    def get(self) -> WarmTracer:
        """Return the tracer; the same for every thread."""
        from trainfast_runner.memory.warm_tracer import WarmTracer

        with self._lock:
            if self._tracer is None:
                self._tracer = WarmTracer()
            return self._tracer

    def close(self) -> None:
        """End the tracer's process, if there is one."""
        if self._tracer is not None:
            self._tracer.close()


class TracedSpec(msgspec.Struct, frozen=True):
    """A spec with the memory model of its trace."""

    spec: RunSpec
    model: MemoryModel


class SpeedPredictor:
    """Predicts speeds on a device from earlier runs, read again when `speed_key` changes. For one thread."""

    def __init__(self, home: Home, python: TrainingPython) -> None:
        self._home, self._python = home, python
        self._model: tuple[object, DeviceSpeedModel] | None = None
        """The newest speed model, with the key of all that it was made for."""

    def predict(
        self, traced: TracedSpec, reference: TracedSpec | None, machine: Machine, speed_key: SpeedKey
    ) -> NextRunSpeed:
        """Predict the speed of both specs."""
        try:
            predicted = self._predict(traced, machine, speed_key)
            predicted_reference = None if reference is None else self._predict(reference, machine, speed_key)
        except UserError as error:
            return NextRunSpeed(reason=error.message)
        except OSError as error:
            return NextRunSpeed(reason=str(error))
        if isinstance(predicted, str):
            return NextRunSpeed(reason=predicted)
        return NextRunSpeed(
            predicted,
            reference_samples_per_s=(
                None
                if predicted_reference is None or isinstance(predicted_reference, str)
                else predicted_reference.median
            ),
        )

    def _predict(self, traced: TracedSpec, machine: Machine, speed_key: SpeedKey) -> PredictedSpeed | str:
        """Return the predicted speed, or why there is none. Raises UserError for devices that do not exist."""
        from trainfast_runner.search.predicted_speed import UnknownSpeed
        from trainfast_runner.settings.device_counts import device_count

        spec = traced.spec
        model = self._speed_model(spec, machine, speed_key)
        predicted = model.predict(spec, device_count(spec, machine), traced.model)
        return predicted.reason if isinstance(predicted, UnknownSpeed) else predicted

    def _speed_model(self, spec: RunSpec, machine: Machine, speed_key: SpeedKey) -> DeviceSpeedModel:
        from trainfast_runner.search.predicted_speed import SpeedDevice, speed_model_on, training_of
        from trainfast_runner.settings.device_counts import first_gpu_name

        device = SpeedDevice(machine.used_by(spec.knobs["devices"]).device, first_gpu_name(spec, machine) or "")
        key = (training_of(spec), device, speed_key)
        if self._model is None or self._model[0] != key:
            self._model = key, speed_model_on(self._home, spec, device, self._python)
        return self._model[1]
