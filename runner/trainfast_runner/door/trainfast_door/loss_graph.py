"""The part of a step's graph between the outputs of the model and the loss: its tensors and their bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor

SAVED_PREFIX = "_saved_"
"""Prefix of the fields in which a node of the graph holds the tensors saved for its backward."""


class LossGraph:
    """Walks from the roots of a backward pass to the outputs' own nodes, which it does not enter."""

    def __init__(self, roots: Iterable[Tensor], outputs: list[Any]) -> None:
        """`outputs` are the nodes of the model's outputs, None for one that needs no gradient."""
        self.reached = set()
        """The indexes of the outputs that the roots depend on."""
        self.saved: dict[int, int] = {}
        """The bytes of every storage that a node saved, by its address."""
        self.gradient_bytes = 0
        """Bytes of the gradients that the largest node takes and gives."""
        stops = {id(node): index for index, node in enumerate(outputs) if node is not None}
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        # A node is known by its id, which another node may get unless the first is kept.
        seen_nodes: dict[int, Any] = {}
        while nodes:
            node = nodes.pop()
            if id(node) in seen_nodes:
                continue
            seen_nodes[id(node)] = node
            if id(node) in stops:
                self.reached.add(stops[id(node)])
                continue
            self._add(node)
            nodes += [next_node for next_node, _ in node.next_functions if next_node is not None]

    def _add(self, node: Any) -> None:
        for tensor in _saved_by(node):
            storage = tensor.untyped_storage()
            self.saved[storage.data_ptr()] = storage.nbytes()
        taken_bytes = sum(map(_bytes_of, getattr(node, "_input_metadata", ())))
        passed_on_bytes = 0
        for next_node, index in node.next_functions:
            forms = getattr(next_node, "_input_metadata", ())
            passed_on_bytes += _bytes_of(forms[index]) if index < len(forms) else 0
        self.gradient_bytes = max(self.gradient_bytes, taken_bytes + passed_on_bytes)

    def bytes_beside(self, counted_addresses: Collection[int]) -> int:
        """Bytes that the loss adds to the step's peak, without the storages at `counted_addresses`."""
        return self.gradient_bytes + sum(
            size for address, size in self.saved.items() if address not in counted_addresses
        )


def _saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors that a node saved: fields of a built-in one, `saved_tensors` of a Function of the script's own."""
    fields = [getattr(node, name) for name in dir(node) if name.startswith(SAVED_PREFIX)]
    for value in (*fields, getattr(node, "saved_tensors", ())):
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor):
                yield item


def _bytes_of(form: Any) -> int:
    """Bytes of a gradient by the metadata of a node's input."""
    size = form.dtype.itemsize
    for dimension in form.shape:
        size *= int(dimension)
    return int(size)
