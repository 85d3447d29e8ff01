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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..memory.memory_meter import MemoryMeter
from ..model.compilation import CompileWatch
from ..shared.words import STEP_PHASES
from .record_file import WorkerLog

WAKE_NS = 1_000_000
"""An event may be complete for this long before the wait for it returns."""
UNSPLIT_PHASE = "forward_backward"
"""Phase of a forward and backward that cannot be told apart."""
StepTimes = Callable[[], tuple[int, dict[str, float | None]]]
"""Returns a step's end (CLOCK_MONOTONIC nanoseconds), and `step_ms` with every phase's `..._ms`, as soon as the device
has passed the step's marks."""


def make_clock(device: torch.device) -> StepClock:
    """Make the clock of `device`; its first step begins now."""
    return CudaClock() if device.type == "cuda" else HostClock()


def _fields(total_ms: float, phases_ms: dict[str, float]) -> dict[str, float | None]:
    unknown = ("forward", "backward") if UNSPLIT_PHASE in phases_ms else ()
    measured_ms = {name: phases_ms.get(name, 0.0) for name in STEP_PHASES if name != "other" and name not in unknown}
    phase_fields = {f"{name}_ms": measured_ms.get(name) for name in STEP_PHASES if name != "other"}
    return {"step_ms": total_ms, **phase_fields, "other_ms": total_ms - sum(measured_ms.values())}


class HostClock:
    """The clock of a CPU: marks are times already."""

    def __init__(self) -> None:
        self._step_start_ns = self._since_ns = time.monotonic_ns()
        self._phase = "other"
        self._spent_ns: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Close the running interval now."""
        now_ns = time.monotonic_ns()
        self._spent_ns[self._phase] = self._spent_ns.get(self._phase, 0) + now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns

    def end_step(self) -> StepTimes:
        """End the step; its times are known at once."""
        self.enter("other")
        phases_ms = {name: ns / 1e6 for name, ns in self._spent_ns.items()}
        end_ns = self._since_ns
        fields = _fields((end_ns - self._step_start_ns) / 1e6, phases_ms)
        self._step_start_ns, self._spent_ns = end_ns, {}
        return lambda: (end_ns, fields)


class CudaClock:
    """The clock of a GPU: marks are events, taken from a pool and given back when read.

    A step ends when the last one did, plus the device's own measure. The device's clock drifts from the host's (50 ppm
    are 4 s a day), so each end is kept between two host times: when its last mark was queued and when that mark was
    found complete. Where the host had to wait for the mark, the step ended just before the wait did.
    """

    def __init__(self) -> None:
        self._pool: list[Any] = []
        torch.cuda.synchronize()
        self._end_ns = time.monotonic_ns()
        self._marks: list[tuple[str, Any]] = [("other", self._mark())]

    def enter(self, phase: str) -> None:
        """Queue a mark after the work queued until now."""
        self._marks.append((phase, self._mark()))

    def end_step(self) -> StepTimes:
        """Queue the step's last mark, which is the next step's first."""
        queued_ns = time.monotonic_ns()
        self.enter("other")
        marks, self._marks = self._marks, [self._marks[-1]]
        return partial(self.settle, marks, queued_ns)

    def settle(self, marks: list[tuple[str, Any]], queued_ns: int) -> tuple[int, dict[str, float | None]]:
        """Turn one step's marks into times; wait for its last mark only, which was queued at `queued_ns`."""
        last_event = marks[-1][1]
        had_to_wait = not last_event.query()
        last_event.synchronize()
        found_ns = time.monotonic_ns()
        phases_ms: dict[str, float] = {}
        for (phase, begin), (_, end) in itertools.pairwise(marks):
            phases_ms[phase] = phases_ms.get(phase, 0.0) + begin.elapsed_time(end)
        total_ms = sum(phases_ms.values())
        earliest_ns = max(queued_ns, found_ns - WAKE_NS) if had_to_wait else queued_ns
        self._end_ns = min(max(self._end_ns + round(total_ms * 1e6), earliest_ns), found_ns)
        self._pool.extend(event for _, event in marks[:-1])
        return self._end_ns, _fields(total_ms, phases_ms)

    def _mark(self) -> Any:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


StepClock = HostClock | CudaClock
"""Marks the phases of steps: `enter` begins a phase, `end_step` ends the step and begins the next one in `other`."""

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


