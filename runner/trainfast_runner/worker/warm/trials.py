"""A warm process that tries settings: imports, data and process group are paid once, and the parent orders the trials.

Each trial builds a model of its own and takes its steps as a run does, so that its figures are a run's; only its
learning rate stays constant. Every rank reads line n of `control.jsonl` as the order of trial n and writes a `trial`
record. No rank decides anything. An exception ends the process, as in any run.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..catalog import allows_warm_trials
from ..data.batches import Samples
from ..invalid import InvalidInput
from ..memory.allocator import fullest_device_memory, use_ordinary_thresholds
from ..memory.memory_meter import MemoryMeter
from ..records.clock import make_clock
from ..records.record_file import WorkerLog, chain_is_oom, exception_chain
from ..records.step_log import StepRecorder
from ..spec import RankSpec
from ..train_state import TrainState
from .probing import PARENT_CHECK_S, Orders, TrialOrder

LOADER_STEPS = 1_000_000
"""Length of a trial's loader: `more` steps may be ordered again and again."""


class HeldLoader:
    """Holds a trial's loader processes back until its steps begin.

    With the head start of a model's build a slow loader would look fast for as long as a trial takes.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_cpu = device.type == "cpu"
        self._released = multiprocessing.Event()

    def begin(self, number: int) -> None:
        """Wait in a loader process until `release`; end it if the training process is gone."""
        parent = multiprocessing.parent_process()
        while not self._released.wait(PARENT_CHECK_S):
            if parent is not None and not parent.is_alive():
                os._exit(0)
        if self._is_on_cpu:
            use_ordinary_thresholds(number)

    def release(self) -> None:
        """Let the loader processes load."""
        self._released.set()


@dataclass
class TrialRunner:
    """Tries settings one after the other in this process."""

    spec: RankSpec
    config: Any
    device: torch.device
    samples: Samples
    memory: MemoryMeter
    log: WorkerLog
    _state: TrainState | None = field(default=None, init=False)

    def run(self, orders: Orders[TrialOrder]) -> None:
        """Take trials until there is no further order. Raises a trial's error, after recording it."""
        number = 0
        while (order := orders.next()) is not None:
            number += 1
            began_s = time.monotonic()
            try:
                fields = self._take(order)
            except Exception as error:
                self._record_failure(error, number, time.monotonic() - began_s)
                raise
            self.log.write("trial", number=number, rank=self.log.rank, seconds=time.monotonic() - began_s, **fields)

    def _take(self, order: TrialOrder) -> dict[str, Any]:
        """Take the steps of an order and return the fields of its record."""
        began_s = time.monotonic()
        untimed = 0 if order.more else order.untimed
        state = self._same_setting() if order.more else self._next_setting(order.knobs, untimed)
        records: list[dict[str, Any]] = []
        step_log = state.step_log(records.append, self.log, untimed)
        write_actual = None if order.more else partial(state.write_actual, self.log)
        recorder = StepRecorder(make_clock(self.device), self.memory, step_log, self.log, write_actual)
        switch_s = time.monotonic() - began_s
        state.engine.train(replace(state.knobs, steps=untimed + order.steps), state.batches, recorder)
        step_log.flush()
        return {"switch_s": switch_s, **trial_fields(records)}

    def _same_setting(self) -> TrainState:
        """Return the last trial's setting once all ranks have read the order for more steps."""
        if self._state is None:
            raise ValueError("more steps were ordered before any trial")
        # Ranks read the order up to 20 ms apart: without this sum the first timed step would be that much longer.
        self._state.strategy.all_reduce(torch.zeros((), device=self.device))
        return self._state

    def _next_setting(self, overrides: dict[str, Any], untimed: int) -> TrainState:
        """Drop the last setting and build the next one. Raises InvalidInput for one that needs a new process."""
        # A schedule would end with each order. At one rate the losses of trials of any length compare step by step.
        knobs = self.spec.knobs.with_values({**overrides, "lr_schedule": "constant"})
        if self._state is not None and not allows_warm_trials(knobs.strategy, knobs.engine, knobs.compile):
            raise InvalidInput(
                f"strategy={knobs.strategy}, engine={knobs.engine}, compile={knobs.compile}: a process tries one"
                " setting of these",
                key="strategy",
            )
        self.log.enter("model", " ".join(f"{name}={value}" for name, value in overrides.items()))
        self._state = None
        gc.collect()
        self.memory.return_freed()
        self._state = state = TrainState(replace(self.spec, knobs=knobs), self.config, self.device)
        loader = HeldLoader(self.device)
        state.load(self.samples, LOADER_STEPS, loader.begin)
        state.strategy.start()
        self.memory.start(untimed)
        state.build(self.samples)
        loader.release()
        self.log.enter("train")
        return state

    def _record_failure(self, error: Exception, number: int, seconds: float) -> None:
        """Write the `trial` record of a trial that ends the process. Asks no other rank."""
        self.memory.free_reserve()
        chain = exception_chain(error)
        devices = [self.device] if self._state is None else self._state.strategy.devices
        is_oom = chain_is_oom(chain, fullest_device_memory(devices, None))
        self.log.write(
            "trial",
            number=number,
            rank=self.log.rank,
            outcome="oom" if is_oom else "failed",
            phase=self.log.phase,
            message=chain[0]["message"],
            seconds=seconds,
        )


def trial_fields(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of a `trial` record from the records of its steps; warm-up steps and steps that compiled are untimed.

    Peaks are the highest of all steps that have one, and None without any.
    """
    timed = [record for record in records if not record["warmup"]]
    broken = next((record for record in records if not math.isfinite(record["loss"])), None)
    peaks = {
        name: max((record[name] for record in records if record[name] is not None), default=None)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes")
    }
    return {
        "outcome": "measured" if broken is None else "failed",
        "message": None if broken is None else f"the loss of step {broken['step']} is not finite",
        "loss_not_finite": broken is not None,
        "samples": records[-1]["samples"],
        "tokens": round(statistics.fmean(record["tokens"] for record in timed or records)),
        "step_ms": [record["step_ms"] for record in timed],
        "data_ms": [record["data_ms"] for record in timed],
        "untimed_ms": [record["step_ms"] for record in records if record["warmup"]],
        "losses": [record["loss"] for record in timed],
        **peaks,
    }
