"""The fields of the `actual` record, read from the live objects and not from the knobs."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer

from ..model.build import attention_of
from ..model.compilation import unwrap
from ..model.flops import SampleFlops
from ..model.model_config import text_part
from ..model.objective import logits_of
from ..model.optimizer import class_name, dtype_name, implementation
from ..strategies.base import Strategy

NULL_UNLESS_READ = dict.fromkeys(("reduce_dtype", "zero_stage", "mesh", "pipeline_stages"))
"""Fields of the record that only some strategies read from their live objects."""


class ComputeDtype:
    """Reads the dtype of a forward's first matrix product with a hook, and removes the hook.

    A hook inside a compiled module would be compiled into it: there the dtype is the logits'.
    """

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.name: str | None = None
        layer = model if compiled else next((m for m in model.modules() if _is_matrix_product(m)), None)
        self._hook = None if layer is None else layer.register_forward_hook(self._see)

    def _see(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = output if isinstance(output, torch.Tensor) else logits_of(output)
        self.name = dtype_name(tensor.dtype)
        if self._hook is not None:
            self._hook.remove()


def _is_matrix_product(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_leaf = next(module.children(), None) is None
    if not is_leaf or not isinstance(weight, torch.Tensor) or isinstance(module, nn.Embedding):
        return False
    # ZeRO-3 keeps the shape of a partitioned parameter in `ds_shape`.
    return len(getattr(weight, "ds_shape", weight.shape)) == 2


def whole_size(parameter: torch.Tensor) -> int:
    """Elements of the whole parameter, also if this rank has a slice of it or DeepSpeed's empty placeholder."""
    return int(getattr(parameter, "ds_numel", getattr(parameter, "whole_numel", parameter.numel())))


def actual_fields(
    model: nn.Module,
    module: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    flops: SampleFlops | None,
) -> dict[str, Any]:
    """Fields of an `actual` record; `model` is the built model, `module` the wrapped one."""
    config: Any = model.config
    text, device = text_part(config), strategy.device
    return {
        **NULL_UNLESS_READ,
        **strategy.actual_fields(unwrap(module)),
        "optimizer": class_name(optimizer),
        "optimizer_implementation": implementation(optimizer),
        "param_dtype": dtype_name(next(module.parameters()).dtype),
        "attention": attention_of(model),
        "checkpointing": "full" if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) else "off",
        "world_size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "compiled": isinstance(module, OptimizedModule),
        "model_type": config.model_type,
        "parameters": sum(whole_size(p) for p in model.parameters()),
        "model_flops_per_sample": flops.model if flops else None,
        "recomputed_flops_per_sample": flops.recomputed if flops else None,
        "notebook_flops_per_sample": flops.notebook if flops else None,
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "vocab_size": getattr(text, "vocab_size", None),
        "loader_workers_alive": len(multiprocessing.active_children()),
    }
