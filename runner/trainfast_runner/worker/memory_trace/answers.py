"""Answers to trace requests: timelines of the live bytes of training steps that are taken without memory.

The real worker builds the model and the optimizer and takes the step; only its tensors are fake. Three blocks of a
stack of identical ones are traced: the first, one that stands for all between, and the last. This runs in a fork of a
process that has imported the libraries, and forks of this fork trace in parallel.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .step_timeline import TraceRequest

TRACING_PROCESSES = 2
"""Processes that trace at a time; each uses one core."""
REASON_CHARACTERS = 300
"""Chosen, not measured: the most that an answer quotes of the error of a trace."""


def traced(fields: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each answer as soon as its request, with these fields, is traced.

    An answer has `error` for a model that cannot be built, and `untraceable`, the reason, for one without a trace.
    """
    unanswered = dict.fromkeys(range(len(fields)))
    try:
        import torch

        from ..levers import lora
        from ..model.inspection import import_stack
        from .step_timeline import read_request

        import_stack([(request["model"], request["objective"]) for request in fields])
        for method in {request["knobs"]["method"] for request in fields}:
            lora.import_packages(method)

        # A fork of a process whose kernels have run on several threads hangs at its first kernel.
        torch.set_num_threads(1)
        for number, answer in _trace_all([read_request(request) for request in fields]):
            del unanswered[number]
            yield {"request": number, **answer}
    except BrokenProcessPool:
        yield from ({"request": number, "untraceable": "the process that traced it died"} for number in unanswered)
    except ImportError as error:
        yield from ({"request": number, **_untraceable(error)} for number in unanswered)


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
    from ..shared.process import die_with_parent

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
