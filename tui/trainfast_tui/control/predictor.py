"""Predict the next run's memory and speed in threads: at once from an earlier trace, or after tracing the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_type import whole_number
from trainfast_tui.control.messages import NextRunPredicted, Post, ThreadFailed
from trainfast_tui.control.next_run_memory import NextRunMemory
from trainfast_tui.control.speed_predictor import SpeedPredictor, Traced
from trainfast_tui.text.phases import importing_words

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.memory.model import MemoryModel
    from trainfast_runner.memory.tracing import Tracing
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.records.home import Home
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.control.next_run import NextRun
    from trainfast_tui.control.next_run_speed import NextRunSpeed
    from trainfast_tui.live.snapshot import Snapshot

NOT_NOW = "no prediction: a trace would slow the run"


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """The settings to predict for. `may_trace` is False while a run is measured: a trace would take its CPU.

    `reference` is `NextRun.reference_spec`; with another `speed_key` there are new runs.
    """

    spec: RunSpec
    machine: Machine
    free_bytes: int | None
    """Free memory of the host now."""
    may_trace: bool
    reference: RunSpec | None = None
    speed_key: str = ""


def knows_free_memory(snapshot: Snapshot | None) -> bool:
    """True if a snapshot has the host's free memory."""
    tick = snapshot.tick if snapshot is not None else None
    return tick is not None and _host_free(tick, None) is not None


def request_for(
    next_run: NextRun, machine: Machine, snapshot: Snapshot | None, *, may_trace: bool, speed_key: str = ""
) -> PredictionRequest:
    """Return the request for the next run, with the memory that is free by the newest sample."""
    tick = snapshot.tick if snapshot is not None else None
    reference = next_run.reference_spec()
    machine = machine.used_by(next_run.spec.knobs["devices"])
    spec = _with_devices(next_run.spec, machine)
    if tick is None:
        return PredictionRequest(spec, machine, None, may_trace, reference, speed_key)
    live = snapshot.live_run if snapshot is not None else None
    free_bytes = _host_free(tick, live)
    return PredictionRequest(spec, _with_free(machine, tick, live), free_bytes, may_trace, reference, speed_key)


def _with_devices(spec: RunSpec, machine: Machine) -> RunSpec:
    """Return the spec with the number of devices it takes, unchanged if they are refused: starting the run says so."""
    from trainfast_runner.settings.device_counts import with_devices

    try:
        return with_devices(spec, machine)
    except UserError:
        return spec


def _host_free(tick: Tick, live: RunSnapshot | None) -> int | None:
    """Return the free memory of the host in bytes; the memory of a live run is free again when the next one starts."""
    host = tick.host
    if host is None or host.memory_available_bytes is None:
        return None
    held = host.run.memory_rss_bytes if live is not None and host.run is not None else None
    return host.memory_available_bytes + (held or 0)


