"""Steps counted by torch's own optimizer hooks, common to all optimizers of the process, and its backward passes."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .model_hook import hook_model
from .notes import never_raises, note_error
from .script_run import ScriptRun
from .step_log import OPTIMIZER_SOURCE

MAX_SKIPPED_BACKWARDS = 20
"""Backward passes in which smaller optimizers wait for the largest one's first step, which may never come."""


def install(run: ScriptRun) -> None:
    """Count the steps of the optimizer with most parameters: a GAN takes two kinds of steps."""
    hook = OptimizerHook(run)
    register_optimizer_step_pre_hook(hook.before)
    register_optimizer_step_post_hook(hook.after)
    _follow_backward(hook)


def _follow_backward(hook: OptimizerHook) -> None:
    """Follow `torch.autograd.backward`, which every tensor's own calls."""
    backward = torch.autograd.backward
    turns = hook.steps.turns

    @functools.wraps(backward)
    def followed(*args: Any, **kwargs: Any) -> None:
        # A reentrant checkpoint runs backward passes of its own within one. Compiled code traces only this line.
        if is_compiling() or turns.in_backward:
            backward(*args, **kwargs)
            return
        turns.in_backward = True
        hook.backwards += 1
        try:
            backward(*args, **kwargs)
        finally:
            turns.in_backward = False
        hook.end_backward()

    torch.autograd.backward = followed


class OptimizerHook:
    """`before` and `after` every optimizer's step."""

    def __init__(self, run: ScriptRun) -> None:
        self._run = run
        self.steps = run.steps
        self.backwards = 0
        """Backward passes begun."""
        self._main: Callable[[], Optimizer | None] = lambda: None
        """The main optimizer: the one with most parameters of those that have stepped and live."""
        self._main_count = 0
        """Number of the main optimizer's parameters."""
        self._largest_count: int | None = None
        """Parameters of the largest optimizer that lived at the first step; None before it."""
        self._begun_ns = 0
        self._smaller: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._is_step_due = False
        """True if the main optimizer has stepped within the backward that runs."""

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note when the optimizer's work begins."""
        # In compiled code only this line is traced: the hooks break no graph.
        if is_compiling():
            return
        self._begun_ns = monotonic_ns()

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count the step."""
        if is_compiling():
            return
        try:
            if self._main() is optimizer or self._becomes_main(optimizer):
                # Accelerate passes None where there is no closure.
                self._count(optimizer, has_closure=any(value is not None for value in (*args[1:], *kwargs.values())))
        except Exception as error:
            note_error("optimizer step hook", error)

    def _count(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        steps = self.steps
        if has_closure:
            steps.unknown["optimizer_ms"] = "the step runs a closure, with forward and backward in it"
        elif steps.peaks.on_cpu:
            # A GPU still works when the host's call returns.
            steps.optimizer_ns = (steps.optimizer_ns or 0) + monotonic_ns() - self._begun_ns
        steps.lr = _finite(optimizer.param_groups[0].get("lr"))
        self._is_step_due = True
        if not steps.turns.in_backward:
            self._record_step()

    @never_raises
    def end_backward(self) -> None:
        """Add the batches that a backward has reached, and the step that was taken within it."""
        self.steps.end_backward()
        if self._is_step_due:
            self._record_step()

    def _record_step(self) -> None:
        self._is_step_due = False
        if self.steps.source == OPTIMIZER_SOURCE and self.steps.record_step():
            raise SystemExit(0)

    def _becomes_main(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer has more parameters than the main optimizer, and so becomes the main one."""
        if optimizer in self._smaller:
            return False
        parameters, count = _parameters_of(optimizer), _parameter_count(optimizer)
        steps = self.steps
        if self._main() is None:
            if self._waits_for_larger(count):
                return False
        elif count <= self._main_count:
            self._smaller.add(optimizer)
            return False
        if steps.source == OPTIMIZER_SOURCE:
            steps.note_hook("optimizer step hook")
        self._main, self._main_count = weakref.ref(optimizer), count
        group = optimizer.param_groups[0]
        self._run.has_scheduler = "initial_lr" in group
        self._run.given_rate = _finite(group.get("initial_lr", group.get("lr")))
        # A forward pass that was compiled whole has not limited its GPU.
        self._run.memory_limit.limit_gpu_of(parameters[0])
        steps.peaks.watch(parameters[0].device)
        self._run.actual.update(
            optimizer=type(optimizer).__name__,
            param_dtype=str(parameters[0].dtype).replace("torch.", ""),
            device=str(parameters[0].device),
            parameters=count,
        )
        hook_model(self._run, parameters)
        return True

    def _waits_for_larger(self, count: int) -> bool:
        """True in the first backward passes, while an optimizer of more parameters may still take its first step."""
        if self._largest_count is None:
            # Looked for once: 50 ms for half a million objects.
            live = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
            self._largest_count = max(map(_parameter_count, live), default=0)
        return self._largest_count > count and self.backwards < MAX_SKIPPED_BACKWARDS


def _parameters_of(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_count(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for parameter in _parameters_of(optimizer))


def _finite(rate: Any) -> float | None:
    """The rate as a finite number; None for a tensor, which a capturable optimizer has."""
    return float(rate) if isinstance(rate, (int, float)) and math.isfinite(rate) else None
