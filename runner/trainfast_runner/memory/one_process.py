"""What several GPUs of one process hold: the first of `dp`, and each of `naive-mp`.

The rules are read from torch 2.13's `nn/parallel` (replicate.py, parallel_apply.py, scatter_gather.py, _functions.py)
and from the worker's `spread`. No run has been held against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.timeline import GRADS, NOTHING, Moment, Stretch, Vector

COPIED, SPREAD = "dp", "naive-mp"
UNCONFIRMED = (COPIED, SPREAD)
"""Predictions of these say so."""


def devices_of(knobs: Mapping[str, Any]) -> int:
    """How many GPUs the `devices` knob is about. Raises UserError where it leaves that open."""
    devices = knobs["devices"]
    if devices is None:
        raise UserError(f"the memory of strategy={knobs['strategy']} depends on the number of devices", key="devices")
    return devices if isinstance(devices, int) else len([one for one in str(devices).split("+") if one])


def gathered(stretches: list[Stretch], devices: int) -> list[Stretch]:
    """The step as the first GPU of `dp` sees it: all batches are scattered from it, and all outputs gathered on it.

    It has its share of the samples in the blocks, and all of them in the loss; what comes after the blocks is taken for
    the loss, whose logits are nearly all of it.
    """
    found = []
    kept = [0.0] * len(NOTHING)
    for place, stretch in enumerate(stretches):
        if stretch.phase == "data" or _is_head(stretches, place):
            fixed, each = stretch.delta
            if stretch.phase == "backward":
                # It lets go of what its forward kept of the other GPUs' samples, of which the blocks know nothing.
                delta = tuple(own - others for own, others in zip(each, kept, strict=True))
                kept = [0.0] * len(NOTHING)
            else:
                delta = _times(each, devices)
                if stretch.phase == "forward":
                    kept = [all_ - own + more for all_, own, more in zip(delta, each, kept, strict=True)]
            lines = [(line[0], _times(line[1], devices)) for line in stretch.lines]
            stretch = msgspec.structs.replace(stretch, lines=lines, delta=(fixed, delta))
        found.append(stretch)
    return found


def _times(each: Vector, devices: int) -> Vector:
    return tuple(devices * value for value in each)


def _is_head(stretches: list[Stretch], at: int) -> bool:
    """Whether it is between the last block's forward and that block's backward."""
    if stretches[at].place:
        return False
    before = next((one for one in reversed(stretches[:at]) if one.place), None)
    after = next((one for one in stretches[at:] if one.place), None)
    return before is not None and after is not None and (before.phase, after.phase) == ("forward", "backward")


def with_copied_gradients(moment: Moment, come: float, all_of_them: float) -> Vector:
    """Live bytes of the first GPU of `dp`, `come` and `all_of_them` the gradients of the micro-batch that runs.

    Its own weights are not copied (`broadcast_coalesced` gives back what is there already). One node of autograd
    copies all of them, so its backward, which adds the copies' gradients up, waits until the last has come: they lie
    beside the gradients of earlier micro-batches, and in the end beside their sums.
    """
    live = list(moment.live)
    if moment.is_last:
        live[GRADS] += all_of_them * (2 if moment.micro > 1 else 1)
    elif moment.backward and moment.micro > 1:
        live[GRADS] += come
    return tuple(live)
