"""Get a run's memory model: from the cache, or by two traces in the training Python.

Each trace is cached by everything it depends on. Forward and backward do not change with the optimizer, nor the
optimizer's step with the sequence, the attention or the checkpointing: turning one knob traces one part.

The warm Python of this program makes one batch of traces after another, for any GPUs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.devices import visible_to
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.machine.warm_python import WARM
from trainfast_runner.memory.corrections import read_device_corrections
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.pipeline import stage_count
from trainfast_runner.memory.timeline import BlockStack, StepTrace, Work
from trainfast_runner.records.home import cache_directory
from trainfast_runner.records.json_lines import read_cached, write_cached
from trainfast_runner.records.run_directory import locked
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.precisions import MIXED_PRECISIONS
from trainfast_runner.settings.spec import RunSpec, strategy_of
from trainfast_runner.worker.catalog import ADAPTER_KNOBS, LEVERS, WITH_ADAPTERS
from trainfast_runner.worker.shared.host import make_private
from trainfast_runner.worker.shared.words import NO_WORK

STEP_KNOBS = ("precision", "seq_len", *(name for name, entry in LEVERS.items() if entry.is_traced))
"""The knobs that decide the live bytes of forward and backward. The optimizer decides the live bytes of its own
step; all other knobs only change the number of repetitions and of ranks."""
TRACE_FORMAT = "10"
"""Format of the cached traces; a trace of another format is made again."""


class OptimizerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes by category of the whole model before the optimizer's second step and at that step's peak."""

    before_optimizer: list[float]
    optimizer_peak: list[float]
    optimizer_work: Work = msgspec.field(default=NO_WORK, name="work")
    """Calls, FLOPs and bytes moved by the optimizer's step."""


class TraceRequest(NamedTuple):
    """A request to the tracer, the cache file of its answer, and the kind of the answer."""

    fields: dict[str, Any]
    file: Path
    kind: type[StepTrace] | type[OptimizerTrace]


class ModelRequests(NamedTuple):
    """The requests for both traces of one model."""

    step: TraceRequest
    optimizer: TraceRequest

    @property
    def name(self) -> str:
        """The name of the model, by which its corrections are kept."""
        return f"{self.step.file.stem}-{self.optimizer.file.stem}"


class TraceProgress(NamedTuple):
    """Progress of several traces: `done` of `total`."""

    done: int
    total: int
    importing: str = ""
    """The Python that is still importing the training stack; empty when that is done."""
    waits_for: str = ""
    """The process that makes the same trace, in words; empty unless it has taken over a second."""


OnTraced = Callable[[TraceProgress], None]


def request_fields(spec: RunSpec, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tracer's requests for the step and for the optimizer: everything that each trace depends on."""
    strategy = strategy_of(spec.knobs)
    precision = str(spec.knobs["precision"])
    # Other kernels, the same tensors.
    precision = {"tf32": "fp32", "fp8": "bf16"}.get(precision, precision)
    if strategy.is_zero and precision in MIXED_PRECISIONS:
        # DeepSpeed trains a model whose weights are half; it does not cast them as autocast does.
        precision = "bf16-pure"
    shared_fields: dict[str, Any] = {"model": spec.model, "objective": spec.data["objective"], "device": device}
    # A rank of tensor parallelism has a part of the model, of other shapes.
    if strategy.is_tensor_parallel:
        shared_fields["tp_degree"] = spec.knobs["tp_degree"]
    if "ep_degree" in strategy.knobs and spec.knobs["ep_degree"] != 1:
        shared_fields["expert_parallel"] = True
    step = {**shared_fields, "part": "step", "knobs": {name: spec.knobs[name] for name in STEP_KNOBS}}
    # With method=full no other parameters are there.
    adapters = {name: spec.knobs[name] for name in ADAPTER_KNOBS if spec.knobs["method"] in WITH_ADAPTERS}
    step["knobs"] |= adapters
    if "sequence_parallel" in strategy.knobs and spec.knobs["sequence_parallel"] == "on":
        step["sequence_parallel"] = True
    step["knobs"]["precision"] = precision
    if spec.knobs["compile"] != "off":
        # A compiled step keeps the same tensors by each of its forms.
        step["knobs"]["compile"] = "default"
    if spec.knobs["loss"] == "liger":
        # Triton's kernels take no fake tensors.
        step["knobs"]["loss"] = "chunked"
    if strategy.memory_rule in ("FullySharded", "Staged") and strategy.shards and precision in MIXED_PRECISIONS:
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
        "method": spec.knobs["method"],
        **adapters,
    }
    return step, {**shared_fields, "part": "optimizer", "knobs": knobs}