def _with_free(machine: Machine, tick: Tick, live: RunSnapshot | None) -> Machine:
    """Return the machine with the memory that its GPUs have free now, or had before the live run."""
    readings = {device.uuid: device for device in tick.devices if device.uuid}
    before = live.run_file.used_before_bytes if live is not None and live.run_file is not None else {}
    gpus = []
    for gpu in machine.gpus:
        reading = readings.get(gpu.uuid or "")
        if reading is not None and reading.memory_free_bytes is not None:
            used, used_before = reading.memory_used_bytes, before.get(gpu.uuid or "")
            held = max(0, used - used_before) if used is not None and used_before is not None else 0
            gpu = msgspec.structs.replace(gpu, memory_free_bytes=reading.memory_free_bytes + held)
        gpus.append(gpu)
    return replace(machine, gpus=tuple(gpus))


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace that is wanted or under way; setting `cancelled` ends it."""

    request: PredictionRequest
    key: str
    since_ns: int
    cancelled: threading.Event


class Predictor:
    """Posts `NextRunPredicted`. Only the newest request is answered, and only its trace goes on."""

    def __init__(
        self,
        post: Post,
        python: str | None = None,
        tracer: Callable[[], WarmTracer | None] = lambda: None,
        home: Home | None = None,
    ) -> None:
        """Without a `home`, no speed is predicted."""
        self._post = post
        self._speeds = None if home is None else SpeedPredictor(home, python)
        self._tracer = tracer
        self._importing = ""
        """The Python that is importing the training stack for the trace under way."""
        self._python = python
        self._wake = threading.Condition()
        self._request: PredictionRequest | None = None
        self._answered = True
        self._trace: _Trace | None = None
        self._failed: dict[str, str] = {}
        """The reason why a model cannot be traced, by its key."""
        self._started = False
        self._idle = threading.Event()
        """Set while no trace is under way."""
        self._idle.set()

    def request(self, request: PredictionRequest) -> None:
        """Answer this request from now on. Returns at once."""
        with self._wake:
            self._request, self._answered = request, False
            if not request.may_trace:
                self._drop_trace()
            if not self._started:
                self._started = True
                for name, work in (("predict", self._answer_loop), ("trace", self._trace_loop)):
                    threading.Thread(
                        target=self._run_and_report_failure, args=(work,), name=f"trainfast-{name}", daemon=True
                    ).start()
            self._wake.notify_all()

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the trace under way and wait at most this long until its process is gone."""
        with self._wake:
            self._drop_trace()
        self._idle.wait(wait_s)

    def _drop_trace(self) -> None:
        if self._trace is not None:
            self._trace.cancelled.set()
            self._trace = None

    def _run_and_report_failure(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            # Else the last bar would stay on the screen as if it were about these knobs.
            self._post(ThreadFailed(error))

    def _answer_loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: not self._answered)
                request = self._request
                self._answered = True
            if request is None:
                continue
            memory, speed = self._answer(request)
            with self._wake:
                outdated = not self._answered
            if not outdated:
                self._post(NextRunPredicted(memory, speed))

    def _answer(self, request: PredictionRequest) -> tuple[NextRunMemory, NextRunSpeed | None]:
        from trainfast_runner.memory.tracing import cached_models

        try:
            model_of = cached_models(request.machine.device, self._python)
            if (model := model_of(request.spec)) is not None:
                return self._predict_from_model(
                    request, model, None if request.reference is None else model_of(request.reference)
                )
        except UserError as error:
            return NextRunMemory(why=f"no prediction: {error.message}", failed=True), None
        return self._reason_or_trace(request), None

    def _predict_from_model(
        self, request: PredictionRequest, model: MemoryModel, reference_model: MemoryModel | None
    ) -> tuple[NextRunMemory, NextRunSpeed | None]:
        """Predict memory and speed from the model of a trace, each with that of the reference."""
        spec, machine = request.spec, request.machine
        reference = (
            None if request.reference is None or reference_model is None else Traced(request.reference, reference_model)
        )
        memory = NextRunMemory(
            predicted_fit(model, request),
            whole_number(spec.knobs, "batch_size"),
            reference_bytes=None if reference is None else _peak_bytes(reference, machine),
        )
        if self._speeds is None:
            return memory, None
        return memory, self._speeds.predict(Traced(spec, model), reference, machine, request.speed_key)

    def _reason_or_trace(self, request: PredictionRequest) -> NextRunMemory:
        """The reason for no prediction, or the trace that will give one."""
        reason = self._failed.get(_key(request))
        if reason is not None:
            return NextRunMemory(why=f"no prediction: {reason}", failed=True)
        if not request.may_trace:
            return NextRunMemory(why=NOT_NOW)
        since_ns = self._request_trace(request)
        return NextRunMemory(why=f"{importing_words(self._importing) or 'tracing the model'}…", since_ns=since_ns)

    def _request_trace(self, request: PredictionRequest) -> int | None:
        """Have the model traced, giving up another trace, and return when it began; None if the request is outdated."""
        with self._wake:
            if request is not self._request:
                return None
            key = _key(request)
            if self._trace is None or self._trace.key != key:
                self._drop_trace()
                self._trace = _Trace(request, key, time.monotonic_ns(), threading.Event())
                self._wake.notify_all()
            return self._trace.since_ns

    def _note_tracing(self, tracing: Tracing) -> None:
        with self._wake:
            if tracing.importing != self._importing:
                self._importing, self._answered = tracing.importing, False
                self._wake.notify_all()

    def _trace_loop(self) -> None:
        from trainfast_runner.machine.worker_scripts import ScriptCancelled
        from trainfast_runner.memory.tracing import trace_model

        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._trace is not None)
                trace = self._trace
            assert trace is not None
            spec, machine = trace.request.spec, trace.request.machine
            gpus = [gpu.uuid for gpu in machine.gpus if gpu.uuid]
            self._idle.clear()
            try:
                trace_model(
                    spec,
                    machine.device,
                    self._python,
                    cancelled=trace.cancelled,
                    gpus=gpus,
                    on_traced=self._note_tracing,
                    tracer=self._tracer(),
                )
            except ScriptCancelled:
                continue
            except UserError as error:
                self._failed[trace.key] = error.message
            except OSError as error:
                self._failed[trace.key] = str(error)
            finally:
                self._importing = ""
                self._idle.set()
            with self._wake:
                if self._trace is trace:
                    self._trace = None
                # The newest request may be another than this trace's, and yet be answered by it.
                self._answered = False
                self._wake.notify_all()


def predicted_fit(model: MemoryModel, request: PredictionRequest) -> PredictedFit:
    """Predict these settings on this machine. Raises UserError for settings unknown to the model."""
    from trainfast_runner.memory.available import within_container
    from trainfast_runner.memory.headroom import predict_headroom
    from trainfast_runner.settings.device_counts import world_size

    spec, machine = request.spec, request.machine
    free = None if request.free_bytes is None else within_container(request.free_bytes)
    return predict_headroom(model, spec, machine, world_size(spec, machine), free)


def _peak_bytes(traced: Traced, machine: Machine) -> int | None:
    """Predict the peak of other settings; None if they cannot run on this machine."""
    from trainfast_runner.memory.available import gpu_of
    from trainfast_runner.settings.device_counts import world_size

    try:
        ranks = world_size(traced.spec, machine)
        return traced.model.corrected_for(gpu_of(traced.spec, machine)).predict(traced.spec, ranks).total_bytes
    except UserError:
        return None


def _key(request: PredictionRequest) -> str:
    """Return everything that a trace depends on."""
    from trainfast_runner.memory.traces import request_fields

    return repr(request_fields(request.spec, request.machine.device))
