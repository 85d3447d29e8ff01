"""Trace a step of a script's own model and optimizer, whose tensors, states and random numbers stay as they were."""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from ..shared.traced import OPTIMIZER, PARAMS, TEMPORARY
from .envelope import TRACED_BATCH_SIZES, peak_lines
from .live_bytes import LiveBytes, TracedSegment
from .step_watch import StepWatch
from .without_memory import choose_foreach, empty_like, replace_with_empty, tensors_of

MAX_TRACE_S = 30.0
"""Seconds after which a trace is given up: a search is faster without a longer one."""
UNTRACEABLE_OPERATIONS = ("mkldnn_rnn_layer", "_cudnn_rnn")
"""Operations that keep a workspace which torch leaves out of their form (torch/_meta_registrations.py)."""


@dataclass(frozen=True)
class ScriptStep:
    """A step as the script took it. `arguments` and `keywords` are the model's inputs, on the meta device."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    rows: int
    """Size of the inputs' batch dimension."""
    used: tuple[int, ...]
    """Indexes of the outputs that the loss depends on."""
    kept: tuple[int, ...]
    """Indexes of the outputs that outlive the forward pass."""
    loss_bytes: int
    """Bytes of the graph between outputs and loss."""
    holds_gradients: bool
    """True if the gradients of an earlier backward are alive from the start."""
    autocast: torch.dtype | None
    """The dtype that the script casts to around the model; None without autocast."""


def trace_peaks(model: nn.Module, optimizer: Any, step: ScriptStep) -> list[tuple[float, float]]:
    """Return the lines, bytes fixed and for each row of the batch, that are the step's peak at some batch size.

    Raises any error for a step that cannot be traced.
    """
    latest = time.monotonic() + MAX_TRACE_S
    small, large = (_trace(model, optimizer, step, factor, latest) for factor in TRACED_BATCH_SIZES)
    return peak_lines(small, large, (TRACED_BATCH_SIZES[0] * step.rows, TRACED_BATCH_SIZES[1] * step.rows))


class _TimeLimitedLiveBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """Raises TimeoutError for an operation after `latest` (`time.monotonic`).

    Raises NotImplementedError for an operation of UNTRACEABLE_OPERATIONS.
    """

    def __init__(self, device_type: str, latest: float) -> None:
        super().__init__(device_type)
        self._latest = latest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._latest:
            raise TimeoutError(f"tracing took more than {MAX_TRACE_S:g} s")
        if func._opname in UNTRACEABLE_OPERATIONS:
            raise NotImplementedError(f"no trace shows the workspace of {func._opname}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _trace(model: nn.Module, optimizer: Any, step: ScriptStep, factor: int, latest: float) -> list[TracedSegment]:
    """The timeline of a step with `factor` times the rows."""
    device = next(model.parameters()).device
    with torch.enable_grad(), _restored(model, device), FakeTensorMode(allow_non_fake_inputs=True):
        stand_in = _optimizer_of(optimizer, replace_with_empty(model))
        live_bytes = _TimeLimitedLiveBytes(device.type, latest)
        live_bytes.count_all([*model.parameters(), *model.buffers()], PARAMS)
        live_bytes.count_all(tensors_of(list(stand_in.state.values())), OPTIMIZER)
        watch = StepWatch(live_bytes)
        with live_bytes:
            watch.enter("other")
            for parameter in model.parameters():
                if step.holds_gradients and parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
            inputs = [step.arguments, step.keywords]
            arguments, keywords = tree_map(lambda value: _grown(value, step.rows, factor, device), inputs)
            watch.enter("forward")
            outputs = _forward(model, arguments, keywords, step.autocast, device.type)
            loss = torch.stack([outputs[index].sum().float() for index in step.used]).sum()
            outputs = [outputs[index] for index in step.kept]
            watch.enter("loss")
            live_bytes.segments[-1].points.append(
                (*live_bytes.live[:TEMPORARY], live_bytes.live[TEMPORARY] + factor * step.loss_bytes)
            )
            watch.enter("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            del outputs
            watch.enter("optimizer")
            type(stand_in).step(stand_in)
            live_bytes.end()
    return live_bytes.segments


def _forward(
    model: nn.Module, arguments: Any, keywords: Any, autocast: torch.dtype | None, device_type: str
) -> list[Tensor]:
    """Call the model, and return the tensors of its output."""
    with nullcontext() if autocast is None else torch.autocast(device_type, autocast):
        return tensors_of(model(*arguments, **keywords))


def _grown(value: Any, rows: int, factor: int, device: torch.device) -> Any:
    """Return an input with `factor` times the rows; a value without that dimension keeps its shape."""
    if not isinstance(value, Tensor):
        return value
    shape = list(value.shape)
    if shape and shape[0] == rows:
        shape[0] *= factor
    return torch.empty(shape, dtype=value.dtype, device=device, requires_grad=value.requires_grad)


def _optimizer_of(optimizer: Any, empty_parameters: dict[int, Tensor]) -> Any:
    """A copy of the optimizer that steps the empty parameters, with states without memory.

    The copy has the class's own `step`: a scheduler wraps the instance's.
    """
    copied = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    copied._optimizer_step_pre_hooks = copied._optimizer_step_post_hooks = {}
    copied.param_groups = [
        {**group, "params": [empty_parameters[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    copied.state = defaultdict(dict)
    for group, group_copy in zip(optimizer.param_groups, copied.param_groups, strict=True):
        for original, parameter in zip(group["params"], group_copy["params"], strict=True):
            if original in optimizer.state:
                copied.state[parameter] = tree_map(_emptied, dict(optimizer.state[original]))
    choose_foreach(copied, next(iter(empty_parameters.values())).device.type)
    return copied


def _emptied(value: Any) -> Any:
    return empty_like(value) if isinstance(value, Tensor) else value


@contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give the model its tensors, gradients and attributes back, and the process its random numbers."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    saved_modules = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    python_state = random.getstate()
    numpy_state = numpy.get_state() if numpy is not None else None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            # An operation that meets a parameter of the script's own must not add to its gradient.
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for module, attributes, parameters, buffers in saved_modules:
                for name, tensor in {**parameters, **buffers}.items():
                    setattr(module, name, tensor)
                vars(module).clear()
                vars(module).update(attributes)
                for tensors, saved in ((module._parameters, parameters), (module._buffers, buffers)):
                    tensors.clear()
                    tensors.update(saved)  # type: ignore[arg-type]
            for parameter, gradient in gradients:
                parameter.grad = gradient
            random.setstate(python_state)
            if numpy is not None:
                numpy.set_state(numpy_state)
