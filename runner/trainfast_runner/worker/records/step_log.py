"""The step records: one line for each step, written a step later, when the device has computed its figures.

The clock measures each phase without making host or device wait. `enter(phase)` ends one interval and begins the next,
so the phases of a step add up to the step. Where forward and backward cannot be told apart (a pipeline's schedule
interleaves them) their phase is `forward_backward`: both are then null, their time is in `other`, and the phases that
are not null still add up to the step. On CPU the marks are monotonic times. On CUDA they are events on the stream, read
a step later: a phase lasts as long as the device works on it.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..memory.memory_meter import MemoryMeter
from ..model.build import CompileWatch
from ..shared.words import STEP_PHASES
from .record_file import WorkerLog

WAKE_NS = 1_000_000
"""An event may be complete for this long before the wait for it returns."""
UNSPLIT_PHASE = "forward_backward"
"""Phase of a forward and backward that cannot be told apart."""
StepTimes = Callable[[], tuple[int, dict[str, float | None]]]
"""Returns a step's end (CLOCK_MONOTONIC nanoseconds), and `step_ms` with every phase's `..._ms`, as soon as the device
has passed the step's marks."""


def make_clock(device: torch.device) -> HostClock:
    """Make the clock of `device`; its first step begins now."""
    return CudaClock() if device.type == "cuda" else HostClock()


class HostClock:
    """Marks the phases of steps: `enter` begins a phase. Marks are times here, on a CPU."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = [("other", self._mark())]

    def enter(self, phase: str) -> None:
        """Set a mark after the work until now."""
        self._marks.append((phase, self._mark()))

    def end_step(self) -> StepTimes:
        """End the step, whose last mark is the next step's first, in `other`."""
        queued_ns = time.monotonic_ns()
        self.enter("other")
        marks, self._marks = self._marks, [self._marks[-1]]
        return partial(self.settle, marks, queued_ns)

    def settle(self, marks: list[tuple[str, Any]], queued_ns: int) -> tuple[int, dict[str, float | None]]:
        """Turn one step's marks into times; its last mark was set at `queued_ns`."""
        return marks[-1][1], self._fields(marks)

    def _fields(self, marks: list[tuple[str, Any]]) -> dict[str, float | None]:
        phases_ms: dict[str, float] = {}
        for (phase, begin), (_, end) in itertools.pairwise(marks):
            phases_ms[phase] = phases_ms.get(phase, 0.0) + self._between(begin, end)
        total_ms = sum(phases_ms.values())
        unknown = ("forward", "backward") if UNSPLIT_PHASE in phases_ms else ()
        names = [name for name in STEP_PHASES if name != "other"]
        measured_ms = {name: phases_ms.get(name, 0.0) for name in names if name not in unknown}
        phase_fields = {f"{name}_ms": measured_ms.get(name) for name in names}
        return {"step_ms": total_ms, **phase_fields, "other_ms": total_ms - sum(measured_ms.values())}

    def _mark(self) -> Any:
        return time.monotonic_ns()

    def _between(self, begin: Any, end: Any) -> float:
        """Milliseconds from one mark to another."""
        return float((end - begin) / 1e6)


class CudaClock(HostClock):
    """The clock of a GPU: marks are events, queued with the work, taken from a pool and given back when read.

    A step ends when the last one did, plus the device's own measure. The device's clock drifts from the host's (50 ppm
    are 4 s a day), so each end is kept between two host times: when its last mark was queued and when that mark was
    found complete. Where the host had to wait for the mark, the step ended just before the wait did.
    """

    def __init__(self) -> None:
        self._pool: list[Any] = []
        torch.cuda.synchronize()
        self._end_ns = time.monotonic_ns()
        super().__init__()

    def settle(self, marks: list[tuple[str, Any]], queued_ns: int) -> tuple[int, dict[str, float | None]]:
        """Wait for the step's last mark only."""
        last_event = marks[-1][1]
        had_to_wait = not last_event.query()
        last_event.synchronize()
        found_ns = time.monotonic_ns()
        fields = self._fields(marks)
        earliest_ns = max(queued_ns, found_ns - WAKE_NS) if had_to_wait else queued_ns
        step_ns = round((fields["step_ms"] or 0.0) * 1e6)
        self._end_ns = min(max(self._end_ns + step_ns, earliest_ns), found_ns)
        self._pool.extend(event for _, event in marks[:-1])
        return self._end_ns, fields

    def _mark(self) -> Any:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))


ARRIVAL_POLL_S = 0.01
"""Seconds between looks for a last step's figures: a handle can be asked, but not waited for with a limit."""


@dataclass
class _Pending:
    """A step that has ended on the host, but perhaps not on the device."""

    record: dict[str, Any]
    times: StepTimes
    figures: list[Tensor]
    """On the host: the loss, then under fp16 the loss scale."""
    ready: Any
    """Handle to wait for before `figures` may be read: a collective's or a CUDA event's; None if they have arrived."""


