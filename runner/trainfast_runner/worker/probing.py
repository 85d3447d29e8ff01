"""A warm process that tries batch sizes: the model is built once, and the parent says which size comes next.

The parent appends to `control.jsonl`; every rank reads its line n as probe n, takes the steps it names, and writes a
`probe` record. No rank decides anything and none calls another outside the steps themselves. When memory runs out the
process ends, as in any run.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .clock import StepTimes, make_clock
from .data.batches import Samples, batches_of
from .data.samples import Batch
from .loop import Rig
from .low_memory import memory_left
from .memory import PHASES
from .oom import is_out_of_memory
from .records import Journal, exception_chain

CONTROL_FILE = "control.jsonl"
LOOK_EVERY_S = 0.02
PARENT_EVERY_S = 1.0
MOST_SKIPPED = 20
"""Steps beyond those ordered that a probe takes where fp16 skips updates: the scale falls from 65536 to 1 in 16."""


@dataclass(frozen=True)
class Size:
    """One probe: so many optimizer steps at this `batch_size`."""

    batch_size: int
    steps: int


class Orders:
    """What the parent wants, one line of `control.jsonl` a probe.

    `search_lock` is held by the parent for as long as it lives, and no other parent ever writes here: once it is free
    no further line comes, and what every rank reads is the same.
    """

    def __init__(self, control: Path, search_lock: Path) -> None:
        self._control = control
        self._search_lock = search_lock
        self._taken = 0

    def next(self) -> Size | None:
        """Wait for the next line; None when the parent says that it was the last, or is gone."""
        looked = time.monotonic()
        while True:
            line = self._line()
            if line is None and time.monotonic() - looked > PARENT_EVERY_S:
                looked = time.monotonic()
                if self._parent_is_gone():
                    # It may have written its last line just before it died.
                    line = self._line()
                    if line is None:
                        return None
            if line is not None:
                self._taken += 1
                return Size(line["batch_size"], line["steps"]) if line["do"] == "probe" else None
            time.sleep(LOOK_EVERY_S)

    def _line(self) -> dict[str, Any] | None:
        try:
            lines = self._control.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        found: dict[str, Any] | None = json.loads(lines[self._taken]) if len(lines) > self._taken else None
        return found

    def _parent_is_gone(self) -> bool:
        try:
            fd = os.open(self._search_lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True


class Gauge(Protocol):
    """What the limit itself counts, where that is not what the memory counters count."""

    def peak_bytes(self) -> int | None:
        """The highest so far in this process; None where it cannot be told."""

    def room_bytes(self) -> int | None:
        """The most that this rank may use, as far as is known now."""

    def is_low(self) -> bool:
        """True if a library may just have asked for more memory than the device has left."""


class HostGauge:
    """RLIMIT_DATA counts private writable address space (VmData), whether it was touched or not.

    VmData has no high-water mark, but all address space has (VmPeak): what it grew by, less what the rest (mapped
    files) grew by, is the data's. Make it when the limit has just been set. Address space that was let go of before
    that may hide the growth: None until it passes that mark.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._first = _status()

    def peak_bytes(self) -> int | None:
        """Bytes above what was there when the limit was set."""
        now, first = _status(), self._first
        if now["VmPeak"] <= first["VmPeak"]:
            return None
        files = (now["VmSize"] - now["VmData"]) - (first["VmSize"] - first["VmData"])
        return max(0, now["VmPeak"] - first["VmSize"] - max(0, files))

    def room_bytes(self) -> int | None:
        """The limit itself."""
        return self._limit_bytes

    def is_low(self) -> bool:
        """The host's own errors need no second opinion."""
        return False


def _status() -> dict[str, int]:
    """The Vm figures of `/proc/self/status` in bytes."""
    found = {}
    for line in Path("/proc/self/status").read_bytes().split(b"\n"):
        name, _, value = line.partition(b":")
        if name in (b"VmPeak", b"VmSize", b"VmData"):
            found[name.decode()] = int(value.split()[0]) * 1024
    return found


