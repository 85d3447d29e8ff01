"""Trace training steps without memory, and answer with the timelines of their live bytes, until standard input ends.

A line of stdin is JSON: `{"batch": N, "requests": [...], "devices": {...}}` with the fields of `TraceRequest`s and
the variables that choose the GPUs, one batch at a time, or `{"cancel": N}`. The first line of stdout is
`{"imported": true}`. Answers carry `batch`, and `request`, the index of their request: they may come in another order.
`{"done": N}` follows when nothing of the batch runs any more. The end of stdin, which comes with the end of the parent,
ends this process and its forks.

The real worker builds the model and the optimizer and takes the step; only its tensors are fake. Three blocks of a
stack of identical ones are traced: the first, one that stands for all between, and the last. The first batch imports
the libraries; each batch is traced in a fork of this process, and forks of that fork trace in parallel.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import select
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .step_timeline import TraceRequest

READ_BYTES = 1 << 16
"""Most bytes of stdin read at once."""
STDIN, STDOUT = 0, 1
"""File descriptors of standard input and output."""
FIRST_TRACE_IMPORTS = ("torch._dynamo", "transformers.modeling_utils", "transformers.generation.utils")
"""Imported before the forks: a thousand modules that each fork would import again, which takes as long as torch."""
TRACING_PROCESSES = 2
"""Processes that trace at a time; each uses one core."""
REASON_CHARACTERS = 300
"""Chosen, not measured: the most that an answer quotes of the error of a trace."""
HIDDEN_PACKAGES = (
    "accelerate",
    "deepspeed",
    "peft",
    "kernels",
    "sklearn",
    "scipy",
    "tensorflow",
    "jax",
    "flax",
    "torchvision",
)
"""Packages that transformers imports if installed, and that a trace does not use."""


def answers(requests: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    """Yield each answer as soon as its request is traced.

    An answer has `error` for a model that cannot be built, and `untraceable`, the reason, for one without a trace.
    """
    try:
        import_for(requests)
    except Exception as error:
        yield from ({"request": number, **_untraceable(error)} for number in range(len(requests)))
        return
    unanswered = dict.fromkeys(range(len(requests)))
    try:
        for number, answer in _trace_all(requests):
            del unanswered[number]
            yield {"request": number, **answer}
    except BrokenProcessPool:
        yield from ({"request": number, "untraceable": "the process that traced it died"} for number in unanswered)


def import_for(requests: list[TraceRequest]) -> None:
    """Import everything that tracing needs, once for all its processes. Raises the error of a failed import."""
    gc.disable()
    import torch

    from ..model.build import import_model_code
    from ..model.model_config import resolve_config

    importlib.import_module(".step_timeline", __package__)
    for name in FIRST_TRACE_IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    for model, objective in {
        json.dumps([request.model, request.objective]): (request.model, request.objective) for request in requests
    }.values():
        with suppress(Exception):  # building the model reports it
            import_model_code(resolve_config(model), objective)
    # A fork of a process whose kernels have run on several threads hangs at its first kernel.
    torch.set_num_threads(1)
    # Imported modules stay: no collection looks at them, and no fork copies them.
    gc.freeze()
    gc.enable()


def _trace_all(requests: list[TraceRequest]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the answers in the order of their requests, then those of the requests that wait for another one's."""
    with _pool_for(requests) as pool:

        def begin(request: TraceRequest) -> list[Future[dict[str, Any]]]:
            return [pool.submit(_trace, request, size_index) for size_index in (0, 1)]

        running = {number: begin(request) for number, request in enumerate(requests) if request.after is None}
        while running:
            first = next(iter(running))
            small, large = (future.result() for future in running.pop(first))
            yield first, _join(small, large)
            for number, request in enumerate(requests):
                if request.after == first:
                    # A model that cannot be built has no `unused`; its `optimizer` request fails as well.
                    running[number] = begin(replace(request, unused=tuple(small.get("unused", ()))))


def _pool_for(requests: list[TraceRequest]) -> Executor:
    """Return a pool of forks; for a GPU a thread of this process.

    A fork cannot use a GPU that its parent has touched.
    """
    from ..exit_now import die_with_parent

    if any(request.device == "cuda" for request in requests):
        return ThreadPoolExecutor(1)
    try:
        return ProcessPoolExecutor(
            min(TRACING_PROCESSES, os.cpu_count() or 1),
            multiprocessing.get_context("fork"),
            initializer=die_with_parent,
        )
    except (OSError, ImportError):
        return ThreadPoolExecutor(1)  # a container without /dev/shm has no semaphores


