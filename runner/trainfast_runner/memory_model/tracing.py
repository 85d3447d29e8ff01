"""From a run's spec to the memory model of it: remembered, or traced in the training Python."""

from __future__ import annotations

from trainfast_runner.memory_model.model import MemoryModel
from trainfast_runner.problem import Problem
from trainfast_runner.spec import RunSpec


class Untraceable(Problem):
    """The tracer cannot follow this model; the message says why. Memory is then known only by running."""


def cached_model(spec: RunSpec, device: str = "cpu", python: str | None = None) -> MemoryModel | None:
    """The model of an earlier trace, at once; None where there is none. `device` is cpu or cuda."""
    return None


def trace_model(spec: RunSpec, device: str = "cpu", python: str | None = None) -> MemoryModel:
    """The cached model, or a new trace in the training Python: a few seconds.

    Raises Untraceable where the tracer cannot follow the model, Problem where the model cannot be built at all.
    """
    raise Untraceable("no tracer yet")
