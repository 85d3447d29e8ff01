"""A warm process, which the parent of a search orders to try batch sizes on one model, or one setting after another.

The parent appends to `control.jsonl`. Every rank reads line n as the order of probe or trial n, takes its steps, and
writes a `probe` or `trial` record. No rank decides anything, and ranks meet in the steps only. An exception ends the
process, as in any run.

A probe tries a batch size on the model that all probes share. A trial builds a model of its own and takes its steps as
a run does, so that its figures are a run's; only its learning rate stays constant.
"""

import fcntl
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .data.batches import Samples, batches_of
from .memory.allocator import fullest_device_memory
from .memory.memory_meter import MemoryMeter
from .records.record_file import WorkerLog, chain_is_oom
from .records.step_log import make_clock
from .shared.host import wait_for_lock
from .shared.process import exception_chain
from .shared.words import MEMORY_PHASES
from .spec import RankSpec
from .train_state import TrainState

POLL_S = 0.02
"""Seconds between looks for the next order."""
PARENT_CHECK_S = 1.0
"""Seconds between checks that the parent lives."""


Order = dict[str, Any]
"""A line of `control.jsonl`, with the fields of `worker_lines.WarmOrder` of the runner."""


def orders(control: Path, search_lock: Path) -> Iterator[Order]:
    """Wait for each of the parent's orders and yield it, until the parent ends the process or is gone.

    The parent holds `search_lock` for as long as it lives, and nobody else writes here: once the lock is free no
    further line comes, so all ranks read the same orders.
    """
    taken, last_check = 0, time.monotonic()
    while True:
        parent_is_gone = False
        if time.monotonic() - last_check > PARENT_CHECK_S:
            last_check = time.monotonic()
            parent_is_gone = _is_free(search_lock)
        # Read after that check, because the parent may have written its last line just before it ended.
        lines = control.read_bytes().split(b"\n")[:-1] if control.exists() else []
        if len(lines) > taken:
            order: Order = json.loads(lines[taken])
            if order["do"] == "end":
                return
            taken += 1
            yield order
        elif parent_is_gone:
            return
        else:
            time.sleep(POLL_S)


def _is_free(lock: Path) -> bool:
    """True if no process holds the lock, or if its file is gone with the search."""
    try:
        with lock.open("rb") as file:
            return wait_for_lock(file.fileno(), fcntl.LOCK_SH, within_s=0)
    except OSError:
        return True


MAX_SKIPPED_STEPS = 20
"""Most steps that a probe adds where fp16 skips updates: the scale falls from 65536 to 1 in 16."""


@dataclass(frozen=True)
class ProbeRunner:
    """Tries batch sizes on one model, its optimizer included."""

    state: TrainState
    samples: Samples
    memory: MemoryMeter
    log: WorkerLog

    def run(self, orders: Iterable[Order]) -> None:
        """Try the sizes ordered. Raises a step's error, after recording the phases it reached."""
        retries = 0
        for number, order in enumerate(orders, start=1):
            batch_size = order["batch_size"]
            self.forget_last_probe()
            probe_fields = {"number": number, "batch_size": batch_size, "room_bytes": self.memory.available_bytes()}
            peak_before_bytes = self.memory.limit_peak_bytes() or 0
            began_s = time.monotonic()
            try:
                records = self.take_steps(batch_size, order["steps"], is_first=number == 1)
            except Exception as error:
                self.record_if_oom(error, {**probe_fields, "seconds": time.monotonic() - began_s})
                raise
            retries_before, retries = retries, records[-1]["alloc_retries"]
            peak_bytes = self.memory.limit_peak_bytes() or 0
            self.log.write(
                "probe",
                **probe_fields,
                outcome="fits",
                seconds=time.monotonic() - began_s,
                limit_peak_bytes=peak_bytes if peak_bytes > peak_before_bytes else None,
                room_after_bytes=self.memory.available_bytes(),
                samples=batch_size * self.state.knobs.grad_accum,
                step_ms=[record["step_ms"] for record in records],
                alloc_retries=retries - retries_before,
                phase_peaks={phase: max(record["phase_peaks"][phase] for record in records) for phase in MEMORY_PHASES},
                peak_allocated_bytes=max(record["peak_allocated_bytes"] for record in records),
                peak_reserved_bytes=max(record["peak_reserved_bytes"] for record in records),
            )

    def take_steps(self, batch_size: int, wanted_updates: int, *, is_first: bool) -> list[dict[str, Any]]:
        """Train until as many steps as `wanted_updates` have updated the weights, and return the steps' records.

        It ends too when `MAX_SKIPPED_STEPS` more steps have ended.

        Where a gradient overflows, fp16 skips the update and halves the loss scale, and before the first update there
        are no optimizer states to measure. The ranks skip the same steps, because every strategy agrees on an overflow.
        Raises RuntimeError when no step updated the weights.
        """
        state, precision = self.state, self.state.strategy.precision
        records: list[dict[str, Any]] = []
        recorder = state.recorder(records.append, self.log, self.memory, timing_warmup=0)
        if not is_first:
            recorder.write_actual = lambda: None
        skips_before, attempted, updates = precision.skipped_steps(), 0, 0
        max_steps, strategy = wanted_updates + MAX_SKIPPED_STEPS, state.strategy
        while updates < wanted_updates and attempted < max_steps:
            next_steps = min(wanted_updates - updates, max_steps - attempted)
            knobs = replace(state.knobs, batch_size=batch_size, steps=next_steps)
            # A run's first step, again and again: the longest samples come first in a run.
            first = replace(knobs, steps=1, workers=0)
            steps = (batches_of(self.samples, first, strategy.dp_rank, strategy.dp_degree) for _ in range(next_steps))
            recorder.clock = make_clock(strategy.device)
            state.engine.train(knobs, itertools.chain.from_iterable(steps), recorder)
            recorder.flush()
            attempted += next_steps
            updates = attempted - (precision.skipped_steps() - skips_before)
        if updates <= 0:
            raise RuntimeError(f"batch_size={batch_size}: fp16 overflowed in all {attempted} steps: no weight update")
        return records

    def forget_last_probe(self) -> None:
        """Empty the caches that the last size left, and begin new peaks."""
        gc.collect()
        self.log.step = None
        if self.state.strategy.device.type == "cuda":
            # On a CPU it would map large blocks, which the limit counts as the training's.
            self.memory.return_freed()
        for phase in MEMORY_PHASES:
            self.memory.end_phase(phase)
        self.memory.end_step_fields()

    def record_if_oom(self, error: BaseException, probe_fields: dict[str, Any]) -> None:
        """Write the `probe` record, with `probe_fields`, of a size that ran out of memory; nothing for another error.

        Asks no other rank.
        """
        chain = exception_chain(error)
        if not chain_is_oom(chain, fullest_device_memory(self.state.strategy.devices, self.memory.limit_bytes)):
            return
        self.memory.free_reserve()
        fields: dict[str, Any] = {}
        with suppress(RuntimeError):
            probe_fields["room_after_bytes"] = self.memory.available_bytes()
            in_optimizer = self.log.phase == "optimizer"
            self.memory.end_phase("optimizer" if in_optimizer else "forward_backward")
            fields = dict(self.memory.end_step_fields())
            if not in_optimizer and (self.log.step or 1) == 1:
                # No step of this size has reached the optimizer: its peak is that of before the step.
                fields["phase_peaks"] = {"forward_backward": fields["phase_peaks"]["forward_backward"]}
        self.log.write(
            "probe",
            **probe_fields,
            outcome="oom",
            phase=self.log.phase,
            message=chain[0]["message"],
            rank=self.log.rank,
            **fields,
        )


