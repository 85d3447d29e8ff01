"""From a run's spec to the memory model of it: remembered, or traced in the training Python."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python, worker_scripts
from trainfast_runner.memory import corrections
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.parts import Asked, Course, Parts, Update, parts_of, remember, remembered
from trainfast_runner.memory.warm_tracer import WarmTracer
from trainfast_runner.records.home import cache_directory
from trainfast_runner.settings.spec import RunSpec

Found = Course | Update | UserError
"""Of a part that was asked for."""


class Untraceable(UserError):
    """The tracer cannot follow this model; the message says why. Memory is then known only by running."""


@dataclass(frozen=True)
class Tracing:
    """How far several traces are: parts `done` of `total`; the first that is missing, of which spec's, in words.

    `importing` is the Python that is still importing the training stack, empty when the stack is there.
    """

    done: int
    total: int
    place: int = 0
    words: str = ""
    importing: str = ""


def cached_model(spec: RunSpec, device: str = "cpu", python: str | None = None) -> MemoryModel | None:
    """The model of an earlier trace, at once; None where there is none. `device` is cpu or cuda."""
    return cached_models(device, python)(spec)


def cached_models(
    device: str = "cpu", python: str | None = None, gpu: str | None = None
) -> Callable[[RunSpec], MemoryModel | None]:
    """As `cached_model` for many specs of one moment: what is installed is looked at once, and a trace read once.

    With what is known of a GPU of the name `gpu`, where one is named.
    """
    try:
        executable = training_python.find(python)
    except UserError:
        return lambda spec: None
    there = training_python.installed(executable)
    found: dict[Path, Found] = {}
    models: dict[Parts, MemoryModel] = {}

    def model_of(spec: RunSpec) -> MemoryModel | None:
        parts = parts_of(spec, device, executable, there=there)
        if parts not in models:
            _read([parts], found)
            model = _model(parts, found, device)
            if isinstance(model, MemoryModel):
                models[parts] = model if gpu is None else model.on(gpu)
        return models.get(parts)

    return model_of


def trace_model(
    spec: RunSpec,
    device: str = "cpu",
    python: str | None = None,
    given_up: threading.Event | None = None,
    gpus: Sequence[str] = (),
    on_traced: Callable[[Tracing], None] = lambda tracing: None,
    tracer: WarmTracer | None = None,
) -> MemoryModel:
    """The cached model, or a new trace in the training Python: a few seconds. `gpus` as for `trace_models`.

    Setting `given_up` ends the trace with worker_scripts.GivenUp: a trace must not take the CPU of a measured run.
    Raises Untraceable where the tracer cannot follow the model, UserError where the model cannot be built at all.
    """
    executable = training_python.find(python)
    parts = parts_of(spec, device, executable)
    with _alone(parts):
        [(_, model)] = trace_models([spec], device, python, on_traced, given_up, gpus, tracer)
    if isinstance(model, UserError):
        raise model
    return model


def trace_models(
    specs: list[RunSpec],
    device: str = "cpu",
    python: str | None = None,
    on_traced: Callable[[Tracing], None] = lambda tracing: None,
    given_up: threading.Event | None = None,
    gpus: Sequence[str] = (),
    tracer: WarmTracer | None = None,
) -> Iterator[tuple[int, MemoryModel | UserError]]:
    """Each spec's place and its model, or the UserError that there is instead of it, as soon as it is there.

    What several have in common is traced once, all of it in one process of the training Python: that of `tracer`, or
    one that is ended with the iterator. Raises worker_scripts.GivenUp once `given_up` is set.

    `gpus` are the UUIDs of the run's GPUs: the tracer sees them as the run does, and nothing of a GPU for a CPU. On a
    GPU it holds a CUDA context as long as it traces, so nobody may measure that GPU's free memory meanwhile.
    """
    executable = training_python.find(python)
    there = training_python.installed(executable)
    wanted = [parts_of(spec, device, executable, there=there) for spec in specs]
    found: dict[Path, Found] = {}
    _read(wanted, found)
    owed = dict(enumerate(wanted))

    def complete() -> Iterator[tuple[int, MemoryModel | UserError]]:
        for place, parts in list(owed.items()):
            if (model := _model(parts, found, device)) is not None:
                del owed[place]
                yield place, model

    yield from complete()
    requests = _requests(wanted, found)
    is_cold = bool(requests) and (tracer is None or not tracer.is_warm(executable))
    on_traced(replace(_progress(requests, found, wanted), importing=executable if is_cold else ""))

    def imported() -> None:
        on_traced(_progress(requests, found, wanted))

    environment = _environment(device, gpus)
    with closing(_traced(executable, requests, environment, given_up, imported, tracer)) as answers:
        for asked, part in answers:
            found[asked.file] = part
            if not isinstance(part, UserError):
                with suppress(OSError):
                    remember(asked, part)
            on_traced(_progress(requests, found, wanted))
            yield from complete()


def trace_anew(spec: RunSpec, device: str = "cpu", python: str | None = None, whole: bool = False) -> MemoryModel:
    """A trace that neither reads nor writes the cache; `whole` traces every block. Raises as `trace_model`."""
    executable = training_python.find(python)
    parts = parts_of(spec, device, executable, whole)
    requests = _requests([parts], {})
    found = {asked.file: part for asked, part in _traced(executable, requests, _environment(device, ()))}
    model = _model(parts, found, device)
    if isinstance(model, UserError):
        raise model
    assert model is not None
    return model


def _model(parts: Parts, found: Mapping[Path, Found], device: str) -> MemoryModel | UserError | None:
    """Made of both parts, or the UserError with one of them; None where one is missing."""
    course, update = found.get(parts.course.file), found.get(parts.update.file)
    for part in (course, update):
        if isinstance(part, UserError):
            return part
    if not isinstance(course, Course) or not isinstance(update, Update):
        return None
    return MemoryModel(
        device=device,
        parameter_sizes=course.parameter_sizes,
        stacks=course.stacks,
        stretches=course.stretches,
        pipeline=course.pipeline,
        before_optimizer=update.before_optimizer,
        optimizer_peak=update.optimizer_peak,
        library_bytes=course.library_bytes,
        basis=_basis(course),
        attention=course.attention,
        trace=parts.name,
        machine=corrections.of_device(device),
    )


def _requests(wanted: list[Parts], found: Mapping[Path, Found]) -> list[tuple[Asked, dict[str, Any]]]:
    """What is to be traced, each once, in the order of what it is for. An update waits for its model's course."""
    requests: dict[Path, tuple[Asked, dict[str, Any]]] = {}
    for parts in wanted:
        course, update = parts.course, parts.update
        if course.file not in found and course.file not in requests:
            requests[course.file] = course, json.loads(course.request)
        if update.file not in found and update.file not in requests:
            known = found.get(course.file)
            first = {"unused": known.unused} if isinstance(known, Course) else {"after": [*requests].index(course.file)}
            requests[update.file] = update, {**json.loads(update.request), **first}
    return [*requests.values()]


