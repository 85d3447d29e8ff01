"""Hooks on what takes a step: the model's forward pass, the backward pass, and the optimizer.

| hooked | when | read from it |
|---|---|---|
| modules and parameters being made | until the first step | which modules are outermost, the memory's baseline |
| the outermost module with the optimizer's parameters | from the first step on | time, input size, evaluations, facts |
| `torch.autograd.backward` | always | which batches are trained on |
| every optimizer's step | always | steps, time, learning rate, the main optimizer |
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
import weakref
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .notes import never_raises, note_error
from .script_run import OPTIMIZER_SOURCE, ScriptRun

MAX_SKIPPED_BACKWARDS = 20
"""Backward passes in which smaller optimizers wait for the largest one's first step, which may never come."""
WRAPPER_NAMES = (
    *("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"),
    "FSDPModule",
)
"""Names of the classes that wrap a script's model; FSDP2 puts the last one before the model's own class."""
COMPILED_REASON = "the script compiles: a hook in the compiled part would break its graph"
"""The reason that a compiled script's phases are unknown."""


def install(run: ScriptRun) -> None:
    """Install the hooks of a run's process."""
    model = ModelHooks(run)
    run.take_hooks_off = model.remove
    optimizers = OptimizerHooks(run, model)
    register_optimizer_step_pre_hook(optimizers.before)
    register_optimizer_step_post_hook(optimizers.after)
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def followed(*args: Any, **kwargs: Any) -> None:
        # Every tensor's own `backward` calls this. A reentrant checkpoint runs backward passes of its own within one.
        # Compiled code traces only this line.
        if is_compiling() or run.turns.in_backward:
            backward(*args, **kwargs)
            return
        run.turns.in_backward = True
        optimizers.backwards += 1
        try:
            backward(*args, **kwargs)
        finally:
            run.turns.in_backward = False
        optimizers.end_backward()

    torch.autograd.backward = followed


class OptimizerHooks:
    """Counts the steps of the optimizer with most parameters: a GAN takes two kinds of steps."""

    def __init__(self, run: ScriptRun, model: ModelHooks) -> None:
        self._run = run
        self._model = model
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
        if not is_compiling():
            self._begun_ns = monotonic_ns()

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count the step."""
        if is_compiling():
            return
        try:
            if self._main() is not optimizer and not self._becomes_main(optimizer):
                return
            run = self._run
            # Accelerate passes None where there is no closure.
            if any(value is not None for value in (*args[1:], *kwargs.values())):
                run.unknown["optimizer_ms"] = "the step runs a closure, with forward and backward in it"
            elif run.peaks.on_cpu:
                # A GPU still works when the host's call returns.
                run.optimizer_ns = (run.optimizer_ns or 0) + monotonic_ns() - self._begun_ns
            run.lr = _finite(optimizer.param_groups[0].get("lr"))
            self._is_step_due = True
            if not run.turns.in_backward:
                self._record_step()
        except Exception as error:
            note_error("optimizer step hook", error)

    @never_raises
    def end_backward(self) -> None:
        """Add the batches that a backward has reached, and the step that was taken within it."""
        self._run.turns.reach_backward(self._run.begun_ns)
        if self._is_step_due:
            self._record_step()

    def _record_step(self) -> None:
        self._is_step_due = False
        if self._run.source == OPTIMIZER_SOURCE and self._run.record_step():
            raise SystemExit(0)

    def _becomes_main(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer has more parameters than the main optimizer, and so becomes the main one."""
        if optimizer in self._smaller:
            return False
        run, parameters, count = self._run, _parameters_of(optimizer), _parameter_count(optimizer)
        if self._main() is None:
            if self._waits_for_larger(count):
                return False
        elif count <= self._main_count:
            self._smaller.add(optimizer)
            return False
        if run.source == OPTIMIZER_SOURCE:
            run.hooks["optimizer step hook"] = None
        self._main, self._main_count = weakref.ref(optimizer), count
        group = optimizer.param_groups[0]
        run.has_scheduler = "initial_lr" in group
        run.given_rate = _finite(group.get("initial_lr", group.get("lr")))
        run.memory_limit.limit_gpu_of(parameters[0])
        run.peaks.device = parameters[0].device
        run.actual.update(
            optimizer=type(optimizer).__name__,
            param_dtype=str(parameters[0].dtype).replace("torch.", ""),
            device=str(parameters[0].device),
            parameters=count,
        )
        self._model.hook(parameters)
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


def _whole_size(parameter: Any) -> int:
    """Elements of a parameter, also of one that bitsandbytes keeps in four bits, two to a byte."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
    return math.prod(shape)


def _method(model: nn.Module) -> str:
    """`full`, or the kind of peft's adapters in a model: `lora`, or `qlora` beside weights in four bits."""
    if not any(hasattr(module, "lora_A") for module in model.modules()):
        return "full"
    quantized = any(getattr(parameter, "quant_state", None) is not None for parameter in model.parameters())
    return "qlora" if quantized else "lora"


def _finite(rate: Any) -> float | None:
    """The rate as a finite number; None for a tensor, which a capturable optimizer has."""
    return float(rate) if isinstance(rate, (int, float)) and math.isfinite(rate) else None