class Traces:
    """The traces of one training Python for one device, cpu or cuda, as far as they are cached or added."""

    def __init__(self, device: str, executable: str, gpu: str | None = None) -> None:
        """Models get the corrections of the GPU named `gpu`, if one is named."""
        self._device, self._executable = device, executable
        self._installed = training_python.install_stamps(executable)
        self._corrections = read_device_corrections(device, gpu)
        self._known: dict[Path, StepTrace | OptimizerTrace | UserError] = {}

    def requests_for(self, spec: RunSpec) -> ModelRequests:
        """The requests for a run's model."""
        step, optimizer = request_fields(spec, self._device)
        return ModelRequests(self._request(step, StepTrace), self._request(optimizer, OptimizerTrace))

    def model(self, requests: ModelRequests) -> MemoryModel | UserError | None:
        """The model of both traces, or the UserError of one; None if one is missing."""
        step, optimizer = map(self._trace, requests)
        error = next((trace for trace in (step, optimizer) if isinstance(trace, UserError)), None)
        if not isinstance(step, StepTrace) or not isinstance(optimizer, OptimizerTrace):
            return error
        return MemoryModel(
            device=self._device,
            basis=_basis(step.stacks),
            trace=requests.name,
            corrections=self._corrections,
            **msgspec.structs.asdict(step),
            **msgspec.structs.asdict(optimizer),
        )

    def missing(self, models: Iterable[ModelRequests]) -> list[TraceRequest]:
        """The requests of the missing traces, each once, in this order.

        An optimizer's request names the unused parameters of its model's step, or the request that will tell them.
        """
        missing: dict[Path, TraceRequest] = {}
        for step, optimizer in models:
            step_trace = self._trace(step)
            if step_trace is None:
                missing.setdefault(step.file, step)
            if self._trace(optimizer) is None and optimizer.file not in missing:
                unused = (
                    {"unused": step_trace.unused}
                    if isinstance(step_trace, StepTrace)
                    else {"after": [*missing].index(step.file)}
                )
                missing[optimizer.file] = optimizer._replace(fields={**optimizer.fields, **unused})
        return [*missing.values()]

    def add(self, request: TraceRequest, answer: dict[str, Any] | UserError) -> None:
        """Keep the tracer's answer, in the cache if it is a trace."""
        trace = answer if isinstance(answer, UserError) else _decoded(answer, request)
        self._known[request.file] = trace
        if not isinstance(trace, UserError):
            write_cached(request.file, trace)

    def _request(self, fields: dict[str, Any], kind: type[StepTrace] | type[OptimizerTrace]) -> TraceRequest:
        text = json.dumps(fields, sort_keys=True)
        name = training_python.request_hash(self._executable, text, TRACE_FORMAT, self._installed)
        # The worker wants a value for each knob; those that the trace does not depend on have their defaults.
        request = {**fields, "knobs": {**defaults(), **fields["knobs"]}}
        return TraceRequest(request, cache_directory() / "traced" / f"{name}.json", kind)

    def _trace(self, request: TraceRequest) -> StepTrace | OptimizerTrace | UserError | None:
        if request.file not in self._known and (trace := read_cached(request.file, request.kind)) is not None:
            self._known[request.file] = trace
        return self._known.get(request.file)


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
        traces = Traces(device, training_python.find_python(python), gpu)
    except UserError:
        return lambda spec: None

    def model_of(spec: RunSpec) -> MemoryModel | None:
        model = traces.model(traces.requests_for(spec))
        return model if isinstance(model, MemoryModel) else None

    return model_of


