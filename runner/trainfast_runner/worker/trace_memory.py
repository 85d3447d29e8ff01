"""Takes training steps without memory and answers, one JSON line for each request, what was alive in them when.

`PY trace_memory.py REQUEST...`, where a request is JSON with `part`, `model`, `objective`, `knobs`, `device`, `whole`
to trace every block, `tp_degree` for a slice and `stages` for a pipeline. The part `course` is a step's forward and
backward at two batch sizes. The part `update` is the optimizer's step; either `unused` names the parameters that get no
gradient, or `after` is the place of the course that says so. An answer has `request`, the place of what it answers,
which is not always the order of asking.

The real worker builds the model and the optimizer and takes the step; only its tensors are fake. Of a stack of blocks
that are all alike three are traced: the first, one that stands for all between, and the last. The libraries are
imported once, and what can be traced side by side is, in forks of that process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # sys/prctl.h
FIRST_TRACE_IMPORTS = ("torch._dynamo", "transformers.modeling_utils", "transformers.generation.utils")
"""What a first trace imports otherwise, in every fork again: a thousand modules, which take as long as torch."""
PROCESSES = 2
"""That trace at a time: each takes one core."""
UNUSED = ("accelerate", "deepspeed", "peft", "kernels", "sklearn", "scipy", "tensorflow", "jax", "flax", "torchvision")
"""Packages that transformers imports where they are, and a trace has no use for."""


@dataclass(frozen=True, order=True)
class Task:
    """What one process does at a time: a part of a request at one of the two sizes it is put together from."""

    request: int
    size: int


def answers(requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """`{"imported": true}`, then each request's answer once it is there.

    `error` has what cannot be built, `untraceable` why there is no trace.
    """
    try:
        import_for(requests)
    except Exception as error:
        yield from ({"request": number, **_untraceable(error)} for number in range(len(requests)))
        return
    yield {"imported": True}
    owed = set(range(len(requests)))
    try:
        for number, answer in _traced(requests):
            owed.discard(number)
            yield {"request": number, **answer}
    except BrokenProcessPool:
        yield from ({"request": number, "untraceable": "the process that traced it died"} for number in sorted(owed))


def import_for(requests: list[dict[str, Any]]) -> None:
    """Import what tracing takes, once for all its processes. Raises whatever an import raises."""
    from .hidden_packages import hide

    gc.disable()
    hide(UNUSED)
    import torch

    from .build import import_model_code
    from .memory_trace import step_course
    from .model_config import resolve_config

    assert step_course
    for name in FIRST_TRACE_IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    for model, objective in {json.dumps(one["model"]): (one["model"], one["objective"]) for one in requests}.values():
        with suppress(Exception):  # whoever builds it says what is wrong with it
            import_model_code(resolve_config(model), objective)
    # A fork of a process whose kernels have run on several threads hangs at its first kernel.
    torch.set_num_threads(1)
    # What was imported stays: a collection need not look at it, nor a fork copy it.
    gc.freeze()
    gc.enable()


def _traced(requests: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The answers as they come, the first requests' first where there is a choice."""
    ready = [Task(number, size) for number, request in enumerate(requests) if "after" not in request for size in (0, 1)]
    found: dict[Task, dict[str, Any]] = {}
    running: dict[Future[dict[str, Any]], Task] = {}
    with _pool_for(requests) as pool:
        while ready or running:
            while ready and len(running) < PROCESSES:
                task = ready.pop(0)
                running[pool.submit(_take, requests[task.request], task.size)] = task
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                found[task] = future.result()
                both = [found.get(Task(task.request, size)) for size in (0, 1)]
                if both[0] is not None and both[1] is not None:
                    yield task.request, _joined(both[0], both[1])
                if task.size > 0:
                    continue
                for number, request in enumerate(requests):
                    if request.get("after") == task.request:
                        # Of a model that cannot be built there is no update either.
                        requests[number] = {**request, "unused": found[task].get("unused", [])}
                        ready += [Task(number, 0), Task(number, 1)]
                ready.sort()


def die_with_parent() -> None:
    """Have the kernel end this process as soon as the one that forked it ends. Linux alone can do that."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Here(Executor):
    """Takes every task at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of a call that has returned."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _pool_for(requests: list[dict[str, Any]]) -> Executor:
    """Forks; but for a GPU nothing else, since a fork cannot use one that its parent has asked about, and each would
    take a context of its own."""
    if any(request["device"] == "cuda" for request in requests):
        return Here()
    try:
        return ProcessPoolExecutor(
            min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("fork"), initializer=die_with_parent
        )
    except (OSError, ImportError):
        return Here()  # a container without /dev/shm has no semaphores


def _take(request: dict[str, Any], size: int) -> dict[str, Any]:
    """A task's answer."""
    from .invalid import InvalidInput

    try:
        from .memory_trace.step_course import course_at, update_at

        return course_at(request, size) if request["part"] == "course" else update_at(request, size)
    except InvalidInput as error:
        return {"error": error.as_fields()}
    except Exception as error:
        return _untraceable(error)


def _joined(few: dict[str, Any], many: dict[str, Any]) -> dict[str, Any]:
    """A part's answer from those at its two sizes; the first one's failure where they failed."""
    from .memory_trace.envelope import affine, deeper
    from .memory_trace.step_course import BATCHES

    for one in (few, many):
        if "error" in one or "untraceable" in one:
            return one
    try:
        if "stretches" in few:
            return {**few, "stretches": affine(few["stretches"], many["stretches"], *BATCHES)}
        start, peak = deeper(few["stretch"], many.get("stretch", few["stretch"]), few["more"])
        return {"before_optimizer": start, "optimizer_peak": peak}
    except Exception as error:
        return _untraceable(error)


def _untraceable(error: Exception) -> dict[str, Any]:
    return {"untraceable": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def main(arguments: list[str]) -> None:
    """Answer every argument on stdout."""
    logging.disable(logging.WARNING)
    for answer in answers([json.loads(argument) for argument in arguments]):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("bootstrap.py")))
    importlib.import_module("trainfast_worker.trace_memory").main(sys.argv[1:])
    sys.stdout.flush()
    # Taking the interpreter down takes longer than the last answer can wait.
    os._exit(0)