def _trace(request: TraceRequest, size_index: int) -> dict[str, Any]:
    """Run one trace."""
    from ..invalid import InvalidInput

    try:
        from .step_timeline import trace_optimizer, trace_step

        trace = trace_step if request.part == "step" else trace_optimizer
        return trace(request, size_index)
    except InvalidInput as error:
        return {"error": error.as_fields()}
    except Exception as error:
        return _untraceable(error)


def _join(small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    """Join the traces at both sizes into one answer; the first failure if one failed."""
    from .envelope import TRACED_BATCH_SIZES, extrapolate_blocks, extrapolate_work, segment_lines

    for traced in (small, large):
        if "error" in traced or "untraceable" in traced:
            return traced
    try:
        if "segments" in small:
            return {**small, "segments": segment_lines(small["segments"], large["segments"], TRACED_BATCH_SIZES)}
        low = small["segment"]
        high = large.get("segment", small["segment"])
        extra_blocks = small["left_out"]
        start, peak = extrapolate_blocks(low, high, extra_blocks)
        return {"before_optimizer": start, "optimizer_peak": peak, "work": extrapolate_work(low, high, extra_blocks)}
    except Exception as error:
        return _untraceable(error)


def _untraceable(error: Exception) -> dict[str, Any]:
    return {"untraceable": f"{type(error).__name__}: {' '.join(str(error).split())[:REASON_CHARACTERS]}"}


class RequestLines:
    """The lines of stdin, read only when there is input."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._waiting: list[dict[str, Any]] = []
        self.is_over = False

    def read(self) -> None:
        """Read the lines in the pipe; block while it is empty."""
        chunk = os.read(STDIN, READ_BYTES)
        self.is_over = not chunk
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        self._waiting += [json.loads(line) for line in lines]

    def next(self) -> dict[str, Any] | None:
        """Wait for the next batch; None when stdin has ended."""
        while not self.is_over:
            while self._waiting:
                line = self._waiting.pop(0)
                if "requests" in line:
                    return line
            self.read()
        return None

    def cancels(self, batch: int) -> bool:
        """True if a line read before cancels this batch."""
        return {"cancel": batch} in self._waiting


def main() -> None:
    """Import the libraries that the first batch needs, then trace batch after batch."""
    from ..programs.inspect_model import hide_packages

    logging.disable(logging.WARNING)
    # Before anything imports transformers, which looks for each package once.
    hide_packages(HIDDEN_PACKAGES)
    from .step_timeline import read_request

    lines = RequestLines()
    is_first = True
    while (batch := lines.next()) is not None:
        requests = [read_request(fields) for fields in batch["requests"]]
        if is_first:
            import_for(requests)
            _print({"imported": True})
            is_first = False
        _trace_batch(int(batch["batch"]), requests, batch["devices"], lines)


def _trace_batch(batch: int, requests: list[TraceRequest], devices: dict[str, str | None], lines: RequestLines) -> None:
    """Trace a batch in a fork, and return when the fork and its own forks have ended."""
    alive_pipe, child_end = os.pipe()
    server, child = os.getpid(), os.fork()
    if child == 0:
        os.close(alive_pipe)
        _choose_gpus(devices)
        _answer(batch, requests, server)
    os.close(child_end)
    with suppress(OSError):  # the child has set its own group
        os.setpgid(child, child)
    try:
        # The cancel may have been read together with its batch.
        while not lines.is_over and not lines.cancels(batch):
            # The pipe ends when neither the child nor its forks have it open.
            if alive_pipe in select.select([STDIN, alive_pipe], [], [])[0]:
                break
            lines.read()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(alive_pipe)
    _print({"done": batch})


def _choose_gpus(devices: dict[str, str | None]) -> None:
    """Set the variables that choose the GPUs, and remove those that are None. CUDA reads them in each fork again."""
    for name, value in devices.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _answer(batch: int, requests: list[TraceRequest], server: int) -> None:
    """Trace and answer in the child, as a process group of its own, so that one signal ends the child and its forks."""
    from ..exit_now import die_with_parent

    try:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() == server:
            os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
            for answer in answers(requests):
                _print({"batch": batch, **answer})
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def _print(line: dict[str, Any]) -> None:
    # A child that was killed may have left half a line.
    text = b"\n" + json.dumps(line).encode() + b"\n"
    while text:
        text = text[os.write(STDOUT, text) :]


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "bootstrap.py"))
    importlib.import_module("trainfast_worker.memory_trace.serve").main()
    os._exit(0)