class StepLog:
    """Hands the record of each step to `write`. `add` takes a step that just ended and writes the step before.

    `samples` and `tokens` are those of a step, tokens without padding; a function returns them for each step.
    `compile_watch` is None for a module that is not compiled, `initial_scale` without fp16's loss scaling.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], object],
        worker_log: WorkerLog,
        samples: int,
        tokens: int | Callable[[], int],
        timing_warmup: int,
        compile_watch: CompileWatch | None,
        initial_scale: float | None,
    ) -> None:
        self._write_record = write
        self._worker_log = worker_log
        self._samples = samples
        self._tokens = tokens
        self._timing_warmup = timing_warmup
        self._pending: _Pending | None = None
        self._compile_watch = compile_watch
        self._last_scale = initial_scale
        self._lock = threading.Lock()

    def add(
        self, step: int, times: StepTimes, loss: Tensor, reduced: Any, scale: Tensor | None, fields: dict[str, Any]
    ) -> None:
        """Take step `step` (from 1), which has just ended on the host, and write the step before.

        `loss` is summed over ranks once `reduced`, the handle of the sum, is ready; None if the loss needs no sum.
        `scale` is fp16's loss scale, None without one; `fields` are further ones of the step's record.
        """
        tokens = self._tokens if isinstance(self._tokens, int) else self._tokens()
        counts = {"samples": self._samples, "tokens": tokens}
        record = {"step": step, "warmup": step <= self._timing_warmup, **counts, **fields}
        if self._compile_watch is not None and self._compile_watch.take():
            record.update(warmup=True, compiling=True)
        if reduced is not None and (loss.device.type == "cuda" or scale is not None):
            # On CUDA a stream waits for the sum here, not the host; the copy must come after the sum.
            reduced.wait()
            reduced = None
        # The loss may still be on its way here; the scale is the scaler's own tensor and changes in place.
        figures = [loss] if scale is None else [loss, scale.to(loss.dtype, copy=True)]
        if loss.device.type == "cuda":
            host, reduced = _copy_later(torch.stack(figures))
            figures = list(host)
        pending_step = _Pending(record, times, figures, reduced)
        with self._lock:
            previous_step, self._pending = self._pending, pending_step
            if previous_step is not None:
                self._write(previous_step)

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
            if self._last_scale is not None and scale[0] < self._last_scale:
                self._worker_log.write("overflow", step=record["step"], scale=scale[0])
            self._last_scale = scale[0]
        self._write_record(record)


def _arrives(ready: Any, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds; True if `ready` is complete."""
    deadline = time.monotonic() + timeout_s
    while ready is not None and not ready.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(ARRIVAL_POLL_S)
    return True


def _copy_later(figures: Tensor) -> tuple[Tensor, Any]:
    """Start a copy of `figures` to pinned host memory; return the copy and a handle to wait for it."""
    host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
    host.copy_(figures, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, _Arrival(arrived)


class _Arrival:
    """A CUDA event with the methods of a collective's handle."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def is_completed(self) -> bool:
        return bool(self._event.query())


class StepRecorder:
    """Records each step of a training, whichever engine takes the steps. Never waits for the device."""

    def __init__(
        self,
        clock: StepClock,
        memory: MemoryMeter,
        step_log: StepLog,
        worker_log: WorkerLog,
        write_actual: Callable[[], None] = lambda: None,
    ) -> None:
        """`write_actual` is called after the first step, and when an engine has wrapped the model."""
        self._clock = clock
        self._memory = memory
        self._step_log = step_log
        self._worker_log = worker_log
        self.write_actual = write_actual
        self._in_optimizer = False
        self._step = 0

    def begin_step(self, step: int) -> None:
        """Begin step `step` (from 1), in the phase `other`."""
        self._step = self._worker_log.step = step

    def enter(self, phase: str) -> None:
        """Begin a phase of the step: for its time, its memory peak, and the record of an exception raised in it."""
        if phase == "optimizer":
            self._memory.end_phase("forward_backward")
        elif self._in_optimizer:
            self._memory.end_phase("optimizer")
        self._in_optimizer = phase == "optimizer"
        self._clock.enter(phase)
        self._worker_log.phase = "train" if phase == "other" else phase

    def end_step(self, loss: Tensor, reduced: Any, scale: Tensor | None, rate: float) -> None:
        """End the step. `scale` is fp16's loss scale, `rate` the learning rate; the others as in `StepLog.add`."""
        times = self._clock.end_step()
        fields = {"lr": rate, **self._memory.end_step_fields()}
        self._step_log.add(self._step, times, loss, reduced, scale, fields)
        if self._step == 1:
            self.write_actual()