LOADER_STEPS = 1_000_000
"""Length of a trial's loader: `more` steps may be ordered again and again."""


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

    def run(self, orders: Iterable[Order]) -> None:
        """Take the trials ordered. Raises a trial's error, after recording it."""
        for number, order in enumerate(orders, start=1):
            began_s = time.monotonic()
            try:
                fields = self._take(order)
            except Exception as error:
                self._record_failure(error, number, time.monotonic() - began_s)
                raise
            self.log.write("trial", number=number, rank=self.log.rank, seconds=time.monotonic() - began_s, **fields)

    def _take(self, order: Order) -> dict[str, Any]:
        """Take the steps of an order and return the fields of its record.

        An order for `more` steps goes on with the last setting, and has no untimed steps.
        """
        is_more = order["more"]
        untimed = 0 if is_more else order["untimed"]
        state = self._same_setting() if is_more else self._next_setting(order["knobs"], untimed)
        records: list[dict[str, Any]] = []
        recorder = state.recorder(records.append, self.log, self.memory, untimed)
        if is_more:
            recorder.write_actual = lambda: None
        state.engine.train(replace(state.knobs, steps=untimed + order["steps"]), state.batches, recorder)
        recorder.flush()
        return trial_fields(records, state.tokens_per_sample)

    def _same_setting(self) -> TrainState:
        """Return the last trial's setting once all ranks have read the order for more steps."""
        assert self._state is not None
        # Ranks read the order up to 20 ms apart: without this sum the first timed step would be that much longer.
        self._state.strategy.all_reduce(torch.zeros((), device=self.device))
        return self._state

    def _next_setting(self, overrides: dict[str, Any], untimed: int) -> TrainState:
        """Drop the last setting and build the next one, which the parent orders only where the catalog allows it."""
        # A schedule would end with each order. At one rate the losses of trials of any length compare step by step.
        knobs = self.spec.knobs.with_values({**overrides, "lr_schedule": "constant"})
        self.log.enter("model", " ".join(f"{name}={value}" for name, value in overrides.items()))
        self._state = None
        gc.collect()
        self.memory.return_freed()
        self._state = state = TrainState(replace(self.spec, knobs=knobs), self.config, self.device)
        state.start()
        self.memory.start(untimed)
        state.build(self.samples)
        # Only now: with the head start of a model's build a slow loader would look fast for as long as a trial takes.
        state.load(self.samples, LOADER_STEPS)
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


def trial_fields(records: list[dict[str, Any]], tokens_per_sample: int) -> dict[str, Any]:
    """Fields of a `trial` record from the records of its steps; warm-up steps and steps that compiled are untimed.

    Where lengths vary, the time of a step is that of as many tokens as a mean step has: a few steps are no mean.
    Peaks are the highest of all steps that have one, and None without any.
    """
    timed = [record for record in records if not record["warmup"]]
    tokens = records[-1]["samples"] * tokens_per_sample or 1
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
        "step_ms": [record["step_ms"] * (tokens / (record["tokens"] or tokens)) for record in timed],
        "data_ms": [record["data_ms"] for record in timed],
        "optimizer_ms": [record["optimizer_ms"] for record in timed],
        "losses": [record["loss"] for record in timed],
        **peaks,
    }