class ModelHooks:
    """Watches modules being made until the first step, then hooks the model alone.

    Global forward hooks would slow down every module's call.
    """

    def __init__(self, run: ScriptRun) -> None:
        self._run = run
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The modules that the script has built; the outermost ones are not in `_inner`."""
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The modules that are part of another one."""
        self._begun_ns = 0
        """The beginning of the forward pass that runs; 0 between passes."""
        self._is_first = True
        self._handles: list[Any] = [
            register_module_module_registration_hook(never_raises(self._on_module)),
            register_module_parameter_registration_hook(never_raises(self._on_parameter)),
        ]
        """The handles of all hooks that are in place."""

    def remove(self) -> None:
        """Take all hooks off the modules: a model with hooks cannot be scripted, and training is over."""
        while self._handles:
            self._handles.pop().remove()

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if is_compiling():
            return  # a slice of a list of layers, in a forward that torch.compile follows
        self._modules.add(module)
        if child is not None:
            self._inner.add(child)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        run = self._run
        if not run.peaks.has_model:
            run.memory_limit.impose()
            run.peaks.set_baseline()
        self._modules.add(module)
        if run.taken == 0:
            run.begun_ns = monotonic_ns()

    @never_raises
    def hook(self, parameters: list[Tensor]) -> None:
        """Hook the outermost module with most of the optimizer's parameters; a wrapper counts as the module."""
        run = self._run
        self.remove()
        parameter_ids = {id(parameter) for parameter in parameters}
        outermost = [module for module in self._modules if module not in self._inner]
        counts = [
            (sum(id(parameter) in parameter_ids for parameter in module.parameters()), module) for module in outermost
        ]
        count, model = max(counts, key=lambda pair: pair[0], default=(0, None))
        if model is None or not count:
            return
        # A script may divide the model among several optimizers.
        sizes = [(_whole_size(parameter), parameter.requires_grad) for parameter in model.parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        ancestors = [ancestor.__name__ for ancestor in type(model).__mro__]
        is_compiled_whole = ancestors[0] == "OptimizedModule"
        run.actual.update(
            parameters=max(run.actual["parameters"], sum(size for size, _ in sizes)),
            trainable_parameters=max(run.actual["parameters"], trained),
            method=_method(model),
            wrapper=next((name for name in ancestors if name in WRAPPER_NAMES), "none"),
            compiled=is_compiled_whole or getattr(model, "_compiled_call_impl", None) is not None or _has_compiled(),
            attention=getattr(getattr(model, "config", None), "_attn_implementation", None),
        )
        if run.actual["compiled"] and not is_compiled_whole:
            run.unknown["forward_ms"] = COMPILED_REASON
            return  # autocast shows in a forward pass alone
        run.actual["compute_dtype"] = run.actual.get("param_dtype")
        self._handles.append(model.register_forward_pre_hook(_ForwardHook(self._before_forward), with_kwargs=True))
        if run.peaks.on_cpu:
            # A GPU still works when the forward returns.
            self._handles.append(model.register_forward_hook(_ForwardHook(self._after_forward)))

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the beginning and the input of a forward pass."""
        run = self._run
        if run.turns.in_backward:
            return  # a checkpointed model computes its forward again
        now_ns = monotonic_ns()
        try:
            if not is_grad_enabled():
                run.turns.add_evaluation(now_ns, module.training)
                run.note_phase(now_ns)
                return
            if self._is_first:
                self._read_first_forward()
            if run.settings.longest_first:
                _note_width(run, (args, kwargs))
            run.turns.add_forward(leading_size(args) or leading_size(kwargs) or 0, module.training, now_ns)
        except Exception as error:
            note_error("model forward hook", error)
        self._begun_ns = monotonic_ns()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Add the time of the pass."""
        if self._begun_ns and is_grad_enabled():
            self._run.turns.add_forward_time(monotonic_ns() - self._begun_ns)
            self._begun_ns = 0

    def _read_first_forward(self) -> None:
        """Record the facts that only a running model shows."""
        run, self._is_first = self._run, False
        run.hooks["model forward hook"] = None
        device = run.peaks.device
        if device is not None and torch.is_autocast_enabled(device.type):
            run.actual["compute_dtype"] = str(torch.get_autocast_dtype(device.type)).replace("torch.", "")
        if run.peaks.on_cpu:
            run.unknown.pop("forward_ms", None)
        else:
            run.unknown["forward_ms"] = run.unknown["optimizer_ms"] = "the host runs ahead of the GPU"


class _ForwardHook:
    """A hook around the forward pass. A model that is saved or copied whole carries a no-op in its place."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> Any:
        # Unpickled, without this package, as a function that takes any arguments and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _note_width(run: ScriptRun, inputs: Any) -> None:
    """Note the width of a forward pass's input: the values of one sample in its first batched tensor."""
    width = _width(inputs)
    if width is None:
        return
    narrowest, widest = run.widths.get("narrowest", width), run.widths.get("widest", width)
    if width > widest and run.taken >= run.settings.timing_warmup:
        run.widths["longest_first"] = False  # the samples' sizes are not what decides the width
    run.widths.update(narrowest=min(width, narrowest), widest=max(width, widest))


def _width(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.numel() // len(value) if value.dim() > 1 and len(value) else None
    return next((width for width in map(_width, _values(value)) if width is not None), None)


def leading_size(batch: Any, depth: int = 3) -> int | None:
    """The first dimension of the first tensor in nested tuples, lists and mappings; None without one."""
    if isinstance(batch, Tensor):
        shape = batch.shape
        return shape[0] if shape else None
    for value in _values(batch) if depth else ():
        size = leading_size(value, depth - 1)
        if size is not None:
            return size
    return None


def _values(value: Any) -> Any:
    """The values of a tuple, list or mapping; no other type is looked into: iterating would empty a generator."""
    return value if isinstance(value, (tuple, list)) else value.values() if isinstance(value, Mapping) else ()


def _has_compiled() -> bool:
    """True if torch.compile has compiled anything; an import of dynamo just to ask would take a second."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters and counters["frames"])
