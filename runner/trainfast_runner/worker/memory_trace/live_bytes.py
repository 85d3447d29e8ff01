"""Live bytes by category while a training step runs on tensors without memory.

A dispatch mode counts every storage from the operation that makes it until it is freed. The mode counts as torch's own
`MemTracker` does, and keeps the timeline of the live bytes rather than their peak, so that the timeline of a deeper
model or a larger batch can be computed from it.

The work of the operations is counted beside: calls, FLOPs of products and convolutions, bytes read and written.
Multiplied by a device's measured speeds, the counts predict the time of a step.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..shared.words import ACTIVATIONS, NO_WORK, TEMPORARY, TRACED_CATEGORIES
from .compiled_saves import CompiledSaves

CUDA_ROUNDING_BYTES = 512
"""torch's caching allocator hands out multiples of this (`kMinBlockSize`, c10/cuda/CUDACachingAllocator.cpp)."""

SINGLE_BYTES = 4
"""Bytes of a value in single precision."""
EIGHT_BIT_COPIES = 5
"""fp32 copies of an element in bitsandbytes' 8-bit step on a CPU: both states, the gradient, the root of the second
state and the quotient; a half-precision parameter adds its own copy. Measured: 20 and 24 bytes an element (bitsandbytes
0.50, backends/cpu/ops.py, `_optimizer_update_8bit_blockwise_cpu`).
"""
COMPILED_STEP_BYTES = {1: 8, 2: 26}
"""Bytes an element of the buffers in the compiled step of torchao's AdamW on a CPU, by elements in a byte of the
states: both new moments in fp32, and for two in a byte the old codes and the new ones as int64 (torchao 0.18 with torch
2.13: the program that torch's compiler writes).
"""

CHANNELS_OF_A_PICTURE = 3
"""oneDNN reads an input of so few channels in torch's own layout."""

Work = tuple[float, float, float]
"""Calls of operations, FLOPs, bytes moved."""
BACKWARD_PRODUCTS = 2.5
"""An attention's backward has five products where its forward has two (FlashAttention-2, Dao 2023, section 3.1)."""
OPERATIONS_WITHOUT_TRAFFIC = ("empty", "detach", "alias", "_local_scalar_dense")
"""Beginnings of the names of operations that neither read nor write their tensors."""

Bytes = tuple[int, ...]
"""Live bytes by category, in the order of TRACED_CATEGORIES."""


@dataclass
class TracedSegment:
    """A part of the step's timeline, from `start` live bytes to `end`."""

    phase: str
    micro: int
    """The micro-batch, from 1; 0 before the first forward pass."""
    place: str
    """The block that runs, as "STACK:INDEX"; empty outside of all blocks."""
    start: Bytes
    end: Bytes = ()
    points: list[Bytes] = field(default_factory=list)
    """The live bytes after each operation that allocated."""
    work: Work = NO_WORK
    """The work of all operations."""


