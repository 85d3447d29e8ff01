"""liger-kernel's norms, rotary embeddings and MLPs in the place of a model's own."""

from typing import Any

from torch import nn

from ..catalog import has_liger_kernels
from ..invalid import InvalidInput
from ..spec import Knobs


def use_kernels(model: nn.Module, knobs: Knobs) -> None:
    """Let liger-kernel replace the forwards that it knows, but not the loss. Raises InvalidInput if it knows none."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    if actual(model)["kernels"] != "liger":
        reason = f"liger-kernel has no kernels for {model.config.model_type}"  # type: ignore[union-attr]
        raise InvalidInput(reason, key="kernels", allowed=["off"], nearest="off")


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `kernels`, by the forwards of the live modules."""
    return {"kernels": "liger" if has_liger_kernels(model.modules()) else "off"}