@dataclass
class StepRecorder:
    """Records each step of a training, whichever engine takes the steps. Never waits for the device.

    Each step that ends hands the record of the step before to `write`.
    """

    write: Callable[[dict[str, Any]], object]
    worker_log: WorkerLog
    memory: MemoryMeter
    clock: HostClock
    samples: int
    """Samples of a step."""
    tokens: int | Callable[[], int]
    """Tokens of a step, without padding; a function returns them for each step."""
    timing_warmup: int
    compile_watch: CompileWatch | None = None
    """None for a module and an optimizer that are not compiled."""
    last_scale: float | None = None
    """fp16's loss scale; None without one."""
    write_actual: Callable[[], None] = lambda: None
    """Called after the first step, and when an engine has wrapped the model."""
    _in_optimizer: bool = field(default=False, init=False)
    _step: int = field(default=0, init=False)
    _pending: _Pending | None = field(default=None, init=False)
    _lock: Any = field(default_factory=threading.Lock, init=False)

    def begin_step(self, step: int) -> None:
        """Begin step `step` (from 1), in the phase `other`."""
        self._step = self.worker_log.step = step

    def enter(self, phase: str) -> None:
        """Begin a phase of the step: for its time, its memory peak, and the record of an exception raised in it."""
        if phase == "optimizer":
            self.memory.end_phase("forward_backward")
        elif self._in_optimizer:
            self.memory.end_phase("optimizer")
        self._in_optimizer = phase == "optimizer"
        self.clock.enter(phase)
        self.worker_log.phase = "train" if phase == "other" else phase

    def end_step(self, loss: Tensor, reduced: Any, scale: Tensor | None, rate: float) -> None:
        """End the step on the host, and write the step before.

        `loss` is summed over ranks once `reduced`, the handle of the sum, is ready; None if the loss needs no sum.
        `scale` is fp16's loss scale, `rate` the learning rate.
        """
        times = self.clock.end_step()
        record: dict[str, Any] = {
            "step": self._step,
            "warmup": self._step <= self.timing_warmup,
            "samples": self.samples,
            "tokens": self.tokens if isinstance(self.tokens, int) else self.tokens(),
            "lr": rate,
            **self.memory.end_step_fields(),
        }
        if self.compile_watch is not None and self.compile_watch.take():
            record.update(warmup=True, compiling=True)
        if reduced is not None and (loss.device.type == "cuda" or scale is not None):
            # On CUDA a stream waits for the sum here, not the host; the copy must come after the sum.
            reduced.wait()
            reduced = None
        # The loss may still be on its way here; the scale is the scaler's own tensor and changes in place.
        figures = [loss] if scale is None else [loss, scale.to(loss.dtype, copy=True)]
        if loss.device.type == "cuda":
            stacked = torch.stack(figures)
            host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            figures = list(host.copy_(stacked, non_blocking=True))
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            # The methods of a collective's handle.
            reduced = SimpleNamespace(wait=arrived.synchronize, is_completed=arrived.query)
        with self._lock:
            previous_step, self._pending = self._pending, _Pending(record, times, figures, reduced)
            if previous_step is not None:
                self._write(previous_step)
        if self._step == 1:
            self.write_actual()

    def flush(self, timeout_s: float | None = None) -> None:
        """Write the step still pending, if there is one.

        After an error another rank may never answer: a step whose figures do not arrive within `timeout_s` seconds is
        dropped. None waits without end.
        """
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return
        try:
            previous_step, self._pending = self._pending, None
            if previous_step is None:
                return
            if timeout_s is None:
                self._write(previous_step)
            else:
                # A failed device raises its error again, which is on record already.
                with suppress(RuntimeError):
                    if _arrives(previous_step.ready, timeout_s):
                        self._write(previous_step)
        finally:
            self._lock.release()

    def _write(self, pending_step: _Pending) -> None:
        if pending_step.ready is not None:
            pending_step.ready.wait()
        t_ns, times = pending_step.times()
        loss, *scale = (figure.item() for figure in pending_step.figures)
        record = {"t_ns": t_ns, **pending_step.record, "loss": loss, **times}
        if not math.isfinite(loss):
            record["loss_not_finite"] = True
        if scale:
            record["loss_scale"] = scale[0]
            if self.last_scale is not None and scale[0] < self.last_scale:
                self.worker_log.write("overflow", step=record["step"], scale=scale[0])
            self.last_scale = scale[0]
        self.write(record)


def _arrives(ready: Any, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds; True if `ready` is complete."""
    deadline = time.monotonic() + timeout_s
    while ready is not None and not ready.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(ARRIVAL_POLL_S)
    return True
