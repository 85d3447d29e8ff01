"""Straight lines through the traces of two batch sizes, which give the live bytes at any batch size."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..shared.words import ACTIVATIONS, TEMPORARY
from .live_bytes import Bytes, LiveBytes, TracedSegment, Work

Line = tuple[tuple[float, ...], tuple[float, ...]]
"""Bytes by category, or work by kind: fixed, and for each sample of the batch."""
TRACED_BATCH_SIZES = (2, 4)
"""Batch sizes that are traced. Not 1: with one sample some copies are views."""


class TimelinesDiffer(Exception):
    """The two timelines have different operations: there are no lines through them."""


def segment_lines(
    small: list[TracedSegment], large: list[TracedSegment], batches: tuple[int, int]
) -> list[dict[str, Any]]:
    """Return one row for each segment.

    `lines` are the highest live bytes above its start, and `delta` is the change from its start to its end. `work` is
    the segment's, fixed and for each sample. `small` and `large` are the timelines at the two `batches`.

    Raises TimelinesDiffer.
    """
    if [_key(segment) for segment in small] != [_key(segment) for segment in large]:
        raise TimelinesDiffer("the step has other operations at another batch size")
    rows = []
    for low, high in zip(small, large, strict=True):
        points = _pairs_of_points(low, high)
        lines = [_line((_above(a, low.start), _above(b, high.start)), batches) for a, b in points]
        rows.append(
            {
                "phase": low.phase,
                "micro": low.micro,
                "place": low.place,
                "lines": envelope(lines),
                "delta": _line((_above(low.end, low.start), _above(high.end, high.start)), batches),
                "work": _line((low.work, high.work), batches),
            }
        )
    return rows


def _pairs_of_points(low: TracedSegment, high: TracedSegment) -> list[tuple[Bytes, Bytes]]:
    """The points of a segment in both timelines; the highest of each where the operations differ."""
    if len(low.points) == len(high.points):
        return list(zip(low.points, high.points, strict=True))
    return [(max(low.points, key=sum), max(high.points, key=sum))] if low.points and high.points else []


def extrapolate_blocks(low: TracedSegment, high: TracedSegment, extra_blocks: int) -> tuple[list[int], list[int]]:
    """Live bytes at the start and at the peak with `extra_blocks` more blocks than `low`; `high` has one more.

    Each identical block adds the same bytes to an operation on all blocks, and none to one on a single parameter.
    """
    pairs = [(low.start, high.start), *_pairs_of_points(low, high)]
    extended = [[a + extra_blocks * (b - a) for a, b in zip(few, many, strict=True)] for few, many in pairs]
    return extended[0], max(extended, key=sum)


def extrapolate_work(low: TracedSegment, high: TracedSegment, extra_blocks: int) -> Work:
    """The work with `extra_blocks` more blocks than `low`; `high` has one more."""
    calls, flops, moved = (a + extra_blocks * (b - a) for a, b in zip(low.work, high.work, strict=True))
    return calls, flops, moved


def envelope(lines: list[Line]) -> list[Line]:
    """The lines whose total is the largest at some batch size from 1 up, the flattest first."""
    best: dict[float, Line] = {}
    for line in lines:
        slope = sum(line[1])
        if slope not in best or sum(best[slope][0]) < sum(line[0]):
            best[slope] = line
    hull: list[Line] = []
    for slope in sorted(best):
        line = best[slope]
        while hull and _at(hull[-1], 1) <= _at(line, 1):
            hull.pop()  # flatter, and below already at one sample
        while len(hull) > 1 and _meet(hull[-2], line) <= _meet(hull[-2], hull[-1]):
            hull.pop()
        hull.append(line)
    return hull


def _meet(flat: Line, steep: Line) -> float:
    """The batch size at which the steeper line reaches the flatter."""
    return (sum(flat[0]) - sum(steep[0])) / (sum(steep[1]) - sum(flat[1]))


def _at(line: Line, batch: float) -> float:
    return sum(line[0]) + batch * sum(line[1])


def _line(values: tuple[tuple[float, ...], tuple[float, ...]], batches: tuple[int, int]) -> Line:
    """The line through the values at two batch sizes."""
    (low, high), (few, many) = values, batches
    per_sample = tuple((b - a) / (many - few) for a, b in zip(low, high, strict=True))
    return tuple(a - few * slope for a, slope in zip(low, per_sample, strict=True)), per_sample


def _above(bytes_: Bytes, start: Bytes) -> Bytes:
    return tuple(a - b for a, b in zip(bytes_, start, strict=True))


def _key(segment: TracedSegment) -> tuple[str, int, str]:
    return segment.phase, segment.micro, segment.place


MAX_PERIOD = 8
"""Chosen, not measured: the most unlike blocks that repeat. Gemma 3 has 6."""
KEPT_BLOCKS = 3
"""Blocks kept of a stack: the first, one for all between, and the last."""
PLACE_ATTRIBUTES = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")
"""Attributes in which blocks of one kind differ: their place."""


@dataclass(frozen=True)
class TracedStack:
    """An outermost list of blocks: the kept ones, and the number of parameters of each block of the whole model."""

    name: str
    blocks: tuple[nn.Module, ...]
    sizes: tuple[int, ...]
    period: int = 1
    """Number of unlike blocks after the first that repeat."""

    @property
    def repeats(self) -> int:
        """Number of blocks that each kept block of the period after the first stands for."""
        return (len(self.sizes) - len(self.blocks)) // self.period + 1

    def whole_model_names(self, name: str) -> list[str]:
        """Names in the whole model of the parameters that parameter `name` of the shortened model stands for."""
        inner_name = name.removeprefix(f"{self.name}.")
        if inner_name == name:
            return [name]
        text, _, rest = inner_name.partition(".")
        index, left_out = int(text), len(self.sizes) - len(self.blocks)
        positions = [index if index == 0 else index + left_out]
        if 1 <= index <= self.period:
            positions = [index + copy * self.period for copy in range(self.repeats)]
        return [f"{self.name}.{position}.{rest}" for position in positions]


def shorten(
    model: nn.Module, config: Any, keep: int = KEPT_BLOCKS, *, whole: bool, max_period: int = 1
) -> list[TracedStack]:
    """Cut every stack of more than `keep` identical blocks to `keep` blocks, in place; none if `whole`.

    The first block may differ from the others: a T5's alone has the table of relative positions. Unlike blocks that
    repeat, up to `max_period` of them, are cut to the first, one period, and the one to `period` blocks that follow.
    """
    stacks: list[TracedStack] = []
    inside: set[int] = set()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        inside |= {id(nested) for nested in module.modules()}
        blocks = list(module)
        sizes = tuple(sum(getattr(p, "whole_numel", p.numel()) for p in block.parameters()) for block in blocks)
        period = 0 if whole or len(blocks) <= keep else _period(blocks, config, max_period)
        if period:
            ends = keep - 2 if period == 1 else period
            following = 1 if period == 1 else len(blocks) - 1 - (len(blocks) - 2) // period * period
            kept_blocks = [*blocks[: 1 + ends], *blocks[-following:]]
            parent, _, child_name = name.rpartition(".")
            setattr(model.get_submodule(parent), child_name, nn.ModuleList(kept_blocks))
            blocks = kept_blocks
        stacks.append(TracedStack(name, tuple(blocks), sizes, max(1, period)))
    return stacks


def _period(blocks: list[nn.Module], config: Any, longest: int) -> int:
    """Number of unlike blocks that repeat after the first block, at least twice if several; 0 if none do."""
    # Lists of one entry a layer, such as `layer_types`, which the model's own forward may ask instead of the block.
    lists = [value for value in config.to_dict().values() if isinstance(value, list) and len(value) == len(blocks)]
    traits = [(_traits(block), *map(repr, entries)) for block, *entries in zip(blocks, *lists, strict=True)][1:]
    periods = (period for period in range(1, longest + 1) if traits[period:] == traits[:-period])
    return next((period for period in periods if period == 1 or len(blocks) > 2 + 2 * period), 0)


def _traits(block: nn.Module) -> Any:
    modules = tuple((name, type(module), _plain_attributes(module)) for name, module in block.named_modules())
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return modules, parameters


def _plain_attributes(module: nn.Module) -> Any:
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and name not in PLACE_ATTRIBUTES
    )


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
