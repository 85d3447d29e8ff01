"""Get a run's memory model: from the cache, or by two traces in the training Python.

Each trace is cached by everything it depends on. Forward and backward do not change with the optimizer, nor the
optimizer's step with the sequence, the attention or the checkpointing: turning one knob traces one part.

One process of the training Python makes one batch of traces after another, for any GPUs. It reads a pipe that the
kernel closes when this program ends, and then exits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.devices import visible_to
from trainfast_runner.machine.training_python import ProgramCancelled
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
from trainfast_runner.worker.shared.host import make_private
from trainfast_runner.worker.shared.words import NO_WORK

STEP_KNOBS = ("precision", "seq_len", "checkpointing", "attention")
"""The knobs that decide the live bytes of forward and backward. The optimizer decides the live bytes of its own
step; all other knobs only change the number of repetitions and of ranks."""
TRACE_FORMAT = "7"
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
    if precision == "tf32":
        # Other kernels, the same tensors.
        precision = "fp32"
    if strategy.is_zero and precision in MIXED_PRECISIONS:
        # DeepSpeed trains a model whose weights are half; it does not cast them as autocast does.
        precision = "bf16-pure"
    shared_fields: dict[str, Any] = {"model": spec.model, "objective": spec.data["objective"], "device": device}
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
    tracer: WarmTracer | None = None,
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
        [(_, model)] = trace_models([spec], device, python, on_traced, cancelled, gpus, tracer)
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
    tracer: WarmTracer | None = None,
) -> Iterator[tuple[int, MemoryModel | UserError]]:
    """Yield each spec's index and its model or UserError, as soon as it is ready.

    Specs share traces. All are made in the process of `tracer`, or in one that ends with the iterator. Raises
    ProgramCancelled once `cancelled` is set: a trace must not take the CPU of a measured run.

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
    is_cold = total > 0 and (tracer is None or not tracer.is_warm(executable))

    def progress(importing: str = "") -> TraceProgress:
        return TraceProgress(total - len(unanswered), total, importing)

    on_traced(progress(importing=executable if is_cold else ""))
    if not total:
        return
    environment = training_python.own_environment()
    if gpus or device == "cpu":
        environment |= visible_to(gpus)
    server = WarmTracer() if tracer is None else tracer
    fields = [request.fields for request in unanswered.values()]
    try:
        with closing(server.ask_each(executable, fields, cancelled or threading.Event(), environment)) as answers:
            for answer in answers:
                if "request" in answer:
                    traces.add(unanswered.pop(answer.pop("request")), answer)
                on_traced(progress())
                yield from new_models()
    except UserError as error:
        for request in unanswered.values():
            traces.add(request, error)
        yield from new_models()
    finally:
        if tracer is None:
            server.close()


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


POLL_S = 0.1
"""Seconds between two polls for an answer or a cancellation."""
CANCELLED_WITHIN_S = 2.0
"""A cancelled trace that does not end within this time is ended with its process."""
CHUNK_BYTES = 1 << 20
"""The most bytes read from the process at once."""
DEVICE_VARIABLES = tuple(visible_to(()))


