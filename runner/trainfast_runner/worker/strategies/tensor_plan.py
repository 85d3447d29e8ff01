"""The layers that tensor parallelism cuts: the model's own plan if transformers ships one, else ours.

The cut is that of Megatron-LM (Shoeybi et al. 2019, section 3): the matrices that open an attention or an MLP by
columns, those that close it by rows, so that each pair needs one all-reduce forward and one backward. The table of
token embeddings is cut by its rows, as there, together with an output head that is tied to it; transformers' plans
leave both whole, which in fp32 under AdamW takes 16 bytes of every rank for each element.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..invalid import InvalidInput
from ..shared.parallel_plans import OUR_TENSOR_PLANS

GATHERED_STYLES = ("colwise_gather_output", "colwise_rep")
"""Styles of transformers' plans that cut a matrix and make its output whole again."""
SUMMED_STYLES = ("replicated_with_grad_allreduce",)
"""Styles of transformers' plans that keep a parameter whole and sum its gradients over the ranks."""


@dataclass(frozen=True)
class Slice:
    """A parameter cut along `dim`. `parts` matrices lie packed there (query, key and value), each cut by itself."""

    dim: int
    parts: int = 1


@dataclass
class TensorPlan:
    """Parameters and modules to change, by their full names; all others are the same on every rank."""

    slices: dict[str, Slice] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    """Parameters that are whole on every rank but used on its own heads only: their gradients are summed over ranks."""
    once: set[str] = field(default_factory=set)
    """Biases added after a sum over ranks: only one rank adds them."""
    enters: set[str] = field(default_factory=set)
    """Modules that take whole activations; each rank computes with its own slice."""
    reduces: set[str] = field(default_factory=set)
    """Modules whose outputs are summed over ranks."""
    gathers: set[str] = field(default_factory=set)
    """Modules whose outputs are joined along the last dimension."""
    looks_up: set[str] = field(default_factory=set)
    """Embeddings cut by rows: each rank looks up its own ids, and the outputs are summed."""
    widths: list[tuple[str, str]] = field(default_factory=list)
    """Modules and their attributes that hold a width, which is smaller in a slice."""


def plan_for(model: nn.Module, degree: int) -> TensorPlan:
    """Plan the cut of `model` into `degree` slices. Raises InvalidInput if it has no plan or does not divide."""
    config: Any = model.config
    styles = _styles(model)
    plan, modules = TensorPlan(), dict(model.named_modules())
    for name, module in modules.items():
        for parameter in [None, *dict(module.named_parameters(recurse=False))]:
            full_name = name if parameter is None else f"{name}.{parameter}"
            style = next((style for pattern, style in styles.items() if pattern.fullmatch(full_name)), None)
            if style is None:
                continue
            if parameter is None:
                _cut_module(plan, model, name, module, style, degree)
            else:
                _cut_parameter(plan, full_name, style, config)
    for name, module in modules.items():
        _norm_of_heads(plan, name, module)
    _cut_vocabulary(plan, model, degree)
    parameters = dict(model.named_parameters())
    for name, cut in plan.slices.items():
        size = parameters[name].shape[cut.dim] if name in parameters else 0
        if size % (degree * cut.parts):
            raise InvalidInput(
                f"{config.model_type}: tp_degree={degree} does not divide the {size // cut.parts} columns of {name}",
                key="tp_degree",
            )
    if not plan.slices:
        raise InvalidInput(
            f"the tensor-parallel plan of {config.model_type} names no layer of this model", key="strategy"
        )
    return plan


def _styles(model: nn.Module) -> dict[re.Pattern[str], str]:
    """The style of each module or parameter that the plan of transformers or ours cuts, by a pattern of full names."""
    config: Any = model.config
    plan = getattr(config, "base_model_tp_plan", None) or OUR_TENSOR_PLANS.get(config.model_type)
    if not plan:
        raise InvalidInput(
            f"{config.model_type} has no tensor-parallel plan: transformers ships none, and we have one for"
            f" {' and '.join(OUR_TENSOR_PLANS)}",
            key="strategy",
            allowed=["fsdp", "ddp"],
            nearest="fsdp",
        )
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = f"{prefix}." if hasattr(model, prefix) else ""
    styles = {f"{base}{pattern}": style for pattern, style in plan.items()}
    styles.update(getattr(type(model), "_tp_plan", None) or {})
    return {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in styles.items()}


