"""Matrix products of the blocks in float8, by torchao; the head, norms and attention stay as with bf16."""

from collections.abc import Collection
from typing import Any

from torch import nn

from ..invalid import InvalidInput

MULTIPLE = 16
"""torch's `_scaled_mm` takes matrices whose sizes are multiples of it."""


def convert(model: nn.Module, blocks: Collection[nn.Module], *, emulate: bool = False) -> None:
    """Replace the linear layers of `blocks`, with one scale a tensor; `emulate` computes the same without the hardware.

    Raises InvalidInput for a model without any that float8 can have.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = {id(module) for block in blocks for module in block.modules() if _fits(module)}
    if not layers:
        reason = f"no linear layer of {model.config.model_type} has sizes that are multiples of {MULTIPLE}"  # type: ignore[union-attr]
        raise InvalidInput(reason, key="precision", nearest="bf16")
    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=lambda module, _: id(module) in layers, config=config)


def _fits(module: nn.Module) -> bool:
    # Its subclasses compute something else, such as an expert's share.
    return type(module) is nn.Linear and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `float8_layers`, the number of live layers that compute in float8."""
    return {"float8_layers": sum(type(module).__name__ == "Float8Linear" for module in model.modules())}
