"""Activation checkpointing: of every layer, of one in several, of cheap operations only, or with inputs on the host."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint as torch_checkpoint

from ..invalid import InvalidInput
from ..spec import Knobs

ARGUMENTS = {"use_reentrant": False}
"""Arguments of torch's checkpoint."""
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes the contexts of a layer's forward and of its recomputation."""
_KEPT = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm")
"""Matrix products of `torch.ops.aten` whose outputs `selective` keeps; attention is known by its name."""


def checkpoint(model: nn.Module, knobs: Knobs, around: Contexts | None = None) -> None:
    """Checkpoint the model's layers as the knob says; `around` makes further contexts of each layer.

    Raises InvalidInput for a model without checkpointing, or one that checkpoints all layers or none.
    """
    value: str = knobs.checkpointing
    live: Any = model
    if not getattr(live, "supports_gradient_checkpointing", False):
        reason = f"{live.config.model_type} has no activation checkpointing"
        raise InvalidInput(reason, key="checkpointing", allowed=["off"], nearest="off")
    arguments: dict[str, Any] = dict(ARGUMENTS)
    makers = [maker for maker in (_keep_products if value == "selective" else None, around) if maker is not None]
    if makers:
        # One maker is passed as it is: compiled, a checkpoint takes two dispatch modes of torch's alone.
        arguments["context_fn"] = partial(_nested, makers) if len(makers) > 1 else makers[0]
    # Renamed in transformers 5.23.
    enable: Any = getattr(live, "activation_checkpointing_enable", None) or live.gradient_checkpointing_enable
    enable(arguments)
    if value.startswith("every-"):
        layers, period = checkpointed_layers(model), int(value.removeprefix("every-"))
        if len(layers) <= period:
            reason = f"checkpointing={value} needs more layers than the {len(layers)} that the model checkpoints itself"
            raise InvalidInput(reason, key="checkpointing", allowed=["off", "full"], nearest="full")
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = index % period == 0  # type: ignore[assignment]
    elif value == "offload":
        for layer in checkpointed_layers(model):
            inner: Any = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = partial(_with_inputs_on_the_host, inner)  # type: ignore[assignment]


def checkpointable_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that can checkpoint themselves, or the stacks that checkpoint theirs in older model code."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    flagged = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    return [module for module in flagged if isinstance(module, GradientCheckpointingLayer)] or flagged


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Return those of the layers that do."""
    return [layer for layer in checkpointable_layers(model) if layer.gradient_checkpointing]


def _with_inputs_on_the_host(inner: Callable[..., Any], function: Any, *args: Any, **more: Any) -> Any:
    with save_on_cpu(pin_memory=True):
        return inner(function, *args, **more)


def _keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return torch_checkpoint.create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call, no-any-return]


def _policy(_context: Any, operation: Any, *_args: Any, **_more: Any) -> Any:
    name = getattr(operation, "__name__", "").partition(".")[0]
    is_kept = name in _KEPT or "scaled_dot_product" in name
    policies = torch_checkpoint.CheckpointPolicy
    return policies.MUST_SAVE if is_kept else policies.PREFER_RECOMPUTE


def _nested(makers: list[Contexts]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return one context for the forward and one for the recomputation, each of all makers'."""
    pairs = [make() for make in makers]
    return _all([pair[0] for pair in pairs]), _all([pair[1] for pair in pairs])


@contextmanager
def _all(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `checkpointing` and `checkpointed_layers`, read from the layers' own flags."""
    layers = checkpointed_layers(model)
    return {"checkpointing": _value_of(model, layers), "checkpointed_layers": len(layers)}


def recomputed_share(model: nn.Module) -> float:
    """Share of the layers whose matrix products the backward computes again."""
    fields = actual(model)
    if fields["checkpointing"] in ("off", "selective"):
        return 0.0
    return len(checkpointed_layers(model)) / len(checkpointable_layers(model))


def _value_of(model: nn.Module, layers: list[nn.Module]) -> str:
    if not layers:
        return "off"
    function: Any = layers[0]._gradient_checkpointing_func
    if isinstance(function, partial) and function.func is _with_inputs_on_the_host:
        return "offload"
    contexts: Any = getattr(function, "keywords", {}).get("context_fn")
    if contexts is _keep_products or (isinstance(contexts, partial) and _keep_products in contexts.args[0]):
        return "selective"
    every = checkpointable_layers(model)
    return "full" if layers == every else f"every-{every.index(layers[1]) - every.index(layers[0])}"
