"""The `optimizer` knob: the class of its entry in the catalog, over two groups of parameters."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..catalog import OPTIMIZERS, OptimizerEntry
from ..invalid import InvalidInput
from ..spec import Knobs


def import_optimizer_code(name: str) -> None:
    """Load the library of an optimizer before memory is counted; `build_optimizer` reports a missing one."""
    with suppress(ImportError):
        importlib.import_module(OPTIMIZERS[name].path.partition(":")[0], __package__)


def optimizer_class(entry: OptimizerEntry) -> Any:
    """The class of an entry. Raises ImportError when its package is missing or too old."""
    module, _, name = entry.path.partition(":")
    optimizer_module = importlib.import_module(module, __package__)
    if not hasattr(optimizer_module, name):
        raise ImportError(f"{module} has no {name}")
    return getattr(optimizer_module, name)


def build_optimizer(model: nn.Module, knobs: Knobs) -> Optimizer:
    """The optimizer over `model`'s trainable parameters. Raises InvalidInput when its package is missing."""
    entry = OPTIMIZERS[knobs.optimizer]
    groups = parameter_groups(model, knobs.weight_decay)
    try:
        make_optimizer = optimizer_class(entry)
    except ImportError as error:
        if entry.package is None:
            raise
        raise InvalidInput(
            f"optimizer={entry.name} needs the package {entry.package}: {sys.executable} -m pip install"
            f" {entry.package}",
            key="optimizer",
            allowed=[name for name, other_entry in OPTIMIZERS.items() if other_entry.package != entry.package],
            nearest=entry.fallback,
        ) from error
    optimizer: Optimizer = make_optimizer(groups, lr=knobs.lr, **dict(entry.arguments))
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings with weight decay; biases and norms without.

    Norms and biases are vectors, except biases kept per expert or per pair of positions; those are recognized by name.
    Embeddings decay as they do in the Trainer; a table that is tied to the output projection is in one group, once.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    # ZeRO-3 keeps the shape of a partitioned parameter in `ds_shape`.
    decays = {name: len(getattr(p, "ds_shape", p.shape)) >= 2 and "bias" not in name for name, p in trainable}
    groups = [
        {"params": [p for name, p in trainable if decays[name]], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if not decays[name]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def class_name(optimizer: Optimizer) -> str:
    """Name of the optimizer's class, as bitsandbytes names the class with 8-bit or paged states.

    The Trainer builds bitsandbytes' AdamW with `optim_bits=8` where the loop here builds AdamW8bit.
    """
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("bitsandbytes") and name == "AdamW":
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
        return f"{'Paged' if getattr(optimizer, 'is_paged', False) else ''}AdamW{'8bit' if bits == 8 else ''}"
    return name


def implementation(optimizer: Optimizer) -> str | None:
    """Name of the loop of torch's AdamW that runs: loop, foreach or fused; None for other optimizers.

    With neither flag given torch decides by the parameters' device, in a function that is called here too.
    """
    if type(optimizer) is not torch.optim.AdamW:
        return None
    group = optimizer.param_groups[0]
    if group["fused"]:
        return "fused"
    if group["foreach"] is None:
        if not group["params"]:
            # ZeRO-3 shows the optimizer its parameters only while it steps.
            return None
        try:
            from torch.optim.optimizer import _default_to_fused_or_foreach
        except ImportError:
            return None
        _, foreach = _default_to_fused_or_foreach(group["params"], group["differentiable"], use_fused=False)
        return "foreach" if foreach else "loop"
    return "foreach" if group["foreach"] else "loop"


def rate_at(step: int, knobs: Knobs) -> float:
    """The learning rate of `step` (from 1): constant, or falling linearly to zero after the last step."""
    if knobs.lr_schedule == "linear":
        return knobs.lr * (knobs.steps - step + 1) / knobs.steps
    return knobs.lr
