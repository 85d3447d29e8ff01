"""The step records of a script: one line for each optimizer step, as the worker writes them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from .memory_peaks import EVERY, FIRST, MemoryPeaks
from .notes import LineFile
from .rank_files import RankFiles

if TYPE_CHECKING:
    from collections.abc import Callable

TIMING_WARMUP = 3
NULL = "null"
LINE = (
    '{"t_ns":%(t_ns)d,"step":%(step)d,"warmup":%(warmup)s,"samples":%(samples)s,"tokens":null,"loss":%(loss)s,'
    '"step_ms":%(step_ms).4f,"data_ms":%(data_ms)s,"forward_ms":%(forward_ms)s,"backward_ms":null,'
    '"optimizer_ms":%(optimizer_ms)s,"other_ms":%(other_ms)s,"lr":%(lr)s%(more)s}'
)
"""A step record as JSON. Python's encoder takes 8 us more, half of what a step's hooks may take."""
FACTS_AFTER = 2
"""The step after which the hooks know the model, its input and the optimizer."""
OPTIMIZER = "torch.optim"
"""The source of steps when no framework counts them."""
UNKNOWN = {
    "tokens": "no hook sees how many tokens a sample has",
    "loss": "torch reports no loss; the HF Trainer and Lightning do",
    "backward_ms": "no hook marks the end of a script's backward: it is in other_ms",
    "forward_ms": "no module that holds the optimizer's parameters was called",
    "samples": "no framework, DataLoader or model input shows them; use --samples-per-step N",
}
"""Why a field of the step records is null."""


class StepLog:
    """Counts the optimizer steps of this process and appends their records.

    `data_ns`, `forward_ns` and `optimizer_ns` add up over a step, None for a phase that was not seen in it. The record
    of the first step waits for the second, and that of a step whose loss may still come for the next one.
    """

    def __init__(self, files: RankFiles, asked: dict[str, Any], write_facts: Callable[[], None]) -> None:
        """`asked` is `script` of `run.json`; `write_facts` is called when two steps have shown what runs."""
        self.source = OPTIMIZER
        """The reporter whose steps are counted."""
        self.framework: str | None = None
        """The framework that has reported steps; None without one."""
        self.begun_ns = time.monotonic_ns()
        """The beginning of the step: the end of the last one, before the first the newest sign of its preparation."""
        self.taken = 0
        self.stopping = False
        """True once the steps that `--steps` allows are taken."""
        self.data_ns: int | None = None
        self.forward_ns: int | None = None
        self.optimizer_ns: int | None = None
        self.lr: float | None = None
        self.loader_samples = 0
        self.largest_batch = 0
        """Samples of the largest batch that a DataLoader gave; 0 before one gave any that can be counted."""
        self.forward_samples = 0
        self.waits_for_loss = False
        self.peaks = MemoryPeaks()
        self.hooks: list[str] = []
        """Names of the hooks that have fired in this process."""
        self._files = files
        self._write_facts = write_facts
        self._limit: int | None = asked.get("steps")
        self._warmup = int(asked.get("timing_warmup", TIMING_WARMUP))
        self._samples_per_step: int | None = asked.get("samples_per_step")
        self._file: LineFile | None = None
        self._pending: dict[str, Any] | None = None
        self._ignored_stop = False
        self._sources: dict[str, int] = {}
        """Steps by the source of their samples: a loader that fetches ahead gives none to the last."""
        self.unknown = dict(UNKNOWN)

    @property
    def samples_from(self) -> str | None:
        """The source of most steps' samples; None without one."""
        return max(self._sources, key=lambda source: self._sources[source], default=None)

    def claim(self, source: str) -> None:
        """Count only the steps that `source`, a framework, reports from here on."""
        self.source = self.framework = source
        self.fired(source)

    def fired(self, hook: str) -> None:
        """Note the first use of a hook."""
        if hook not in self.hooks:
            self.hooks.append(hook)

    def release(self) -> None:
        """Count the optimizers' steps again: the framework's training is over."""
        self.flush()
        self.source, self.waits_for_loss = OPTIMIZER, False

    def prepares(self) -> None:
        """Note that the first step has not begun before now."""
        if self.taken == 0:
            self.begun_ns = time.monotonic_ns()

    def forget(self) -> None:
        """Drop the recorded step: it was of a smaller optimizer than the one that steps now."""
        if self.taken == 1:
            self.taken, self._pending = 0, None

    def count(self, samples: int | None = None, loss: float | None = None) -> bool:
        """Record that a step has ended now; True if it is the last that `--steps` allows, and the script is to stop."""
        now_ns = time.monotonic_ns()
        if self._files.owner is None:
            self._file = self._files.take()
            if self._file is not None:
                self._files.write("phase", phase="train")
        if not self._files.are_ours:
            return False
        if self.stopping:
            self._note_ignored_stop()
            return False
        self.flush()
        self.taken += 1
        self._pending = self._record(now_ns, self._samples(samples))
        if loss is not None:
            self.add_loss(loss)
        self.stopping = self._limit is not None and self.taken >= self._limit
        if self.taken > 1 and not self.waits_for_loss:
            self.flush()
        self._begin(now_ns)
        if self.taken == FACTS_AFTER:
            self._write_facts()
        return self.stopping

    def _note_ignored_stop(self) -> None:
        """Record, once, that the script trains on; the supervisor ends it."""
        if not self._ignored_stop:
            self._ignored_stop = True
            self.flush()
            self._files.write("ignored_stop", step=self.taken)

    def add_loss(self, loss: float) -> None:
        """Put a loss into the newest record; a framework may report it after the step's end."""
        if self._pending is None:
            return
        self.unknown.pop("loss", None)
        if math.isfinite(loss):
            self._pending["loss"] = loss
        else:
            self._pending["more"] += ',"loss_not_finite":true'

    def flush(self) -> None:
        """Append the waiting record."""
        if self._pending is not None and self._file is not None:
            self._file.write_text(LINE % self._pending)
            self._pending = None

    def _begin(self, now_ns: int) -> None:
        self.begun_ns = now_ns
        self.data_ns = self.forward_ns = self.optimizer_ns = None
        self.loader_samples = self.forward_samples = 0

    def _record(self, now_ns: int, samples: int | None) -> dict[str, Any]:
        """The values of `LINE`, most of them as text."""
        duration_ns = now_ns - self.begun_ns
        seen_ns = (self.data_ns or 0) + (self.forward_ns or 0) + (self.optimizer_ns or 0)
        peaks = self.peaks.read() if self.taken <= FIRST or self.taken % EVERY == 0 else {}
        return {
            "t_ns": now_ns,
            "step": self.taken,
            "warmup": "true" if self.taken <= self._warmup else "false",
            "samples": NULL if samples is None else samples,
            "loss": NULL,
            "step_ms": duration_ns / 1e6,
            "data_ms": _ms(self.data_ns),
            "forward_ms": _ms(self.forward_ns),
            "optimizer_ms": _ms(self.optimizer_ns),
            "other_ms": _ms(max(0, duration_ns - seen_ns) if seen_ns else None),
            "lr": NULL if self.lr is None else self.lr,
            "more": "".join(f',"{name}":{size}' for name, size in peaks.items()),
        }

    def _samples(self, given: int | None) -> int | None:
        """Samples of this step and rank by the first source that knows them."""
        if given is not None:
            source, samples = "framework", given
        elif self.loader_samples:
            source, samples = "DataLoader", self.loader_samples
        elif self.forward_samples:
            source, samples = "forward input", self.forward_samples
        elif self._samples_per_step is not None:
            source, samples = "--samples-per-step", self._samples_per_step
        else:
            return None
        self._sources[source] = self._sources.get(source, 0) + 1
        self.unknown.pop("samples", None)
        return samples


def _ms(duration_ns: int | None) -> str:
    return NULL if duration_ns is None else f"{duration_ns / 1e6:.4f}"
