"""Says where in the step the training is: which phase, which micro-batch, which block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .ledger import ACTIVATIONS, TEMPORARY, Ledger
from .repeated_blocks import Stack


class StepWatch:
    """In place of the step's clock: each phase it is told of, and each block that hooks report, is a new stretch.

    Blocks are told apart in the backward by their outputs' gradients: a block's backward begins when that is there.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.phase = ""
        self.micro = 0
        self.place = ""

    def enter(self, phase: str) -> None:
        """A phase of the step begins, outside of all blocks."""
        self.micro += phase == "forward"
        self.phase, self.place = phase, ""
        self.ledger.category = TEMPORARY if phase in ("backward", "optimizer") else ACTIVATIONS
        self.ledger.begin(phase, self.micro, "")

    def end_step(self) -> Any:
        """No times."""

    def at(self, place: str) -> None:
        """The step comes to a block, or with the empty text to what is in none."""
        self.ledger.before_next = None
        if place != self.place:
            self.place = place
            self.ledger.begin(self.phase, self.micro, place)

    def around_checkpoints(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts that torch's checkpoint enters: one for the forward, one for computing it again."""
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Count what the backward computes again as activations, also when torch breaks off by an exception."""
        self.ledger.category = ACTIVATIONS
        try:
            yield
        finally:
            self.ledger.category = TEMPORARY

    def follow(self, stacks: list[Stack]) -> list[RemovableHandle]:
        """Hang hooks on every block; returns them, to be taken away."""
        hooks = []
        for number, stack in enumerate(stacks):
            for index, block in enumerate(stack.blocks):
                follower = _Follower(self, f"{number}:{index}", index == 0, index == len(stack.blocks) - 1)
                hooks.append(block.register_forward_pre_hook(follower.before, with_kwargs=True))
                hooks.append(block.register_forward_hook(follower.after))
        return hooks


class _Follower:
    """One block's hooks."""

    def __init__(self, watch: StepWatch, place: str, first: bool, last: bool) -> None:
        self.watch = watch
        self.place = place
        self.first = first
        self.last = last

    def before(self, _block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.watch.phase == "backward":
            return  # a recomputation, which stays in the block whose backward it is
        self.watch.at(self.place)
        if self.first:
            self._when_differentiated([*inputs, *named.values()], "")

    def after(self, _block: nn.Module, _inputs: Any, output: Any) -> None:
        if self.watch.phase == "backward":
            return
        self._when_differentiated(output if isinstance(output, tuple | list) else [output], self.place)
        if self.last:
            # Only with the next operation: the model lets go of the last block's input after this hook.
            self.watch.ledger.before_next = lambda: self.watch.at("")

    def _when_differentiated(self, values: Any, place: str) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _gradient: self.watch.at(place))  # type: ignore[no-untyped-call]
                return