def _progress(
    requests: list[tuple[Asked, dict[str, Any]]], found: Mapping[Path, Found], wanted: list[Parts]
) -> Tracing:
    missing = [(asked, request) for asked, request in requests if asked.file not in found]
    done = len(requests) - len(missing)
    if not missing:
        return Tracing(done, len(requests))
    asked, request = missing[0]
    knobs = request["knobs"]
    words = f"forward and backward, {knobs['precision']}, checkpointing {knobs.get('checkpointing')}"
    if request["part"] == "update":
        words = f"the optimizer's step, {knobs['optimizer']}"
    place = next(place for place, parts in enumerate(wanted) if asked in (parts.course, parts.update))
    return Tracing(done, len(requests), place, words)


def _environment(device: str, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a run on this device; ours if the run's GPUs are not known."""
    return {
        **worker_scripts.own_environment(),
        **(training_python.visible_to(gpus) if gpus or device == "cpu" else {}),
    }


def _traced(
    executable: str,
    requests: list[tuple[Asked, dict[str, Any]]],
    environment: dict[str, str],
    given_up: threading.Event | None = None,
    on_imported: Callable[[], None] = lambda: None,
    tracer: WarmTracer | None = None,
) -> Generator[tuple[Asked, Found]]:
    """Each part as soon as it is traced; where the process fails, what it still owed has its problem."""
    if not requests:
        return
    owed = dict(enumerate(asked for asked, _ in requests))
    arguments = [json.dumps(request, sort_keys=True) for _, request in requests]
    ask = worker_scripts.ask_each if tracer is None else tracer.ask_each
    try:
        given_up = given_up or threading.Event()
        with closing(ask(executable, "trace_memory.py", arguments, given_up, environment)) as answers:
            for answer in answers:
                if "imported" in answer:
                    on_imported()
                    continue
                asked = owed.pop(answer.pop("request"))
                try:
                    yield asked, _understood(answer, Update if "optimizer_peak" in answer else Course)
                except UserError as problem:
                    yield asked, problem
    except worker_scripts.GivenUp:
        raise
    except UserError as problem:
        yield from ((asked, problem) for asked in owed.values())


def _understood(answer: dict[str, Any], kind: type[Course] | type[Update]) -> Course | Update:
    if answer.get("error"):
        raise training_python.model_problem(answer["error"])
    if answer.get("untraceable"):
        why = f"the tracer cannot follow this model: {answer['untraceable']}"
        raise Untraceable(why, key="model", advice="search max-batch, which finds what fits by running it")
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise Untraceable(f"the tracer's answer is not understood: {error}", key="model") from None


def _read(wanted: list[Parts], found: dict[Path, Found]) -> None:
    """Add what earlier traces left of these parts, and is not there yet."""
    for parts in wanted:
        if parts.course.file not in found and (course := remembered(parts.course, Course)) is not None:
            found[parts.course.file] = course
        if parts.update.file not in found and (update := remembered(parts.update, Update)) is not None:
            found[parts.update.file] = update


@contextmanager
def _alone(parts: Parts) -> Iterator[None]:
    """Of two that want the same trace one makes it and the other waits; the lock goes with its holder."""
    file = cache_directory() / "traced" / f"{parts.name}.lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _basis(course: Course) -> str:
    """In words: what was traced, and what was put together from it."""
    shortened = [stack for stack in course.stacks if stack.kept < stack.count]
    if not shortened:
        return "a step of the whole model traced without memory"
    layers = " + ".join(f"{stack.count}" for stack in shortened)
    return f"a step of {shortened[0].kept} layers traced without memory, put together for {layers}"
