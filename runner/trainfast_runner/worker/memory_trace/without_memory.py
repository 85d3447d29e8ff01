"""Put tensors without memory in the place of a model's own; use it inside a FakeTensorMode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


def replace_with_empty(model: nn.Module, device: torch.device | None = None) -> dict[int, Tensor]:
    """Replace parameters and buffers in place, on `device` or their own; tied ones stay tied.

    Returns the new tensors by the ids of the replaced ones.
    """
    replacements: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                if id(tensor) not in replacements:
                    empty_tensor = empty_like(tensor, device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replacements[id(tensor)] = (
                        nn.Parameter(empty_tensor, tensor.requires_grad) if is_parameter else empty_tensor
                    )
                # Not the dictionary alone: an LSTM keeps a list of its weights as well.
                setattr(module, name, replacements[id(tensor)])
    return replacements


def empty_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """An empty tensor of the same shape, strides and type, on `device` or on the tensor's own."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and outputs of transformers, in their order."""
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def choose_foreach(optimizer: Any, device_type: str) -> None:
    """Choose foreach as torch does for tensors on a GPU; for fake tensors torch does not."""
    for group in optimizer.param_groups:
        if device_type == "cuda" and group.get("foreach", 0) is None and not group.get("fused"):
            group["foreach"] = True
