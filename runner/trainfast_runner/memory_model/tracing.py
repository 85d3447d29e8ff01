"""From a run's spec to the memory model of it: remembered, or traced in the training Python."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner import training_python
from trainfast_runner.home import cache_directory
from trainfast_runner.json_lines import write_atomically
from trainfast_runner.memory_model import corrections
from trainfast_runner.memory_model.model import MemoryModel
from trainfast_runner.problem import Problem
from trainfast_runner.sharded_rules import TENSOR_PARALLEL
from trainfast_runner.spec import RunSpec

TRACED_KNOBS = ("precision", "seq_len", "checkpointing", "optimizer", "attention")
"""The knobs that decide what is alive in a step; the others only say how often, how many and on which rank."""
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
            with suppress(OSError):  # without a cache every launch traces again, which costs seconds and nothing else
                write_atomically(file, msgspec.json.encode(model))
            model = _of_this_machine(model, file)
    return model


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
    sliced = spec.knobs["strategy"] in TENSOR_PARALLEL
    return {**request, "tp_degree": spec.knobs["tp_degree"]} if sliced else request


def _file(executable: str, request: dict[str, Any]) -> Path:
    name = training_python.stamp(executable, json.dumps(request, sort_keys=True), FORMAT)
    return cache_directory() / "traced" / f"{name}.json"


def _remembered(file: Path) -> MemoryModel | None:
    try:
        model = msgspec.json.decode(file.read_bytes(), type=MemoryModel)
    except (OSError, msgspec.DecodeError):
        return None
    return _of_this_machine(model, file)


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
