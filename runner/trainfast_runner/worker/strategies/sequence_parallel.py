"""Sequence parallelism: between the layers that tensor parallelism cuts, each rank has its own part of every sequence.

The exchanges are those of Korthikanti et al. 2022 (section 4.2.2): a sequence is gathered before the matrices cut by
columns, and the sums after those cut by rows are scattered, which sends what an all-reduce sends. They work on plain
tensors, as the hooks of `tensor_parallel.py` do, where torch's SequenceParallel wants DTensors.

Hidden states have the shape (batch, sequence, hidden).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Exchange = Callable[[Tensor, Any], Tensor]
"""A function of hidden states and a process group."""


@dataclass
class SequencePlan:
    """Modules around which sequences are split and gathered, by their full names."""

    first_block: str
    """Its input is whole and is split."""
    last_norm: str
    """Its output is gathered."""
    has_cut_head: bool
    """True if every rank computes its own part of the logits: their gradients are summed over ranks."""
    gathers: set[str] = field(default_factory=set)
    """Modules that take whole sequences, whose gradients are summed over ranks: attentions and MLPs."""
    scatters: set[str] = field(default_factory=set)
    """Modules whose outputs are summed over ranks; each rank keeps its part of the sequence."""
    summed: set[str] = field(default_factory=set)
    """Parameters that each rank uses on its part of the sequence: their gradients are summed over ranks."""


def plan_sequence(model: nn.Module, enters: set[str], reduces: set[str]) -> SequencePlan:
    """Return the plan for a model of llama's layout; take the modules that it exchanges for from both sets.

    `enters` and `reduces` are those of the model's TensorPlan.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = f"{prefix}." if hasattr(model, prefix) else ""
    blocks, last_norm = f"{base}layers.", f"{base}norm"
    plan = SequencePlan(f"{blocks}0", last_norm, has_cut_head=any(not name.startswith(blocks) for name in enters))
    plan.gathers = {name.rpartition(".")[0] for name in enters if name.startswith(blocks)}
    plan.scatters = {name for name in reduces if name.startswith(blocks)}
    norms = {last_norm, *(f"{name.rpartition('.')[0]}.{norm}" for name in plan.gathers for norm in NORMS)}
    plan.summed = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in norms}
    enters.clear()
    reduces -= plan.scatters
    return plan


NORMS = ("input_layernorm", "post_attention_layernorm")
"""The norms of a block of llama's layout."""


class SplitSequence:
    """Hook before the first block; `parts` is the number of parts it last made of a sequence, None before a forward."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.parts: int | None = None

    def __call__(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        part = exchanged(inputs[0], self.group, split, gather)
        self.parts = inputs[0].shape[1] // part.shape[1]
        return (part, *inputs[1:])


def add_sequence_exchanges(model: nn.Module, plan: SequencePlan, group: Any) -> None:
    """Add the hooks of the plan to the modules."""

    def gathered(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if inputs:
            return (exchanged(inputs[0], group, gather, scatter_sum), *inputs[1:]), keywords
        return inputs, {**keywords, "hidden_states": exchanged(keywords["hidden_states"], group, gather, scatter_sum)}

    def scattered(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return exchanged(output, group, scatter_sum, gather)

    def joined(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return exchanged(output, group, gather, scatter_sum if plan.has_cut_head else split)

    for name in plan.gathers:
        model.get_submodule(name).register_forward_pre_hook(gathered, with_kwargs=True)
    for name in plan.scatters:
        model.get_submodule(name).register_forward_hook(scattered)
    model.get_submodule(plan.first_block).register_forward_pre_hook(SplitSequence(group))
    model.get_submodule(plan.last_norm).register_forward_hook(joined)


def sequence_parts(model: nn.Module) -> int | None:
    """Number of parts into which the live model's last forward split a sequence; None before it, 1 without a split."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next((hook.parts for hook in hooks if isinstance(hook, SplitSequence)), 1)


def split(whole: Tensor, group: Any) -> Tensor:
    """Return this rank's part of the sequence, in memory of its own."""
    return whole.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].clone()


def gather(part: Tensor, group: Any) -> Tensor:
    """Return the whole sequence from the ranks' parts."""
    degree = dist.get_world_size(group)
    parts = part.new_empty(degree * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous(), group=group)
    return torch.cat(parts.chunk(degree), dim=1)


def scatter_sum(whole: Tensor, group: Any) -> Tensor:
    """Return this rank's part of the sum over ranks of whole sequences."""
    parts = torch.cat(whole.chunk(dist.get_world_size(group), dim=1))
    part = parts.new_empty(whole.shape[0], *parts.shape[1:])
    dist.reduce_scatter_tensor(part, parts, group=group)
    return part


def exchanged(value: Tensor, group: Any, there: Exchange, back: Exchange) -> Tensor:
    """Return `there` of the value; `back` is the exchange of its gradient."""
    result: Tensor = _Exchanged.apply(value, group, there, back)  # type: ignore[no-untyped-call]
    return result


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any, there: Exchange, back: Exchange) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.group), None, None, None