def _cut_module(plan: TensorPlan, model: nn.Module, name: str, module: nn.Module, style: str, degree: int) -> None:
    # transformers' Conv1D keeps its matrix as (in, out), nn.Linear as (out, in).
    out, into = (1, 0) if type(module).__name__ == "Conv1D" else (0, 1)
    has_bias = getattr(module, "bias", None) is not None
    if style in GATHERED_STYLES:
        weight: Any = module.weight
        tied = sum(weight is parameter for part in model.modules() for parameter in part._parameters.values()) > 1
        if tied or weight.shape[out] % degree:
            return
        plan.gathers.add(name)
    if style in ("colwise", *GATHERED_STYLES):
        plan.slices[f"{name}.weight"] = Slice(out)
        if has_bias:
            plan.slices[f"{name}.bias"] = Slice(0)
        plan.enters.add(name)
        if out == 1:
            plan.widths.append((name, "nf"))
    elif style == "packed_colwise" and out == 1:
        plan.slices[f"{name}.weight"] = Slice(out, parts=3)
        plan.slices[f"{name}.bias"] = Slice(0, parts=3)
        plan.enters.add(name)
        # GPT-2's attention splits the packed projection at a fixed width.
        plan.widths += [(name, "nf"), (name.rpartition(".")[0], "split_size")]
    elif style == "rowwise":
        plan.slices[f"{name}.weight"] = Slice(into)
        if has_bias:
            plan.once.add(f"{name}.bias")
        plan.reduces.add(name)
    elif style in SUMMED_STYLES:
        plan.summed |= {f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)}
    elif style == "moe_tp_experts" and set(module._parameters) == {"gate_up_proj", "down_proj"}:
        plan.enters.add(name)
        plan.reduces.add(name)
    else:
        raise _unknown(name, style, model.config)


def _cut_parameter(plan: TensorPlan, name: str, style: str, config: Any) -> None:
    """Cut one tensor of experts, which has the shape (experts, out, in)."""
    if style == "packed_colwise":
        plan.slices[name] = Slice(1, parts=2)
    elif style == "rowwise":
        plan.slices[name] = Slice(2)
    else:
        raise _unknown(name, style, config)


def _cut_vocabulary(plan: TensorPlan, model: nn.Module, degree: int) -> None:
    """Cut the rows of the token embeddings, unless they do not divide or are shared with other than an output head."""
    find: Any = getattr(model, "get_input_embeddings", None)
    table = getattr(find() if find else None, "weight", None)
    if table is None or table.shape[0] % degree:
        return
    sharing = {name: module for name, module in model.named_modules() if module._parameters.get("weight") is table}
    if not all(isinstance(module, nn.Embedding | nn.Linear) for module in sharing.values()):
        return
    for name, module in sharing.items():
        plan.slices[f"{name}.weight"] = Slice(0)
        if isinstance(module, nn.Embedding):
            plan.looks_up.add(name)
            continue
        plan.enters.add(name)
        plan.gathers.add(name)
        if module.bias is not None:
            # BERT's head and the module around it both hold its bias.
            plan.slices.update(dict.fromkeys(_names_of(model, module.bias), Slice(0)))


def _names_of(model: nn.Module, parameter: nn.Parameter) -> list[str]:
    return [
        name for name, named_parameter in model.named_parameters(remove_duplicate=False) if named_parameter is parameter
    ]


def _unknown(name: str, style: str, config: Any) -> InvalidInput:
    return InvalidInput(
        f"the tensor-parallel plan of {getattr(config, 'model_type', 'this model')} cuts {name} as {style!r},"
        " which this worker cannot do",
        key="strategy",
        allowed=["fsdp", "ddp"],
        nearest="fsdp",
    )


def _norm_of_heads(plan: TensorPlan, name: str, module: nn.Module) -> None:
    """Sum the gradients of a norm over each head's queries or keys, which sees only this rank's heads."""
    parent, _, child_name = name.rpartition(".")
    if child_name in ("q_norm", "k_norm") and f"{parent}.q_proj" in plan.enters:
        plan.summed |= {f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)}
