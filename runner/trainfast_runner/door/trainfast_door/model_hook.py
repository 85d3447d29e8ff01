"""Forward time and input size, by hooks on the module that holds the optimizer's parameters."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .notes import never_raises, note_error
from .script_run import ScriptRun

WRAPPER_NAMES = (
    *("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"),
    "FSDPModule",
)
"""Names of the classes that wrap a script's model; FSDP2 puts the last one before the model's own class."""
COMPILED_REASON = "the script compiles: a hook in the compiled part would break its graph"
"""The reason that a compiled script's phases are unknown."""

_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that the script has built; the outermost ones are not in `_inner`."""
_inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that are part of another one."""
_handles: list[Any] = []
"""The handles of all hooks that are in place."""


def install(run: ScriptRun) -> None:
    """Watch modules being built until the first step. Global forward hooks would slow down every module's call.

    The one global hook limits the model's GPU before the first forward pass, then removes itself.
    """

    @never_raises
    def on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        _modules.add(module)
        if child is not None:
            _inner.add(child)

    @never_raises
    def on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if not run.steps.peaks.has_model:
            run.memory_limit.impose(run.files.rank)
            run.steps.peaks.set_baseline()
        _modules.add(module)
        run.steps.start_first_step()

    @never_raises
    def limit_gpu(module: nn.Module, args: Any) -> None:
        # In compiled code only this line is traced.
        if is_compiling():
            return
        # The script's transforms may be modules too: they have no parameters, or some on the CPU.
        parameter = next(module.parameters(), None)
        if parameter is not None and parameter.is_cuda:
            before_forward.remove()
            run.memory_limit.limit_gpu_of(parameter)

    if run.memory_limit.is_on_gpus:
        before_forward = register_module_forward_pre_hook(limit_gpu)
        _handles.append(before_forward)
    run.removals.append(remove_hooks)
    _handles.append(register_module_module_registration_hook(on_module))
    _handles.append(register_module_parameter_registration_hook(on_parameter))


@never_raises
def hook_model(run: ScriptRun, parameters: Iterable[Tensor]) -> None:
    """Hook the outermost module with most of the optimizer's parameters; a wrapper counts as the module."""
    remove_hooks()
    parameter_ids = {id(parameter) for parameter in parameters}
    outermost = [module for module in _modules if module not in _inner]
    counts = [
        (sum(id(parameter) in parameter_ids for parameter in module.parameters()), module) for module in outermost
    ]
    count, model = max(counts, key=lambda pair: pair[0], default=(0, None))
    if model is None or not count:
        return
    # A script may divide the model among several optimizers.
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    run.actual["parameters"] = max(run.actual["parameters"], trained)
    kind = type(model).__name__
    compiled = kind == "OptimizedModule"
    run.actual.update(
        wrapper=next(
            (ancestor.__name__ for ancestor in type(model).__mro__ if ancestor.__name__ in WRAPPER_NAMES),
            "none",
        ),
        compiled=compiled or getattr(model, "_compiled_call_impl", None) is not None or _has_compiled(),
        attention=getattr(getattr(model, "config", None), "_attn_implementation", None),
    )
    if run.actual["compiled"] and not compiled:
        run.steps.unknown["forward_ms"] = COMPILED_REASON
        return  # autocast shows in a forward pass alone
    if run.settings.longest_first:
        _handles.append(model.register_forward_pre_hook(partial(note_width, run), with_kwargs=True))
    run.actual["compute_dtype"] = run.actual.get("param_dtype")
    times = ForwardTimes(run)
    _handles.append(model.register_forward_pre_hook(_ForwardHook(times.before), with_kwargs=True))
    if run.steps.peaks.on_cpu:
        # A GPU still works when the forward returns.
        _handles.append(model.register_forward_hook(_ForwardHook(times.after)))


def remove_hooks() -> None:
    """Take all hooks off the modules: a model with hooks cannot be scripted, and training is over."""
    while _handles:
        _handles.pop().remove()


class ForwardTimes:
    """Adds up the time and the samples of a step's forward passes, between its two hooks."""

    def __init__(self, run: ScriptRun) -> None:
        self.steps = run.steps
        self.begun_ns = 0
        """The beginning of the pass that runs; 0 between passes."""
        self._run = run
        self.is_first = True

    def begin_first(self) -> None:
        """Record the facts that only a running model shows."""
        self.is_first = False
        steps = self.steps
        steps.note_hook("model forward hook")
        self._run.actual["compute_dtype"] = _compute_dtype(self._run)
        if steps.peaks.on_cpu:
            steps.unknown.pop("forward_ms", None)
        else:
            steps.unknown["forward_ms"] = steps.unknown["optimizer_ms"] = "the host runs ahead of the GPU"

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the beginning and the input of a forward pass."""
        steps = self.steps
        if steps.turns.in_backward:
            return  # a checkpointed model computes its forward again
        now_ns = monotonic_ns()
        try:
            if not is_grad_enabled():
                steps.turns.add_evaluation(now_ns, module.training)
                steps.note_phase(now_ns)
                return
            if self.is_first:
                self.begin_first()
            rows = (leading_size(args) or leading_size(kwargs) or 0) if steps.turns.counts_rows else 0
            steps.turns.add_forward(rows, module.training, now_ns)
        except Exception as error:
            note_error("model forward hook", error)
        self.begun_ns = monotonic_ns()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Add the time of the pass."""
        if self.begun_ns and is_grad_enabled():
            self.steps.turns.add_forward_time(monotonic_ns() - self.begun_ns)
            self.begun_ns = 0


class _ForwardHook:
    """A hook around the forward pass. A model that is saved or copied whole carries a no-op in its place."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> Any:
        return _NOTHING


_NOTHING = (getattr, (contextlib.nullcontext(), "__exit__"))
"""Unpickled, without this package, as a function that takes any arguments and returns None."""


@never_raises
def note_width(run: ScriptRun, module: Any, args: Any, kwargs: Any) -> None:
    """Note the width of a forward pass's input: the values of one sample in its first batched tensor."""
    width = _width((args, kwargs)) if is_grad_enabled() else None
    if width is None:
        return
    narrowest, widest = run.widths.get("narrowest", width), run.widths.get("widest", width)
    if width > widest and run.steps.taken >= run.settings.timing_warmup:
        run.widths["longest_first"] = False  # the samples' sizes are not what decides the width
    run.widths.update(narrowest=min(width, narrowest), widest=max(width, widest))


def _width(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.numel() // len(value) if value.dim() > 1 and len(value) else None
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((width for width in map(_width, values) if width is not None), None)


def leading_size(batch: Any, depth: int = 3) -> int | None:
    """The first dimension of the first tensor in nested tuples, lists and mappings; None without one."""
    if isinstance(batch, Tensor):
        shape = batch.shape
        return shape[0] if shape else None
    # No other type is looked into: iterating over a generator would empty it.
    values = batch if isinstance(batch, (tuple, list)) else batch.values() if isinstance(batch, Mapping) else ()
    for value in values if depth else ():
        size = leading_size(value, depth - 1)
        if size is not None:
            return size
    return None


def _has_compiled() -> bool:
    """True if torch.compile has compiled anything; an import of dynamo just to ask would take a second."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters and counters["frames"])


def _compute_dtype(run: ScriptRun) -> Any:
    """The dtype that forward computes in: autocast's, else the parameters'."""
    device = run.steps.peaks.device
    if device is not None and torch.is_autocast_enabled(device.type):
        return str(torch.get_autocast_dtype(device.type)).replace("torch.", "")
    return run.actual.get("param_dtype")
