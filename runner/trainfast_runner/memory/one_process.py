"""Memory of several GPUs of one process: of the first one of `dp`, and of each of `naive-mp`.

The rules are read from torch 2.13's `nn/parallel` (replicate.py, parallel_apply.py, scatter_gather.py, _functions.py)
and from the worker's `spread`. No run has been held against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.timeline import NOTHING, Moment, Segment, Vector
from trainfast_runner.worker.shared_tables import GRADS

DATA_PARALLEL, LAYERS_SPREAD = "dp", "naive-mp"
UNCONFIRMED = (DATA_PARALLEL, LAYERS_SPREAD)
"""Strategies whose predictions say that no run confirmed them."""


def devices_of(knobs: Mapping[str, Any]) -> int:
    """Number of GPUs of the `devices` knob. Raises UserError if it is unset."""
    devices = knobs["devices"]
    if devices is None:
        raise UserError(f"the memory of strategy={knobs['strategy']} depends on the number of devices", key="devices")
    return devices if isinstance(devices, int) else len([device for device in str(devices).split("+") if device])


def gathered(segments: list[Segment], devices: int) -> list[Segment]:
    """Return the step of the first GPU of `dp`, from which batches are scattered and on which outputs are gathered.

    It has its share of the samples in the blocks and all of them in the loss. Everything after the blocks counts as
    the loss, whose logits are nearly all of it.
    """
    united = []
    others_kept = [0.0] * len(NOTHING)
    for index, segment in enumerate(segments):
        if segment.phase == "data" or _is_head(segments, index):
            fixed, each = segment.delta
            if segment.phase == "backward":
                # It frees what its forward kept of the other GPUs' samples.
                delta = tuple(one_share - others for one_share, others in zip(each, others_kept, strict=True))
                others_kept = [0.0] * len(NOTHING)
            else:
                delta = _times(each, devices)
                if segment.phase == "forward":
                    others_kept = [
                        total - one_share + more
                        for total, one_share, more in zip(delta, each, others_kept, strict=True)
                    ]
            lines = [(line[0], _times(line[1], devices)) for line in segment.lines]
            segment = msgspec.structs.replace(segment, lines=lines, delta=(fixed, delta))
        united.append(segment)
    return united


def _times(each: Vector, devices: int) -> Vector:
    return tuple(devices * value for value in each)


def _is_head(segments: list[Segment], at: int) -> bool:
    """True between the last block's forward and that block's backward."""
    if segments[at].place:
        return False
    before = next((segment for segment in reversed(segments[:at]) if segment.place), None)
    after = next((segment for segment in segments[at:] if segment.place), None)
    return before is not None and after is not None and (before.phase, after.phase) == ("forward", "backward")


def with_copied_gradients(moment: Moment, come: float, all_of_them: float) -> Vector:
    """Return the live bytes of the first GPU of `dp`; `come` and `all_of_them` are the running micro-batch's gradients.

    Its own weights are not copied (`broadcast_coalesced` returns the originals). One node of autograd copies them all,
    so its backward, which sums the copies' gradients, waits for the last of them: they lie beside the gradients of
    earlier micro-batches, and in the end beside their sums.
    """
    live = list(moment.live)
    if moment.is_last:
        live[GRADS] += all_of_them * (2 if moment.micro > 1 else 1)
    elif moment.backward and moment.micro > 1:
        live[GRADS] += come
    return tuple(live)