def trace_model(
    spec: RunSpec,
    device: str = "cpu",
    python: str | None = None,
    cancelled: threading.Event | None = None,
    gpus: Sequence[str] = (),
    on_traced: OnTraced = lambda progress: None,
) -> MemoryModel:
    """Return the cached model, or trace it in the training Python: a few seconds. Parameters as for `trace_models`.

    Of two processes that want the same trace one makes it and the other waits. Raises ProgramCancelled, and UserError
    if the tracer cannot follow the model, or the model cannot be built at all.
    """

    def on_wait(holder: str) -> None:
        if cancelled is not None and cancelled.is_set():
            raise ProgramCancelled
        if holder:
            on_traced(TraceProgress(0, 0, waits_for=holder))

    requests = Traces(device, training_python.find_python(python)).requests_for(spec)
    with ExitStack() as locks:
        with suppress(OSError):
            make_private(requests.step.file.parent)
            lock = requests.step.file.with_name(f"{requests.name}.lock")
            locks.enter_context(locked(lock, on_wait=on_wait))
        [(_, model)] = trace_models([spec], device, python, on_traced, cancelled, gpus)
    if isinstance(model, UserError):
        raise model
    return model


def trace_models(
    specs: list[RunSpec],
    device: str = "cpu",
    python: str | None = None,
    on_traced: OnTraced = lambda progress: None,
    cancelled: threading.Event | None = None,
    gpus: Sequence[str] = (),
) -> Iterator[tuple[int, MemoryModel | UserError]]:
    """Yield each spec's index and its model or UserError, as soon as it is ready.

    Specs share traces. Raises ProgramCancelled once `cancelled` is set: a trace must not take a measured run's CPU.

    `gpus` are the UUIDs of the run's GPUs: the tracer sees them as the run does, and no GPU for a CPU. On a GPU it
    holds a CUDA context while it traces, so nobody may measure that GPU's free memory meanwhile.
    """
    executable = training_python.find_python(python)
    traces = Traces(device, executable)
    waiting = {index: traces.requests_for(spec) for index, spec in enumerate(specs)}

    def new_models() -> Iterator[tuple[int, MemoryModel | UserError]]:
        for index, requests in list(waiting.items()):
            if (model := traces.model(requests)) is not None:
                del waiting[index]
                yield index, model

    yield from new_models()
    unanswered = dict(enumerate(traces.missing(waiting.values())))
    total = len(unanswered)
    is_cold = total > 0 and not WARM.is_warm(executable)

    on_traced(TraceProgress(0, total, executable if is_cold else ""))
    if not total:
        return
    environment = training_python.own_environment()
    if gpus or device == "cpu":
        environment |= visible_to(gpus)
    fields = [request.fields for request in unanswered.values()]
    try:
        with closing(WARM.ask_each(executable, fields, cancelled, environment)) as answers:
            for answer in answers:
                if "request" in answer:
                    traces.add(unanswered.pop(answer.pop("request")), answer)
                on_traced(TraceProgress(total - len(unanswered), total))
                yield from new_models()
    except UserError as error:
        for request in unanswered.values():
            traces.add(request, error)
        yield from new_models()


def _decoded(answer: dict[str, Any], request: TraceRequest) -> StepTrace | OptimizerTrace | UserError:
    """The trace in an answer, or the reason that there is none."""
    if answer.get("error"):
        return training_python.model_error(answer["error"])
    if answer.get("untraceable"):
        is_optimizer = request.kind is OptimizerTrace
        part = f"the optimizer step of {request.fields['knobs']['optimizer']}" if is_optimizer else "this model"
        return UserError(
            f"the tracer cannot follow {part}: {answer['untraceable']}",
            key="optimizer" if is_optimizer else "model",
            advice="a batch search, which finds what fits by running it",
            option="search max-batch, which finds what fits by running it",
        )
    try:
        return msgspec.convert(answer, request.kind)
    except msgspec.ValidationError as error:
        return UserError(f"the tracer's answer is not understood: {error}", key="model")


def _basis(stacks: list[BlockStack]) -> str:
    """Describe the traced step, and the layers put together from it."""
    shortened_stacks = [stack for stack in stacks if stack.kept < stack.count]
    if not shortened_stacks:
        return "a step of the whole model traced without memory"
    layers = " + ".join(f"{stack.count}" for stack in shortened_stacks)
    return f"a step of {shortened_stacks[0].kept} layers traced without memory, put together for {layers}"
