"""Get a run's memory model: from the cache, or by two traces in the training Python.

Each trace is cached by everything it depends on. Forward and backward do not change with the optimizer, nor the
optimizer's step with the sequence, the attention or the checkpointing: turning one knob traces one part.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.devices import visible_to
from trainfast_runner.memory.corrections import read_device_corrections
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.pipeline import PipelineCut, stage_count
from trainfast_runner.memory.timeline import BlockStack, Segment, Work
from trainfast_runner.memory.warm_tracer import WarmTracer
from trainfast_runner.records.home import cache_directory
from trainfast_runner.records.json_lines import read_cached, write_cached
from trainfast_runner.records.run_directory import locked
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.precisions import MIXED_PRECISIONS
from trainfast_runner.settings.spec import RunSpec, strategy_of
from trainfast_runner.worker.shared.host import OnWait, make_private
from trainfast_runner.worker.shared.words import NO_WORK

STEP_KNOBS = ("precision", "seq_len", "checkpointing", "attention")
"""The knobs that decide the live bytes of forward and backward. The optimizer decides the live bytes of its own
step; all other knobs only change the number of repetitions and of ranks."""
TRACE_FORMAT = "7"
"""Format of the cached traces; a trace of another format is made again."""


class StepTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Forward and backward of a model, and its division into blocks and stages."""

    parameter_sizes: list[int]
    stacks: list[BlockStack]
    segments: list[Segment]
    pipeline: PipelineCut | None
    unused: list[str]
    """The parameters that get no gradient, and so no optimizer state."""
    library_bytes: int = 0
    """Bytes of a GPU's libraries in torch's allocator."""
    attention: str = ""
    """The model's attention kernel, and the reason that `attention=auto` took it."""


class OptimizerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes by category of the whole model before the optimizer's second step and at that step's peak."""

    before_optimizer: list[float]
    optimizer_peak: list[float]
    work: Work = NO_WORK
    """Calls, FLOPs and bytes moved by the optimizer's step."""


Trace = StepTrace | OptimizerTrace


@dataclass(frozen=True)
class TraceRequest:
    """A request to the tracer, and the cache file of its answer."""

    fields: Mapping[str, Any]
    file: Path


@dataclass(frozen=True)
class ModelRequests:
    """The requests for both traces of one model."""

    step: TraceRequest
    optimizer: TraceRequest

    @property
    def name(self) -> str:
        """The name of the model, by which its corrections are kept."""
        return f"{self.step.file.stem}-{self.optimizer.file.stem}"


def requests_for(
    spec: RunSpec, device: str, executable: str, *, whole: bool = False, installed: list[str] | None = None
) -> ModelRequests:
    """Return the requests for a run's model on `device`, cpu or cuda; `whole` traces every block.

    `installed` is `training_python.install_stamps(executable)` if the caller has it already.
    """
    step, optimizer = request_fields(spec, device, whole=whole)
    return ModelRequests(_trace_request(step, executable, installed), _trace_request(optimizer, executable, installed))


def request_fields(spec: RunSpec, device: str, *, whole: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tracer's requests for the step and for the optimizer: everything that each trace depends on."""
    strategy = strategy_of(spec.knobs)
    precision = str(spec.knobs["precision"])
    if precision == "tf32":
        # Other kernels, the same tensors.
        precision = "fp32"
    if strategy.is_zero and precision in MIXED_PRECISIONS:
        # DeepSpeed trains a model whose weights are half; it does not cast them as autocast does.
        precision = "bf16-pure"
    shared_fields: dict[str, Any] = {"model": spec.model, "objective": spec.data["objective"], "device": device}
    if whole:
        shared_fields["whole"] = True
    # A rank of tensor parallelism has a part of the model, of other shapes.
    if strategy.is_tensor_parallel:
        shared_fields["tp_degree"] = spec.knobs["tp_degree"]
    step = {**shared_fields, "part": "step", "knobs": {name: spec.knobs[name] for name in STEP_KNOBS}}
    step["knobs"]["precision"] = precision
    if strategy.memory_rule == "FullySharded" and precision in MIXED_PRECISIONS:
        step["half_weights"] = True
    # The trace is the whole model's; the number of stages says where the worker cuts it.
    if strategy.is_pipeline:
        step["stages"] = stage_count(spec.knobs)
    elif "mp" in strategy.axes and spec.knobs["devices"] is not None:
        step |= {"stages": stage_count(spec.knobs), "spread": True}
    knobs = {
        "optimizer": spec.knobs["optimizer"],
        # Under autocast the weights, and so their states, are fp32; fp16 also scales the loss.
        "precision": "fp32" if precision == "bf16" else precision,
        # Every model has eager attention, which has no parameters.
        "attention": "eager",
        # Without decay SGD has no copy of its gradients: how much decay changes nothing.
        "weight_decay": float(bool(spec.knobs["weight_decay"])),
    }
    return step, {**shared_fields, "part": "optimizer", "knobs": knobs}


def _trace_request(fields: dict[str, Any], executable: str, installed: list[str] | None) -> TraceRequest:
    name = training_python.request_hash(executable, json.dumps(fields, sort_keys=True), TRACE_FORMAT, installed)
    # The worker wants a value for each knob; those that the trace does not depend on have their defaults.
    request = {**fields, "knobs": {**defaults(), **fields["knobs"]}}
    return TraceRequest(request, cache_directory() / "traced" / f"{name}.json")


TraceOrError = Trace | UserError
"""The answer to a request."""
KINDS: tuple[type[Trace], ...] = (StepTrace, OptimizerTrace)


@dataclass(frozen=True)
class TraceProgress:
    """Progress of several traces: `done` of `total`."""

    done: int
    total: int
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
            raise training_python.ProgramCancelled
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
    on_traced(replace(_progress(requests, traces), importing=executable if is_cold else ""))

    def imported() -> None:
        on_traced(_progress(requests, traces))

    environment = _tracer_environment(device, gpus)
    with closing(_answers(executable, requests, environment, cancelled, imported, tracer)) as answers:
        for request, trace in answers:
            traces[request.file] = trace
            if not isinstance(trace, UserError):
                write_cached(request.file, trace)
            on_traced(_progress(requests, traces))
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


def _progress(requests: list[TraceRequest], traces: Mapping[Path, TraceOrError]) -> TraceProgress:
    missing_requests = [request for request in requests if request.file not in traces]
    done_count = len(requests) - len(missing_requests)
    if not missing_requests:
        return TraceProgress(done_count, len(requests))
    fields = missing_requests[0].fields
    knobs = fields["knobs"]
    text = f"forward and backward, {knobs['precision']}, checkpointing {knobs.get('checkpointing')}"
    if fields["part"] == "optimizer":
        text = f"the optimizer's step, {knobs['optimizer']}"
    return TraceProgress(done_count, len(requests), text)


def _tracer_environment(device: str, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a run on this device; this process's own if the run's GPUs are not known."""
    environment = training_python.own_environment()
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