_GROUPED: Any = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
"""torch's grouped matrix product, of a mixture of experts; None in a version without it."""


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _LiveStorage(weakref.ref[Any]):
    """Calls back when a storage is freed."""

    __slots__ = ("category", "key", "repeats", "size", "stack")
    key: int
    size: int
    category: int
    stack: str
    """The stack whose repeated block made the storage; empty for a storage made elsewhere."""
    repeats: int
    """Number of blocks that this block stands for."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages on one kind of device. Enter this mode inside the FakeTensorMode of the tensors."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.live = [0] * len(TRACED_CATEGORIES)
        self.category = ACTIVATIONS
        self.segments: list[TracedSegment] = []
        self.repeats: dict[str, int] = {}
        """Number of blocks that each repeated block stands for, by its place."""
        self.before_next: Callable[[], None] | None = None
        """Called before the next operation."""
        self.saves: CompiledSaves | None = None
        """The tensors kept for the backward of a compiled step."""
        self.is_counting = True
        """False to count each new storage as empty."""
        self._live_storages: dict[int, _LiveStorage] = {}
        self._overflows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.before_next is not None:
            self.before_next()
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._usual_value(args[0])
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._overflows.add(args[1].untyped_storage()._cdata)
        if func.namespace == "bitsandbytes" and not func._schema.returns:
            self._count_eight_bit_step(args)
            return None  # the operation has no fake kernel
        if func.namespace == "bitsandbytes" and func._schema.name.endswith("::gemm_4bit"):
            from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl  # late: only quantized layers call it

            with self:  # count its operations: the half-precision weight is the largest temporary
                return _gemm_4bit_default_impl(*args, **(kwargs or {}))
        if func is _GROUPED and args[0].dtype != torch.bfloat16:
            # torch's fake kernel takes bfloat16 only; the CPU computes any dtype.
            halves = [tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for tensor in args[:2]]
            result = torch.empty_like(func(*halves, *args[2:], **(kwargs or {})), dtype=args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        segment = self.segments[-1]
        calls, flops, moved = work_of(func, args, kwargs or {}, result)
        segment.work = segment.work[0] + calls, segment.work[1] + flops, segment.work[2] + moved
        results = [result] if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else ()
        # Not any(), which would stop at the first.
        if sum([self.count(tensor, self.category) for tensor in results if isinstance(tensor, Tensor)]):
            self.segments[-1].points.append(tuple(self.live))
        if self.device_type == "cpu":
            self._count_convolution(func, args, result)
        if self.saves is not None:
            self.saves.see(func, _tensors((*args, *(kwargs or {}).values())), _tensors((result,)), flops > 0)
        return result

    def _count_convolution(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count the copies of a convolution on a CPU in oneDNN's own layout (ATen/native/mkldnn/Conv.cpp).

        Measured within 1 %: forward the larger of input and output, backward the output's gradient and the input.
        """
        if func is torch.ops.aten.convolution.default:
            self._add_temporary(max(map(_bytes_of, (args[0], result))))
        elif func is torch.ops.aten.convolution_backward.default:
            is_copied = args[1].shape[1] > CHANNELS_OF_A_PICTURE
            self._add_temporary(sum(map(_bytes_of, args[: 1 + is_copied])))

    def begin(self, phase: str, micro: int, place: str) -> None:
        """Begin a segment."""
        self.before_next = None
        if self.saves is not None and self.segments and not self.segments[-1].end:
            self.saves.settle()
        self.end()
        self.segments.append(TracedSegment(phase, micro, place, tuple(self.live)))

    def end(self) -> None:
        """End the running segment."""
        if self.segments and not self.segments[-1].end:
            self.segments[-1].end = tuple(self.live)

    def count(self, tensor: Tensor, category: int) -> bool:
        """Count the tensor's storage; return False if it is counted already or empty."""
        if tensor.device.type != self.device_type:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live_storages:
            return False
        live_storage = _LiveStorage(storage, self._freed)
        live_storage.key, live_storage.category = key, category
        unit = CUDA_ROUNDING_BYTES if self.device_type == "cuda" else 1
        live_storage.size = -(-storage.nbytes() // unit) * unit if self.is_counting else 0
        place = self.segments[-1].place if self.segments else ""
        live_storage.repeats = self.repeats.get(place, 1)
        live_storage.stack = place.partition(":")[0] if live_storage.repeats > 1 else ""
        self._live_storages[key] = live_storage
        self.live[category] += live_storage.size
        return live_storage.size > 0

    def count_all(self, tensors: Iterable[Tensor], category: int) -> None:
        """Count the storages of tensors; a storage that is counted already changes its category."""
        for tensor in tensors:
            if not self.count(tensor, category):
                self.set_category(tensor, category)

    def set_category(self, tensor: Tensor, category: int) -> None:
        """Change the category of the tensor's storage."""
        live_storage = self._live_storages.get(tensor.untyped_storage()._cdata)
        if live_storage is not None:
            self.live[live_storage.category] -= live_storage.size
            live_storage.category = category
            self.live[category] += live_storage.size

    def _freed(self, live_storage: Any) -> None:
        # A storage freed inside its stack is freed block by block; one freed outside (weights that autocast keeps until
        # its end) is freed for all the blocks that this one stands for.
        inside = live_storage.stack and self.segments[-1].place.partition(":")[0] == live_storage.stack
        self.live[live_storage.category] -= live_storage.size * (1 if inside else live_storage.repeats)
        del self._live_storages[live_storage.key]

    def _count_eight_bit_step(self, args: tuple[Any, ...]) -> None:
        """Count the copies in single precision that bitsandbytes' 8-bit step of one parameter holds on a CPU."""
        gradient = next((tensor for tensor in args if isinstance(tensor, Tensor)), None)
        if gradient is None or self.device_type != "cpu":
            return
        copies = EIGHT_BIT_COPIES + (gradient.element_size() < SINGLE_BYTES)
        self._add_temporary(copies * SINGLE_BYTES * gradient.numel())

    def count_compiled_step(self, parameter: Tensor, _gradient: Tensor, _step: Tensor, moment: Any, *_: Any) -> None:
        """Count the buffers of torchao's compiled step of one parameter; only quantized moments have any, on a CPU.

        On an A100 the step of 7B took no bytes beyond fused AdamW's (torchao/optim/README.md: peaks differ by states).
        """
        codes: Tensor | None = getattr(moment, "codes", None)
        if codes is not None and self.device_type == "cpu":
            self._add_temporary(COMPILED_STEP_BYTES[parameter.numel() // codes.numel()] * parameter.numel())

    def _add_temporary(self, size: int) -> None:
        """Add a moment with so many bytes more, which the dispatch cannot see."""
        live_then = list(self.live)
        live_then[TEMPORARY] += size
        self.segments[-1].points.append(tuple(live_then))

    def _usual_value(self, scalar: Tensor) -> Any:
        """The likeliest value of a tensor that decides which operations follow.

        A mask holds everywhere, no gradient overflowed, and any other number is a count that has begun. A float is 10,
        a count of steps: with 1 NAdam, whose product of momenta is below 1, would divide by zero, and RAdam takes a
        smaller step up to 5.
        """
        if scalar.dtype == torch.bool:
            return True
        if scalar.untyped_storage()._cdata in self._overflows:
            return 0.0
        return 10.0 if scalar.dtype.is_floating_point else 1


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """Return the work of one operation; a view moves no bytes."""
    if func.namespace == "prim":
        return NO_WORK  # a question about a tensor, such as its device
    name, is_view, written_indexes = _traits(func)
    if is_view:
        return 1.0, 0.0, 0.0
    read_bytes = sum(_bytes_of(tensor) for tensor in _tensors((*args, *kwargs.values())))
    if name == "aten::embedding":
        # An embedding reads the looked-up rows, not the table.
        read_bytes = _bytes_of(result)
    changed_arguments = tuple(args[index] for index in written_indexes if index < len(args))
    # An operation that changes its arguments returns one of them.
    stored_bytes = sum(_bytes_of(tensor) for tensor in _tensors(changed_arguments if written_indexes else (result,)))
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
