"""The text of a script's step record: a line of JSON, as the worker writes its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Times = tuple[int, int | None, int | None, int | None]
    """Nanoseconds of a whole step, and of data, forward and optimizer in it; None for a phase that was not seen."""
    StepRecord = tuple[int, int, int | None, Times, float | None, dict[str, int] | None, float | None]
    """End (CLOCK_MONOTONIC) and number of a step, its samples, times, learning rate, memory peaks and loss."""

NULL = "null"
"""JSON of an absent figure."""
NOT_FINITE = 'null,"loss_not_finite":true'
"""JSON of a loss that is not finite, with the mark that says so."""


def step_line(record: StepRecord, warmup: int) -> str:
    """The line of a step; the first `warmup` steps are marked as such.

    A time is written as its nanoseconds with an exponent, 1234567e-6 ms: decimal places take Python longer than all
    else here, and its JSON encoder takes 8 us more.
    """
    t_ns, step, samples, (step_ns, data_ns, forward_ns, optimizer_ns), lr, peaks, loss = record
    phases_ns = 0
    data = forward = optimizer = other = NULL
    if data_ns is not None:
        phases_ns += data_ns
        data = f"{data_ns}e-6"
    if forward_ns is not None:
        phases_ns += forward_ns
        forward = f"{forward_ns}e-6"
    if optimizer_ns is not None:
        phases_ns += optimizer_ns
        optimizer = f"{optimizer_ns}e-6"
    if phases_ns:
        other = f"{step_ns - phases_ns if step_ns > phases_ns else 0}e-6"
    loss_json = NULL if loss is None else loss if math.isfinite(loss) else NOT_FINITE
    peaks_json = "".join([f',"{name}":{size}' for name, size in peaks.items()]) if peaks else ""
    return (
        f'{{"t_ns":{t_ns},"step":{step},"warmup":{"true" if step <= warmup else "false"},'
        f'"samples":{NULL if samples is None else samples},'
        f'"tokens":null,"loss":{loss_json},"step_ms":{step_ns}e-6,"data_ms":{data},"forward_ms":{forward},'
        f'"backward_ms":null,"optimizer_ms":{optimizer},"other_ms":{other},'
        f'"lr":{NULL if lr is None else lr}{peaks_json}}}\n'
    )