class CudaGauge:
    """The caching allocator may have what is free on the device and what it holds already, or less by its limit."""

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes

    def peak_bytes(self) -> int | None:
        """The allocator's own counters are what its limit counts."""
        return None

    def room_bytes(self) -> int | None:
        """Shrinks when another process takes memory."""
        free, _ = torch.cuda.mem_get_info(self._device)
        room = free + torch.cuda.memory_reserved(self._device)
        return room if self._limit_bytes is None else min(room, self._limit_bytes)

    def is_low(self) -> bool:
        """False where the device does not answer."""
        left = memory_left([self._device], self._limit_bytes)
        return left is not None and left.is_low


class KeptSteps:
    """Stands in for the step log: the steps of one probe, kept until it is over."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepTimes, dict[str, Any]]] = []

    def add(
        self, step: int, times: StepTimes, loss: Tensor, handle: Any, scale: Tensor | None, fields: dict[str, Any]
    ) -> None:
        """Note a step. Its loss is of no interest, but the sum over ranks that it takes part in must end."""
        if handle is not None:
            handle.wait()
        self._steps.append((times, fields))

    @property
    def reached(self) -> tuple[str, ...]:
        """The phases that a whole step went through."""
        return PHASES if self._steps else ()

    def fields(self) -> dict[str, Any]:
        """The highest peaks of the steps, the time of each in ms, and the allocator's retries so far."""
        steps = [fields for _, fields in self._steps]
        peaks = {phase: max(one["phase_peaks"][phase] for one in steps) for phase in PHASES}
        return {
            "phase_peaks": peaks,
            "peak_allocated_bytes": max(peaks.values()),
            "peak_reserved_bytes": max(one["peak_reserved_bytes"] for one in steps),
            "alloc_retries": steps[-1]["alloc_retries"],
            "step_ms": [times.read()[1]["step_ms"] for times, _ in self._steps],
        }


def make_gauge(device: torch.device, limit_bytes: int | None) -> Gauge:
    """The gauge of this rank's device; to be made when the limit has just been set."""
    return CudaGauge(device, limit_bytes) if device.type == "cuda" else HostGauge(limit_bytes)


def probe_on_demand(
    rig: Rig,
    samples: Samples,
    gauge: Gauge,
    orders: Orders,
    train: Callable[[Rig], None],
) -> None:
    """Try sizes until there is no further order. Raises what a step raises, after saying how far it came."""
    number, retries = 0, 0
    while (size := orders.next()) is not None:
        number += 1
        _forget_the_last(rig)
        said = {
            "number": number,
            "batch_size": size.batch_size,
            "room_bytes": gauge.room_bytes(),
        }
        peak_before = gauge.peak_bytes() or 0
        began = time.monotonic()
        steps = KeptSteps()
        try:
            take_steps(rig, samples, size, steps, train, is_first=number == 1)
            fields = steps.fields()
        except Exception as error:
            _tell_how_far(rig, gauge, error, {**said, "seconds": time.monotonic() - began}, steps.reached)
            raise
        peak = gauge.peak_bytes() or 0
        rig.journal.write(
            "probe",
            **said,
            outcome="fits",
            seconds=time.monotonic() - began,
            limit_peak_bytes=peak if peak > peak_before else None,
            room_after_bytes=gauge.room_bytes(),
            samples=size.batch_size * rig.knobs.grad_accum,
            **{**fields, "alloc_retries": fields["alloc_retries"] - retries},
        )
        retries = fields["alloc_retries"]


