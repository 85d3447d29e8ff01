"""Get a run's memory model: from the cache, or by a trace in the training Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python, worker_programs
from trainfast_runner.machine.gpus.visible import visible_to
from trainfast_runner.memory.corrections import read_device_corrections
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.trace_requests import (
    ModelRequests,
    OptimizerTrace,
    StepTrace,
    Trace,
    TraceRequest,
    requests_for,
)
from trainfast_runner.memory.warm_tracer import WarmTracer
from trainfast_runner.records.file_locks import locked
from trainfast_runner.records.home import cache_directory
from trainfast_runner.records.json_lines import read_cached, write_cached
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.worker.shared.lock_files import OnWait
from trainfast_runner.worker.shared.private_folder import make_private

TraceOrError = Trace | UserError
"""The answer to a request."""
KINDS: tuple[type[Trace], ...] = (StepTrace, OptimizerTrace)


@dataclass(frozen=True)
class TraceProgress:
    """Progress of several traces: `done` of `total`."""

    done: int
    total: int
    index: int = 0
    """The spec that `next_trace` is for."""
    next_trace: str = ""
    """The next trace in words."""
    importing: str = ""
    """The Python that is still importing the training stack; empty when that is done."""
    waits_for: str = ""
    """The process that makes the same trace, in words; empty unless it has taken over a second."""


def cached_model(spec: RunSpec, device: str = "cpu", python: str | None = None) -> MemoryModel | None:
    """The model of an earlier trace, at once; None if there is none. `device` is cpu or cuda."""
    return cached_models(device, python)(spec)


def cached_models(
    device: str = "cpu", python: str | None = None, gpu: str | None = None
) -> Callable[[RunSpec], MemoryModel | None]:
    """Return a function from a spec to its cached model; packages and each trace are read once.

    With the corrections of the GPU named `gpu`, if one is named.
    """
    try:
        executable = training_python.find_python(python)
    except UserError:
        return lambda spec: None
    installed = training_python.install_stamps(executable)
    traces: dict[Path, TraceOrError] = {}
    models: dict[str, MemoryModel] = {}

    def model_of(spec: RunSpec) -> MemoryModel | None:
        model_requests = requests_for(spec, device, executable, installed=installed)
        if model_requests.name not in models:
            _read_cached([model_requests], traces)
            model = _model(model_requests, traces, device)
            if isinstance(model, MemoryModel):
                models[model_requests.name] = model if gpu is None else model.corrected_for(gpu)
        return models.get(model_requests.name)

    return model_of


def trace_model(
    spec: RunSpec,
    device: str = "cpu",
    python: str | None = None,
    cancelled: threading.Event | None = None,
    gpus: Sequence[str] = (),
    on_traced: Callable[[TraceProgress], None] = lambda tracing: None,
    tracer: WarmTracer | None = None,
) -> MemoryModel:
    """Return the cached model, or trace it in the training Python: a few seconds. `gpus` as for `trace_models`.

    Setting `cancelled` raises worker_programs.ProgramCancelled: a trace must not take the CPU of a measured run.
    Raises UserError if the tracer cannot follow the model, or the model cannot be built at all.
    """
    executable = training_python.find_python(python)

    def on_wait(holder: str) -> None:
        if cancelled is not None and cancelled.is_set():
            raise worker_programs.ProgramCancelled
        if holder:
            on_traced(TraceProgress(0, 0, waits_for=holder))

    with _trace_lock(requests_for(spec, device, executable), on_wait):
        [(_, model)] = trace_models([spec], device, python, on_traced, cancelled, gpus, tracer)
    if isinstance(model, UserError):
        raise model
    return model


def trace_models(
    specs: list[RunSpec],
    device: str = "cpu",
    python: str | None = None,
    on_traced: Callable[[TraceProgress], None] = lambda tracing: None,
    cancelled: threading.Event | None = None,
    gpus: Sequence[str] = (),
    tracer: WarmTracer | None = None,
) -> Iterator[tuple[int, MemoryModel | UserError]]:
    """Yield each spec's index and its model or UserError, as soon as it is ready.

    Specs share traces. All are made in one process of the training Python: that of `tracer`, or one that ends with the
    iterator. Raises worker_programs.ProgramCancelled once `cancelled` is set.

    `gpus` are the UUIDs of the run's GPUs: the tracer sees them as the run does, and no GPU for a CPU. On a GPU it
    holds a CUDA context while it traces, so nobody may measure that GPU's free memory meanwhile.
    """
    executable = training_python.find_python(python)
    installed = training_python.install_stamps(executable)
    requests_of_specs = [requests_for(spec, device, executable, installed=installed) for spec in specs]
    traces: dict[Path, TraceOrError] = {}
    _read_cached(requests_of_specs, traces)
    waiting = dict(enumerate(requests_of_specs))

    def new_models() -> Iterator[tuple[int, MemoryModel | UserError]]:
        for index, model_requests in list(waiting.items()):
            if (model := _model(model_requests, traces, device)) is not None:
                del waiting[index]
                yield index, model

    yield from new_models()
    requests = _missing_requests(requests_of_specs, traces)
    is_cold = bool(requests) and (tracer is None or not tracer.is_warm(executable))
    on_traced(replace(_progress(requests, traces, requests_of_specs), importing=executable if is_cold else ""))

    def imported() -> None:
        on_traced(_progress(requests, traces, requests_of_specs))

    environment = _tracer_environment(device, gpus)
    with closing(_answers(executable, requests, environment, cancelled, imported, tracer)) as answers:
        for request, trace in answers:
            traces[request.file] = trace
            if not isinstance(trace, UserError):
                write_cached(request.file, trace)
            on_traced(_progress(requests, traces, requests_of_specs))
            yield from new_models()


def trace_uncached(
    spec: RunSpec, device: str = "cpu", python: str | None = None, *, whole: bool = False
) -> MemoryModel:
    """Trace without reading or writing the cache; `whole` traces every block. Raises as `trace_model`.

    Tests and benchmarks alone call it.
    """
    executable = training_python.find_python(python)
    model_requests = requests_for(spec, device, executable, whole=whole)
    requests = _missing_requests([model_requests], {})
    traces = {request.file: trace for request, trace in _answers(executable, requests, _tracer_environment(device, ()))}
    model = _model(model_requests, traces, device)
    if isinstance(model, UserError):
        raise model
    assert model is not None
    return model


def _model(
    model_requests: ModelRequests, traces: Mapping[Path, TraceOrError], device: str
) -> MemoryModel | UserError | None:
    """Make the model of both traces, or return the UserError of one; None if one is missing."""
    step = traces.get(model_requests.step.file)
    optimizer = traces.get(model_requests.optimizer.file)
    for trace in (step, optimizer):
        if isinstance(trace, UserError):
            return trace
    if not isinstance(step, StepTrace) or not isinstance(optimizer, OptimizerTrace):
        return None
    return MemoryModel(
        device=device,
        parameter_sizes=step.parameter_sizes,
        stacks=step.stacks,
        segments=step.segments,
        pipeline=step.pipeline,
        before_optimizer=optimizer.before_optimizer,
        optimizer_peak=optimizer.optimizer_peak,
        library_bytes=step.library_bytes,
        optimizer_work=optimizer.work,
        basis=_basis(step),
        attention=step.attention,
        trace=model_requests.name,
        corrections=read_device_corrections(device),
    )


def _missing_requests(
    requests_of_specs: list[ModelRequests], traces: Mapping[Path, TraceOrError]
) -> list[TraceRequest]:
    """The requests of the missing traces, each once, in the order of `requests_of_specs`.

    An optimizer's request names the unused parameters of its model's step, or the request that will tell them.
    """
    requests: dict[Path, TraceRequest] = {}
    for model_requests in requests_of_specs:
        step, optimizer = model_requests.step, model_requests.optimizer
        if step.file not in traces:
            requests.setdefault(step.file, step)
        if optimizer.file not in traces and optimizer.file not in requests:
            step_trace = traces.get(step.file)
            unused = (
                {"unused": step_trace.unused}
                if isinstance(step_trace, StepTrace)
                else {"after": [*requests].index(step.file)}
            )
            requests[optimizer.file] = replace(optimizer, fields={**optimizer.fields, **unused})
    return [*requests.values()]


def _progress(
    requests: list[TraceRequest], traces: Mapping[Path, TraceOrError], requests_of_specs: list[ModelRequests]
) -> TraceProgress:
    missing_requests = [request for request in requests if request.file not in traces]
    done_count = len(requests) - len(missing_requests)
    if not missing_requests:
        return TraceProgress(done_count, len(requests))
    file, fields = missing_requests[0].file, missing_requests[0].fields
    knobs = fields["knobs"]
    text = f"forward and backward, {knobs['precision']}, checkpointing {knobs.get('checkpointing')}"
    if fields["part"] == "optimizer":
        text = f"the optimizer's step, {knobs['optimizer']}"
    files = [(model_requests.step.file, model_requests.optimizer.file) for model_requests in requests_of_specs]
    index = next(index for index, files_of_model in enumerate(files) if file in files_of_model)
    return TraceProgress(done_count, len(requests), index, text)


def _tracer_environment(device: str, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a run on this device; this process's own if the run's GPUs are not known."""
    environment = worker_programs.own_environment()
    if gpus or device == "cpu":
        return {**environment, **visible_to(gpus)}
    return environment


