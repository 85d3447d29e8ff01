"""Marks the phases of a training step, and hands the step's times, memory peaks and loss to a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..memory.memory_meter import MemoryMeter
from .clock import StepClock, StepTimes
from .worker_log import WorkerLog


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
