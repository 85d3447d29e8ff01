"""The step records: one line for each step, written a step later, when the device has computed its figures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..memory.memory_meter import MemoryMeter
from ..model.compilation import CompileWatch
from .clock import StepClock, StepTimes
from .record_file import WorkerLog

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

    def add(self, ended_step: EndedStep) -> None:
        """Take a step that has just ended, and write the step before."""
        step, times, loss, reduced, scale, fields = ended_step
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


class EndedStep(NamedTuple):
    """A step that has ended on the host."""

    step: int
    """From 1."""
    times: StepTimes
    loss: Tensor
    """Summed over ranks once `reduced` is ready."""
    reduced: Any
    """The handle of the sum; None if the loss needs none."""
    scale: Tensor | None
    """fp16's loss scale; None without one."""
    fields: dict[str, Any]
    """Further fields of the step's record."""


class StepSink(Protocol):
    """Takes the figures of each step."""

    def add(self, ended_step: EndedStep) -> None:
        """Note a step."""


class StepRecorder:
    """Records each step of a training, whichever engine takes the steps. Never waits for the device."""

    def __init__(
        self,
        clock: StepClock,
        memory: MemoryMeter,
        step_sink: StepSink,
        worker_log: WorkerLog,
        write_actual: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock
        self._memory = memory
        self._step_sink = step_sink
        self._worker_log = worker_log
        self._write_actual = write_actual
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
        """End the step. `scale` is fp16's loss scale, `rate` the learning rate; the others are as in `EndedStep`."""
        times = self._clock.end_step()
        fields = {"lr": rate, **self._memory.end_step_fields()}
        self._step_sink.add(EndedStep(self._step, times, loss, reduced, scale, fields))
        if self._step == 1:
            self.write_actual()

    def write_actual(self) -> None:
        """Write the `actual` record: after the first step, and when an engine has wrapped the model."""
        if self._write_actual is not None:
            self._write_actual()
