"""Count the work of traced operations: calls, FLOPs of products and convolutions, bytes read and written.

Multiplied by a device's measured speeds, the counts predict the time of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor

from ..shared.words import NO_WORK

Work = tuple[float, float, float]
"""Calls of operations, FLOPs, bytes moved."""
BACKWARD_PRODUCTS = 2.5
"""An attention's backward has five products where its forward has two (FlashAttention-2, Dao 2023, section 3.1)."""
OPERATIONS_WITHOUT_TRAFFIC = ("empty", "detach", "alias", "_local_scalar_dense")
"""Beginnings of the names of operations that neither read nor write their tensors."""


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """Return the work of one operation; a view moves no bytes."""
    if func.namespace == "prim":
        return NO_WORK  # a question about a tensor, such as its device
    name, is_view, written_indexes = _traits(func)
    if is_view:
        return 1.0, 0.0, 0.0
    read_bytes = sum(_bytes(tensor) for tensor in _tensors((*args, *kwargs.values())))
    if name == "aten::embedding":
        # An embedding reads the looked-up rows, not the table.
        read_bytes = _bytes(result)
    changed_arguments = tuple(args[index] for index in written_indexes if index < len(args))
    # An operation that changes its arguments returns one of them.
    stored_bytes = sum(_bytes(tensor) for tensor in _tensors(changed_arguments if written_indexes else (result,)))
    return 1.0, _flops(name, args, result), read_bytes + stored_bytes


@cache
def _traits(func: Any) -> tuple[str, bool, tuple[int, ...]]:
    """The operation's name, True if its result is a view of an argument, and the indexes of arguments that change."""
    schema = func._schema
    name = str(schema.name)
    is_view = any(returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns)
    written_indexes = [
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return name, is_view or name.partition("::")[2].startswith(OPERATIONS_WITHOUT_TRAFFIC), tuple(written_indexes)


def _flops(name: str, args: tuple[Any, ...], result: Any) -> float:
    """FLOPs of a product, a multiplication and an addition counted as two; 0 for any other operation."""
    operation = name.partition("::")[2]
    if operation.startswith("_scaled_dot_product"):
        if "backward" in operation:
            return BACKWARD_PRODUCTS * _attention_flops(*args[1:4])
        return _attention_flops(*args[:3])
    multiplied = 0.0
    match operation:
        case "mm" | "bmm" | "_grouped_mm":
            multiplied = args[0].numel() * args[1].shape[-1]
        case "addmm" | "baddbmm":
            multiplied = args[1].numel() * args[2].shape[-1]
        case "convolution":
            multiplied = result.numel() * args[1].numel() / args[1].shape[0]
        case "convolution_backward":
            # The last argument says if the gradients of the input and of the weights are wanted.
            multiplied = sum(args[-1][:2]) * args[0].numel() * args[2].numel() / args[2].shape[0]
    return 2.0 * multiplied


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> float:
    """FLOPs of query x key and of their product with the values, not halved for causality."""
    return 2.0 * query.numel() * key.shape[-2] * (1 + value.shape[-1] / query.shape[-1])


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())
