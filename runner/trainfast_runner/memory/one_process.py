"""Memory of one process with several GPUs: of the first GPU under `dp`, and of each GPU under `naive-mp`.

The rules are read from torch 2.13's `nn/parallel` (replicate.py, parallel_apply.py, scatter_gather.py, _functions.py)
and from the worker's `spread`. No run has been held against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices_knob import gpu_indexes
from trainfast_runner.memory.timeline import NO_BYTES, Moment, Segment, Vector, add
from trainfast_runner.worker.shared.traced import GRADS

DATA_PARALLEL, LAYERS_SPREAD = "dp", "naive-mp"
UNCONFIRMED_STRATEGIES = (DATA_PARALLEL, LAYERS_SPREAD)
"""Strategies whose predictions say that no run confirmed them."""


def devices_of(knobs: Mapping[str, Any]) -> int:
    """Number of GPUs of the `devices` knob, 1 on a CPU. Raises UserError if it is unset."""
    devices = knobs["devices"]
    if devices is None:
        raise UserError(f"the memory of strategy={knobs['strategy']} depends on the number of devices", key="devices")
    indexes = gpu_indexes(devices)
    return devices if isinstance(devices, int) else 1 if indexes is None else len(indexes)


def first_gpu_segments(segments: list[Segment], devices: int) -> list[Segment]:
    """Return the step of the first GPU of `dp`, from which batches are scattered and on which outputs are gathered.

    It has its share of the samples in the blocks and all of them in the loss. Everything after the blocks counts as
    the loss, whose logits are nearly all of it.
    """
    first_gpu = []
    kept_of_others = NO_BYTES
    for index, segment in enumerate(segments):
        if segment.phase == "data" or _is_head(segments, index):
            fixed, per_sample = segment.delta
            if segment.phase == "backward":
                # The backward frees the other GPUs' samples that its forward kept.
                delta = add(per_sample, kept_of_others, -1)
                kept_of_others = NO_BYTES
            else:
                delta = add(NO_BYTES, per_sample, devices)
                if segment.phase == "forward":
                    kept_of_others = add(kept_of_others, add(delta, per_sample, -1))
            lines = [
                (fixed_line, add(NO_BYTES, per_sample_line, devices)) for fixed_line, per_sample_line in segment.lines
            ]
            segment = msgspec.structs.replace(segment, lines=lines, delta=(fixed, delta))
        first_gpu.append(segment)
    return first_gpu


def _is_head(segments: list[Segment], index: int) -> bool:
    """True between the last block's forward and that block's backward."""
    if segments[index].traced_block:
        return False
    segment_before = next((segment for segment in reversed(segments[:index]) if segment.traced_block), None)
    segment_after = next((segment for segment in segments[index:] if segment.traced_block), None)
    return (
        segment_before is not None
        and segment_after is not None
        and (segment_before.phase, segment_after.phase) == ("forward", "backward")
    )


def with_copied_gradients(moment: Moment, new_grads: float, all_grads: float) -> Vector:
    """Return the live bytes of the first GPU of `dp`.

    `new_grads` are the bytes of the gradients that the running micro-batch has made, `all_grads` of all of them.

    The first GPU's own weights are not copied (`broadcast_coalesced` returns the originals). One autograd node makes
    all copies, so its backward starts after the last copy has its gradient. Until then the copies' gradients lie beside
    those of earlier micro-batches, and at the end beside the sums.
    """
    live = list(moment.live)
    if moment.is_last:
        live[GRADS] += all_grads * (2 if moment.micro > 1 else 1)
    elif moment.backward and moment.micro > 1:
        live[GRADS] += new_grads
    return tuple(live)
