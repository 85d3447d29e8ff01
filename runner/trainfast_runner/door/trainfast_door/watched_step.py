"""The step that is traced at a trial's end: shapes of the model's inputs and outputs, and the bytes of the loss."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from .loss_graph import LossGraph
from .notes import never_raises

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .script_run import ScriptRun

PLAIN_INPUT_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Inputs that a trace gives to the model as they are."""
TRACED_WRAPPERS = ("none", "DistributedDataParallel")
"""Wrappers in which the model has all its parameters and the whole batch of its rank."""


class WatchedStep:
    """Watches the second step, the first in which the optimizer has its states.

    No object of the script is kept alive: tensors are known by their shapes.
    """

    def __init__(self, run: ScriptRun, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = weakref.ref(model), weakref.ref(optimizer)
        self.untraceable_reason: str | None = "no forward pass of the model with a backward was seen"
        """The reason that the step cannot be traced; None once the whole step was seen."""
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        self.rows = 0
        self.used: tuple[int, ...] = ()
        self.kept: tuple[int, ...] = ()
        self.loss_bytes = 0
        self.holds_gradients = False
        self.autocast: torch.dtype | None = None
        self._run = run
        self._calls = 0
        self._input_addresses: set[int] = set()
        """The addresses of the model's inputs."""
        self._outputs: list[tuple[weakref.ref[Tensor], Any, int]] = []
        """Each output tensor with its node in the graph and its address; empty once the backward was seen."""
        self._backward: Any = torch.autograd.backward
        """The function of torch that the watched one calls."""
        self._watched: Any = None
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]
        self._watch_backward()

    def __deepcopy__(self, memo: Any) -> WatchedStep:
        """Return this object: a copied model has the same hooks."""
        return self

    def remove(self) -> None:
        """Take the hooks off."""
        self._outputs.clear()
        while self._handles:
            self._handles.pop().remove()
        if torch.autograd.backward is self._watched:
            torch.autograd.backward = self._backward

    @never_raises
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._run.steps.taken != 1:
            self.remove()
            return
        self._calls += 1
        if self._calls > 1:
            # A later micro-batch of the step begins with gradients.
            self.holds_gradients = True
            return
        foreign_types = {
            type(value).__name__
            for value in tree_flatten((args, kwargs))[0]
            if not isinstance(value, (Tensor, *PLAIN_INPUT_TYPES))
        }
        inputs = [tensor for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, Tensor)]
        self.rows = next((len(tensor) for tensor in inputs if tensor.dim()), 0)
        if foreign_types or not self.rows:
            self.untraceable_reason = (
                f"the model takes a {min(foreign_types)}" if foreign_types else "the model takes no batch"
            )
            self.remove()
            return
        device = next(module.parameters()).device
        self.autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        self._input_addresses = {_address(tensor) for tensor in inputs}
        self.arguments, self.keywords = tree_map(_without_memory, (args, kwargs))

    @never_raises
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._calls == 1 and torch.is_grad_enabled() and self.untraceable_reason is not None:
            tensors = [tensor for tensor in tree_flatten(output)[0] if isinstance(tensor, Tensor)]
            self._outputs = [(weakref.ref(tensor), tensor.grad_fn, _address(tensor)) for tensor in tensors]

    def _watch_backward(self) -> None:
        backward = self._backward

        @functools.wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._outputs:
                self._see_loss((tensors,) if isinstance(tensors, Tensor) else tensors)
            return backward(tensors, *args, **kwargs)

        self._watched = torch.autograd.backward = watched

    @never_raises
    def _see_loss(self, roots: Any) -> None:
        outputs, self._outputs = self._outputs, []
        if self._calls != 1:
            self.untraceable_reason = f"the model is called {self._calls} times before a backward"
            return
        graph = LossGraph(roots, [node for _, node, _ in outputs])
        self.used = tuple(sorted(graph.reached))
        if not self.used:
            self.untraceable_reason = "the loss depends on no output of the model"
            return
        output_addresses = [address for _, _, address in outputs]
        self.kept = tuple(
            index
            for index, (output, _, address) in enumerate(outputs)
            if output() is not None or address in graph.saved
        )
        self.loss_bytes = graph.bytes_beside(self._input_addresses.union(output_addresses))
        model = self.model()
        self.holds_gradients |= model is not None and any(
            parameter.grad is not None for parameter in model.parameters()
        )
        self.untraceable_reason = None


def watch_step(run: ScriptRun, model: nn.Module, optimizer: Optimizer) -> None:
    """Watch the next step of the model that the optimizer trains, or note why it cannot be traced."""
    trained_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameter_types = {id(parameter): type(parameter) for parameter in model.parameters()}
    wrapper = str(run.actual["wrapper"])
    if wrapper not in TRACED_WRAPPERS:
        run.trace.untraced_reason = f"the model is in {wrapper}"
    elif run.actual["compiled"]:
        run.trace.untraced_reason = "the model is compiled"
    elif not trained_ids <= set(parameter_types):
        run.trace.untraced_reason = "the optimizer has parameters of several models"
    elif set(parameter_types.values()) != {nn.Parameter}:
        run.trace.untraced_reason = "the model has parameters of a class of the script's own"
    else:
        run.trace.untraced_reason, run.trace.watched_step = None, WatchedStep(run, model, optimizer)


def _without_memory(value: Any) -> Any:
    """Return a tensor without memory of the same shape and dtype; any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
