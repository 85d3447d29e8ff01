"""From a run's spec to the memory model of it: remembered, or traced in the training Python."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner import training_python
from trainfast_runner.home import cache_directory
from trainfast_runner.json_lines import write_atomically
from trainfast_runner.memory_model import corrections
from trainfast_runner.memory_model.model import MemoryModel
from trainfast_runner.memory_model.pipeline import stage_count
from trainfast_runner.memory_model.sharing import PIPELINES
from trainfast_runner.problem import Problem
from trainfast_runner.sharded_rules import TENSOR_PARALLEL
from trainfast_runner.spec import RunSpec

TRACED_KNOBS = ("precision", "seq_len", "checkpointing", "optimizer", "attention")
"""The knobs that decide what is alive in a step; the others only say how often, how many and on which rank."""
MOST_PROCESSES = 2
"""That trace at the same time: each takes one core and half a GiB."""
FORMAT = "1"
"""Of what is remembered; a trace of another format is made again."""


class Untraceable(Problem):
    """The tracer cannot follow this model; the message says why. Memory is then known only by running."""


def cached_model(spec: RunSpec, device: str = "cpu", python: str | None = None) -> MemoryModel | None:
    """The model of an earlier trace, at once; None where there is none. `device` is cpu or cuda."""
    try:
        executable = training_python.find(python)
    except Problem:
        return None
    return _remembered(_file(executable, _request(spec, device)))


def trace_model(
    spec: RunSpec, device: str = "cpu", python: str | None = None, given_up: threading.Event | None = None
) -> MemoryModel:
    """The cached model, or a new trace in the training Python: a few seconds.

    Setting `given_up` ends the trace with training_python.GivenUp: a trace must not take the CPU of a measured run.
    Raises Untraceable where the tracer cannot follow the model, Problem where the model cannot be built at all.
    """
    executable = training_python.find(python)
    request = _request(spec, device)
    file = _file(executable, request)
    with _alone(file):
        model = _remembered(file)
        if model is None:
            model = _trace(executable, request, given_up)
            _remember(file, model)
            model = _of_this_machine(model, file)
    return model


def trace_models(
    specs: list[RunSpec],
    device: str = "cpu",
    python: str | None = None,
    on_traced: Callable[[int, int], None] = lambda done, of: None,
) -> list[MemoryModel | Problem]:
    """The cached or newly traced model of each, or the Problem that there is instead of it.

    What has to be traced is shared out to few processes, since each pays its imports; `on_traced` hears how many of
    how many are done. A Ctrl-C ends the processes.
    """
    executable = training_python.find(python)
    requests = {_file(executable, request): request for request in (_request(spec, device) for spec in specs)}
    models: dict[Path, MemoryModel | Problem] = {}
    for file in requests:
        if (remembered := _remembered(file)) is not None:
            models[file] = remembered
    missing = [file for file in requests if file not in models]
    total, given_up = len(missing), threading.Event()
    on_traced(0, total)

    def trace(share: list[Path]) -> None:
        for file, found in _trace_each(executable, {file: requests[file] for file in share}, given_up):
            models[file] = found
            on_traced(sum(file in models for file in missing), total)

    with ThreadPoolExecutor(max_workers=MOST_PROCESSES) as pool:
        try:
            list(pool.map(trace, _shares(missing, requests)))
        except BaseException:
            given_up.set()
            raise
    return [models[_file(executable, _request(spec, device))] for spec in specs]


def _shares(files: list[Path], requests: dict[Path, dict[str, Any]]) -> list[list[Path]]:
    """The traces of each process. A slice takes its process group, and so has one of its own."""
    alone = [[file] for file in files if "tp_degree" in requests[file]]
    rest = [file for file in files if "tp_degree" not in requests[file]]
    return [share for share in (*(rest[n::MOST_PROCESSES] for n in range(MOST_PROCESSES)), *alone) if share]


def _trace_each(
    executable: str, requests: dict[Path, dict[str, Any]], given_up: threading.Event
) -> Iterator[tuple[Path, MemoryModel | Problem]]:
    """Traced in one process and remembered; where the process fails, what it still owed has its problem."""
    owed = list(requests)
    asked = [json.dumps(requests[file], sort_keys=True) for file in owed]
    try:
        with closing(training_python.ask_each(executable, "trace_memory.py", asked, given_up)) as answers:
            for answer in answers:
                file = owed.pop(0)
                try:
                    model = _understood(answer, requests[file])
                except Problem as problem:
                    yield file, problem
                else:
                    _remember(file, model)
                    yield file, _of_this_machine(model, file)
    except training_python.GivenUp:
        raise
    except Problem as problem:
        yield from ((file, problem) for file in owed)


def trace_anew(spec: RunSpec, device: str = "cpu", python: str | None = None, whole: bool = False) -> MemoryModel:
    """A trace that neither reads nor writes the cache; `whole` traces every block. Raises as `trace_model`."""
    request = {**_request(spec, device), **({"whole": True} if whole else {})}
    return _trace(training_python.find(python), request, None)


def _request(spec: RunSpec, device: str) -> dict[str, Any]:
    knobs = {name: spec.knobs[name] for name in TRACED_KNOBS}
    if knobs["precision"] == "tf32":
        # Other kernels, the same tensors.
        knobs["precision"] = "fp32"
    if str(spec.knobs["strategy"]).startswith("zero") and knobs["precision"] in ("fp16", "bf16"):
        # DeepSpeed trains a model whose weights are half; it does not cast them as autocast does.
        knobs["precision"] = "bf16-pure"
    request = {"model": spec.model, "objective": spec.data["objective"], "knobs": knobs, "device": device}
    # A slice of a model has other shapes.
    if spec.knobs["strategy"] in TENSOR_PARALLEL:
        return {**request, "tp_degree": spec.knobs["tp_degree"]}
    # The step is the whole model's; where the worker cuts it depends on how often.
    return {**request, "stages": stage_count(spec.knobs)} if spec.knobs["strategy"] in PIPELINES else request


def _file(executable: str, request: dict[str, Any]) -> Path:
    name = training_python.stamp(executable, json.dumps(request, sort_keys=True), FORMAT)
    return cache_directory() / "traced" / f"{name}.json"


def _remembered(file: Path) -> MemoryModel | None:
    try:
        model = msgspec.json.decode(file.read_bytes(), type=MemoryModel)
    except (OSError, msgspec.DecodeError):
        return None
    return _of_this_machine(model, file)


def _remember(file: Path, model: MemoryModel) -> None:
    with suppress(OSError):  # without a cache every launch traces again, which costs seconds and nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, msgspec.json.encode(model))


def _of_this_machine(model: MemoryModel, file: Path) -> MemoryModel:
    machine = corrections.read().get(model.device, corrections.Machine())
    return msgspec.structs.replace(model, trace=file.stem, machine=machine)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Of two that want the same trace one makes it and the other waits; the lock goes with its holder."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _trace(executable: str, request: dict[str, Any], given_up: threading.Event | None = None) -> MemoryModel:
    answer = training_python.ask(executable, "trace_memory.py", [json.dumps(request, sort_keys=True)], given_up)
    return _understood(answer, request)


def _understood(answer: dict[str, Any], request: dict[str, Any]) -> MemoryModel:
    if answer.get("error"):
        error = answer["error"]
        raise Problem(
            str(error.get("message")), key=error.get("key"), allowed=error.get("allowed"), nearest=error.get("nearest")
        )
    if answer.get("untraceable"):
        raise Untraceable(f"the tracer cannot follow this model: {answer['untraceable']}", key="model")
    try:
        model = msgspec.convert({**answer, "device": request["device"]}, MemoryModel)
    except msgspec.ValidationError as error:
        raise Untraceable(f"the tracer's answer is not understood: {error}", key="model") from None
    return msgspec.structs.replace(model, basis=_basis(model))


def _basis(model: MemoryModel) -> str:
    """In words: what was traced, and what was put together from it."""
    shortened = [stack for stack in model.stacks if stack.kept < stack.count]
    if not shortened:
        return "a step of the whole model traced without memory"
    layers = " + ".join(f"{stack.count}" for stack in shortened)
    return f"a step of {shortened[0].kept} layers traced without memory, put together for {layers}"
