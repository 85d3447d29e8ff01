"""Divides a traced step into segments: a phase, a micro-batch, a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..shared.traced import ACTIVATIONS, TEMPORARY
from .live_bytes import LiveBytes
from .repeated_blocks import TracedStack


class StepWatch:
    """Begins a segment at each phase that the loop enters and at each block that hooks report.

    In the backward, a block begins when the gradient of its output is there.
    """

    def __init__(self, live_bytes: LiveBytes) -> None:
        self.live_bytes = live_bytes
        self.phase = ""
        self.micro = 0
        self.place = ""

    def enter(self, phase: str) -> None:
        """Begin a phase of the step, outside of all blocks."""
        self.micro += phase == "forward"
        self.phase, self.place = phase, ""
        self.live_bytes.category = TEMPORARY if phase in ("backward", "optimizer") else ACTIVATIONS
        self.live_bytes.begin(phase, self.micro, "")

    def enter_block(self, place: str) -> None:
        """Enter a block; with the empty string, leave it for the operations outside of all blocks."""
        self.live_bytes.before_next = None
        if place != self.place:
            self.place = place
            self.live_bytes.begin(self.phase, self.micro, place)

    def around_checkpoints(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts that torch's checkpoint enters: one for the forward, one for computing it again."""
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Count what the backward recomputes as activations, also when torch stops it by an exception."""
        self.live_bytes.category = ACTIVATIONS
        try:
            yield
        finally:
            self.live_bytes.category = TEMPORARY

    def follow(self, stacks: list[TracedStack]) -> list[RemovableHandle]:
        """Add hooks to every block, and return them for removal."""
        hooks = []
        for number, stack in enumerate(stacks):
            for index, block in enumerate(stack.blocks):
                is_last = index == len(stack.blocks) - 1
                follower = _Follower(self, f"{number}:{index}", is_first=index == 0, is_last=is_last)
                hooks.append(block.register_forward_pre_hook(follower.before, with_kwargs=True))
                hooks.append(block.register_forward_hook(follower.after))
        return hooks


@dataclass(frozen=True)
class _Follower:
    """One block's hooks."""

    watch: StepWatch
    place: str
    is_first: bool
    is_last: bool

    def before(self, _block: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.watch.phase == "backward":
            return  # a recomputation, which stays in the block whose backward it is
        self.watch.enter_block(self.place)
        if self.is_first:
            self._when_differentiated([*inputs, *keywords.values()], "")

    def after(self, _block: nn.Module, _inputs: Any, output: Any) -> None:
        if self.watch.phase == "backward":
            return
        self._when_differentiated(output if isinstance(output, tuple | list) else [output], self.place)
        if self.is_last:
            # Only with the next operation: the model releases the last block's input after this hook.
            self.watch.live_bytes.before_next = lambda: self.watch.enter_block("")

    def _when_differentiated(self, values: Any, place: str) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _gradient: self.watch.enter_block(place))  # type: ignore[no-untyped-call]
                return