def _answers(
    executable: str,
    requests: list[TraceRequest],
    environment: dict[str, str],
    cancelled: threading.Event | None = None,
    on_imported: Callable[[], None] = lambda: None,
    tracer: WarmTracer | None = None,
) -> Generator[tuple[TraceRequest, TraceOrError]]:
    """Yield each trace as soon as it is made; if the process fails, the missing ones get its UserError."""
    if not requests:
        return
    unanswered = dict(enumerate(requests))
    server = WarmTracer() if tracer is None else tracer
    try:
        fields = [dict(request.fields) for request in requests]
        cancelled = cancelled or threading.Event()
        with closing(server.ask_each(executable, fields, cancelled, environment)) as answers:
            for answer in answers:
                if "imported" in answer:
                    on_imported()
                    continue
                request = unanswered.pop(answer.pop("request"))
                try:
                    yield request, _decoded_trace(answer, request.fields)
                except UserError as error:
                    yield request, error
    except UserError as error:
        yield from ((request, error) for request in unanswered.values())
    finally:
        if tracer is None:
            server.close()


def _decoded_trace(answer: dict[str, Any], fields: Mapping[str, Any]) -> Trace:
    is_optimizer = fields["part"] == "optimizer"
    if answer.get("error"):
        raise training_python.model_error(answer["error"])
    if answer.get("untraceable"):
        part = f"the optimizer step of {fields['knobs']['optimizer']}" if is_optimizer else "this model"
        reason = f"the tracer cannot follow {part}: {answer['untraceable']}"
        key = "optimizer" if is_optimizer else "model"
        raise UserError(
            reason,
            key=key,
            advice="a batch search, which finds what fits by running it",
            option="search max-batch, which finds what fits by running it",
        )
    kind: type[StepTrace] | type[OptimizerTrace] = OptimizerTrace if is_optimizer else StepTrace
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"the tracer's answer is not understood: {error}", key="model") from None


def _read_cached(requests_of_specs: list[ModelRequests], traces: dict[Path, TraceOrError]) -> None:
    """Add the cached traces to `traces`."""
    for model_requests in requests_of_specs:
        for request, kind in zip((model_requests.step, model_requests.optimizer), KINDS, strict=True):
            if request.file not in traces and (trace := read_cached(request.file, kind)) is not None:
                traces[request.file] = trace


@contextmanager
def _trace_lock(model_requests: ModelRequests, on_wait: OnWait) -> Iterator[None]:
    """Hold the trace's lock: of two processes that want the same trace one makes it and the other waits."""
    file = cache_directory() / "traced" / f"{model_requests.name}.lock"
    with ExitStack() as locks:
        with suppress(OSError):
            make_private(file.parent)
            locks.enter_context(locked(file, on_wait=on_wait))
        yield


def _basis(step: StepTrace) -> str:
    """Describe the traced step, and the layers put together from it."""
    shortened_stacks = [stack for stack in step.stacks if stack.kept < stack.count]
    if not shortened_stacks:
        return "a step of the whole model traced without memory"
    layers = " + ".join(f"{stack.count}" for stack in shortened_stacks)
    return f"a step of {shortened_stacks[0].kept} layers traced without memory, put together for {layers}"