def take_steps(
    rig: Rig, samples: Samples, size: Size, steps: KeptSteps, train: Callable[[Rig], None], *, is_first: bool
) -> None:
    """Train until as many steps as ordered have updated the weights, at most `MOST_SKIPPED` steps longer.

    Where a gradient overflows, fp16 skips the update and halves the loss scale, and before the first update there are
    no optimizer states to measure. The ranks skip the same steps, because every strategy agrees on an overflow. Raises
    RuntimeError when no step updated the weights.
    """
    before, taken, updates = rig.precision.skipped_steps(), 0, 0
    most = size.steps + MOST_SKIPPED
    while updates < size.steps and taken < most:
        more = replace(size, steps=min(size.steps - updates, most - taken))
        train(_rig_for(rig, samples, more, steps, is_first=is_first and taken == 0))
        taken += more.steps
        updates = taken - (rig.precision.skipped_steps() - before)
    if updates <= 0:
        raise RuntimeError(f"batch_size={size.batch_size}: fp16 overflowed in all {taken} steps: no weight update")


def _rig_for(rig: Rig, samples: Samples, size: Size, steps: KeptSteps, *, is_first: bool) -> Rig:
    """The same model and optimizer on batches of this size, with a clock of its own."""
    return replace(
        rig,
        knobs=replace(rig.knobs, batch_size=size.batch_size, steps=size.steps),
        batches=_longest(samples, rig, size),
        clock=make_clock(rig.device),
        log=steps,
        # What really ran is on record after the first step of the first size.
        after_first_step=rig.after_first_step if is_first else _nothing,
    )


def _longest(samples: Samples, rig: Rig, size: Size) -> Iterator[Batch]:
    """The micro-batches of a run's first step again and again: the longest samples come first in a run."""
    knobs = replace(rig.knobs, batch_size=size.batch_size, steps=1, workers=0)
    for _ in range(size.steps):
        yield from batches_of(samples, knobs, rig.strategy.rank, rig.strategy.ranks)


def _forget_the_last(rig: Rig) -> None:
    """What the last size left in caches is not this one's; the peaks begin here."""
    gc.collect()
    if rig.device.type == "cuda":
        torch.cuda.synchronize(rig.device)
        torch.cuda.empty_cache()
    for phase in PHASES:
        rig.memory.boundary(phase)
    rig.memory.read()


def _tell_how_far(rig: Rig, gauge: Gauge, error: BaseException, said: dict[str, Any], reached: tuple[str, ...]) -> None:
    """The `probe` record of a size that ran out of memory; nothing for another error. Asks no other rank.

    `reached` are the phases that an earlier step of this size went through.
    """
    chain = exception_chain(error)
    if not is_out_of_memory((f"{link['type']}: {link['message']}" for link in chain), gauge.is_low()):
        return
    rig.memory.release()
    fields: dict[str, Any] = {}
    room_after = None
    with suppress(RuntimeError):
        room_after = gauge.room_bytes()
        in_optimizer = rig.journal.phase == "optimizer"
        rig.memory.boundary("optimizer" if in_optimizer else "forward_backward")
        fields = dict(rig.memory.read())
        # A phase that was not reached has what stood before the step for a peak, which is none.
        seen = {"forward_backward", *reached, *(["optimizer"] if in_optimizer else [])}
        peaks = fields["phase_peaks"]
        fields["phase_peaks"] = {name: peak for name, peak in peaks.items() if name in seen}
    rig.journal.write(
        "probe",
        **said,
        outcome="oom",
        phase=rig.journal.phase,
        message=chain[0]["message"],
        rank=rig.journal.rank,
        room_after_bytes=room_after,
        **fields,
    )


def _nothing() -> None:
    """Said already."""


def orders_of(run_dir: Path, search_id: str) -> Orders:
    """The orders of the search whose run this is: searches stand beside runs."""
    return Orders(run_dir / CONTROL_FILE, run_dir.parent.parent / "searches" / search_id / "search.lock")


def say_ready(journal: Journal, gauge: Gauge) -> None:
    """The model stands and its optimizer is there; from here on the parent may order."""
    journal.write("probing", room_bytes=gauge.room_bytes())
