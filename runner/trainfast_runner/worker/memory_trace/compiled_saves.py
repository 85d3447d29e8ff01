"""The tensors that a compiled step keeps for its backward: fewer than an eager step keeps.

torch's partitioner computes again, inside the backward's kernels, what elementwise operations made of tensors that are
kept anyway; operands of products, which no kernel computes on the way, it keeps (torch/_functorch/partitioners.py,
`min_cut_rematerialization_partition`). Of the random numbers of a dropout on a CPU it keeps the mask, a byte an
element. What an autograd function of Python saves counts as no operand.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..shared.words import ACTIVATIONS

OUTSIDE = -1
"""The number of a storage made in another part, or given (a weight, the batch): it is there in the backward."""
CAST_OR_JOIN = ("aten::_to_copy", "aten::cat")
"""Operations that the compiler fuses as it does elementwise ones."""


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


class _Saved:
    """A tensor that an operation keeps for its backward."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.number = number
        self.tensor: Tensor | None = tensor
        """The tensor, the mask that stands for it, or None if it is computed again."""
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.is_operand = False
        """True if a product reads it."""


class CompiledSaves(saved_tensors_hooks):
    """Keeps what a compiled step would; the operations of each part of the forward are told to `see`."""

    def __init__(self, live_bytes: Any) -> None:
        super().__init__(self._pack, self._unpack)
        self._live_bytes = live_bytes
        self._begin_part()

    def _begin_part(self) -> None:
        self._saved: list[_Saved] = []
        self._awaited: list[_Saved] = []
        """Those whose operation comes next: inputs are saved before it runs."""
        self._numbers: dict[int, int] = {}
        """The number of the storage at each address, which may be another storage's later."""
        self._made_of: list[tuple[int, ...] | None] = []
        """The storages, by number, that an elementwise operation made each storage of; None of another operation."""
        self._random: set[int] = set()

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self._numbers.get(_address(tensor), OUTSIDE))
        self._saved.append(saved)
        self._awaited.append(saved)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is not None and saved.tensor.dtype == saved.dtype:
            return saved.tensor
        self._live_bytes.is_counting = False
        empty = torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype, device=saved.device)
        self._live_bytes.is_counting = True
        return empty

    def see(self, func: Any, operands: Iterable[Tensor], results: Iterable[Tensor], is_product: bool) -> None:
        """See an operation of this part."""
        is_elementwise = torch.Tag.pointwise in func.tags or func._schema.name in CAST_OR_JOIN
        addresses = [*map(_address, operands)]
        read = tuple(self._numbers.get(address, OUTSIDE) for address in addresses)
        for saved in self._awaited:
            saved.is_operand |= is_product and saved.number in read
        self._awaited.clear()
        for address in map(_address, results):
            if address not in addresses:
                self._numbers[address] = len(self._made_of)
                self._made_of.append(read if is_elementwise else None)
            elif func._schema.name.endswith("_") and (number := self._numbers.get(address)) is not None:
                # Its first value is gone.
                self._made_of[number] = None
                if torch.Tag.nondeterministic_seeded in func.tags:
                    self._random.add(number)

    def settle(self) -> None:
        """Drop what the backward of this part would compute again."""
        holders: dict[int, list[_Saved]] = {}
        for saved in self._saved:
            holders.setdefault(saved.number, []).append(saved)
        there: dict[int, bool] = {OUTSIDE: True}
        for number, sources in [*enumerate(self._made_of)]:
            saves = holders.get(number, [])
            again = sources is not None and all(there[source] for source in sources)
            there[number] = again or bool(saves)
            if not saves or any(saved.is_operand for saved in saves):
                continue
            if again:
                kept = None
            elif number in self._random:
                kept = torch.empty(saves[0].shape, dtype=torch.bool, device=saves[0].device)
                self._live_bytes.count_all([kept], ACTIVATIONS)
            else:
                continue
            for saved in saves:
                saved.tensor = kept
        self._begin_part()