class WarmTracer:
    """One process that has imported the training stack and stays until `close`. Safe for several threads."""

    _stdin: IO[bytes]
    _stdout: IO[bytes]
    _stderr: IO[bytes]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._made_for: tuple[Any, ...] = ("",)
        """The Python of the process, its environment and its packages."""
        self._imported = False
        self._batch = self._finished_batch = 0
        """The numbers of the newest batch, and of the newest one that is over."""
        self._partial_line, self._unsent = b"", b""

    def is_warm(self, executable: str) -> bool:
        """True if a trace by this Python would begin at once."""
        return self._imported and self._made_for[0] == executable and self._is_alive()

    def ask_each(
        self,
        executable: str,
        requests: list[dict[str, Any]],
        cancelled: threading.Event,
        environment: Mapping[str, str],
    ) -> Generator[dict[str, Any]]:
        """Yield the answer to each request of the worker's memory_trace/serve.py, as soon as it arrives.

        A new process first yields `{"imported": true}`. Closing the iterator or setting `cancelled` ends the trace, not
        the process. Raises UserError when an answer fails to come, ProgramCancelled.
        """
        while not self._lock.acquire(timeout=POLL_S):
            if cancelled.is_set():
                raise ProgramCancelled
        unanswered = len(requests)
        variables = {name: value for name, value in environment.items() if name not in DEVICE_VARIABLES}
        devices = {name: environment.get(name) for name in DEVICE_VARIABLES}
        try:
            self._start(executable, variables)
            self._batch += 1
            self._send({"batch": self._batch, "requests": requests, "devices": devices})
            deadline_s = time.monotonic() + training_python.ANSWER_TIMEOUT_S
            while unanswered:
                lines = self._new_lines()
                answers = [line for line in lines or () if "imported" in line or "request" in line]
                if not answers and (lines is None or self._finished_batch == self._batch):
                    reason = training_python.last_error_line(training_python.whole_text(self._stderr))
                    raise UserError(f"{executable} cannot describe the model: {reason}", key="python")
                for answer in answers:
                    unanswered -= "request" in answer
                    yield answer
                    deadline_s = time.monotonic() + training_python.ANSWER_TIMEOUT_S
                if unanswered and cancelled.is_set():
                    raise ProgramCancelled
                if unanswered and time.monotonic() > deadline_s:
                    raise training_python.timeout_error(executable)
        finally:
            if unanswered:
                self._cancel()
            self._lock.release()

    def close(self) -> None:
        """End the process. The next trace starts a new one."""
        # A tracing thread was told to give up; the process ends with this program at the latest.
        if self._lock.acquire(timeout=CANCELLED_WITHIN_S):
            self._end()
            self._lock.release()

    def _is_alive(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def _start(self, executable: str, variables: Mapping[str, str]) -> None:
        """Start the process, unless it runs with these variables and the packages that are installed now."""
        made_for = (executable, variables, training_python.install_stamps(executable))
        if self._made_for == made_for and self._is_alive():
            return
        self._end()
        self._stderr = training_python.open_temporary_file()
        command = [executable, str(training_python.WORKER_FOLDER / "memory_trace" / "serve.py")]
        try:
            self._process = process = training_python.start_worker_program(
                executable, command, self._stderr, variables, stdin=subprocess.PIPE
            )
        except UserError:
            self._stderr.close()
            raise
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout, self._made_for = process.stdin, process.stdout, made_for
        self._imported, self._partial_line, self._unsent = False, b"", b""
        os.set_blocking(self._stdin.fileno(), False)

    def _end(self) -> None:
        """End the process and its forks: by the end of its stdin, or by SIGKILL while it imports or is stuck."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            self._stdin.close()
        try:
            process.wait(CANCELLED_WITHIN_S if self._imported else 0.0)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._stdout.close()
        self._stderr.close()

    def _cancel(self) -> None:
        """End the batch's traces. A running import can only be ended with the process."""
        deadline_s = time.monotonic() + CANCELLED_WITHIN_S
        self._send({"cancel": self._batch})
        while self._finished_batch != self._batch:
            if not self._imported or not self._is_alive() or time.monotonic() > deadline_s:
                self._end()
                return
            self._new_lines()

    def _send(self, order: Mapping[str, Any]) -> None:
        """Add a line to those that `_new_lines` sends."""
        self._unsent += json.dumps(order).encode() + b"\n"

    def _new_lines(self) -> list[dict[str, Any]] | None:
        """Send the waiting orders as far as the pipe takes them and return the lines read within POLL_S.

        None once the process has ended.
        """
        readable, writable, _ = select.select([self._stdout], [self._stdin] if self._unsent else [], [], POLL_S)
        if writable:
            with suppress(BlockingIOError, BrokenPipeError):
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        if not readable:
            return []
        chunk = os.read(self._stdout.fileno(), CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        answers = list(training_python.json_objects(lines))
        self._imported = self._imported or {"imported": True} in answers
        self._finished_batch = next((line["done"] for line in answers if "done" in line), self._finished_batch)
        return answers
