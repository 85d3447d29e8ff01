"""The run that this process belongs to: its settings, its steps, and the facts read from live objects."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from .memory_limit import MemoryLimit
from .notes import RUN_VARIABLE, RankFiles, never_raises, write_door_line
from .step_log import StepLog, settings_of

PRECISION_BY_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The knob's value by the dtype that the model computes in."""
HALF_DTYPE = {"fp16": "float16", "bf16": "bfloat16", "bf16-pure": "bfloat16"}
"""The dtype that the model computes in by the knob's value, where a framework sets it."""


class ScriptRun:
    """One process of the run."""

    def __init__(self, directory: str) -> None:
        """Raises OSError or ValueError without a readable `run.json`."""
        with open(os.path.join(directory, "run.json"), encoding="utf-8") as file:
            recorded: dict[str, Any] = json.load(file)
        self.settings = settings_of(recorded["script"] or {})
        self.is_trial = self.settings.trial
        """True in a search's trial, which leaves no files."""
        limits_bytes = recorded.get("memory_limit_bytes") if self.is_trial else None
        self.memory_limit = MemoryLimit(limits_bytes or [], str(recorded.get("device")))
        self.suppressed: list[str] = []
        self.opened = False
        """True once the hooks are installed."""
        self.actual: dict[str, Any] = {}
        """Facts read from live objects, apart from knobs: wrapper, dtypes, device, number of parameters."""
        self.ran: dict[str, Any] = {}
        """Knobs by the values that ran, read from live objects."""
        self.batch_shares = 1
        """Parts into which this process splits each batch, one for each of its GPUs."""
        self.given_rate: float | None = None
        """The rate that the script gave its optimizer: `initial_lr` if a scheduler keeps one, else its first rate."""
        self.has_scheduler = False
        """True if one of torch's schedulers changes the rate."""
        self.widths: dict[str, Any] = {}
        """Widths of the batches in a trial of a batch search, and the look at the data set's lengths."""
        self.removals: list[Callable[[], None]] = []
        """Functions that take hooks off the script's own objects."""
        self.files = RankFiles(directory, steps_from_log=bool(self.settings.steps_from_log))
        self.steps = StepLog(self.files, self.settings, self.write_facts)

    def suppress(self, name: str) -> None:
        """Note, once, that the trial kept the script from doing `name`."""
        if name not in self.suppressed:
            self.suppressed.append(name)

    def record_opening(self) -> None:
        """Append to `door.jsonl` that this process has imported torch."""
        torch = str(getattr(sys.modules.get("torch"), "__version__", None))
        write_door_line(self.files.directory, "opened", rank=self.files.rank, torch=torch)

    @never_raises
    def write_facts(self) -> None:
        """Record the facts about the script that are known so far."""
        steps = self.steps
        self._read_knobs()
        if self.actual:
            self.files.write("actual", world_size=self.files.world_size, **self.actual)
        self.files.write(
            "script",
            framework=steps.framework or ("accelerate" if uses_accelerate() else "torch"),
            hooks=steps.hooks,
            samples_from=steps.samples_from,
            unknown=steps.unknown,
            ran=self.ran,
            suppressed=self.suppressed,
            limit_peak_bytes=self.memory_limit.peak_bytes(),
            widths=self.widths or None,
            evaluation_seconds=steps.turns.all_evaluated_ns() / 1e9,
        )
        if self.is_trial and not self.settings.longest_first and self.memory_limit.is_on_cpu:
            # The untimed steps have shown the memory; later ones show the speed.
            self.memory_limit.lift()
            self.steps.peaks.stop()

    def end_training(self) -> None:
        """End a framework's training: a trial ends here, any other script may go on with the model."""
        self.steps.count_optimizer_steps()
        for remove in self.removals:
            remove()
        if self.is_trial:
            raise SystemExit(0)

    def _read_knobs(self) -> None:
        """Add the knobs read from live objects; those that a framework reported stay."""
        ran, turns = self.ran, self.steps.turns
        if turns.batch_size is not None:
            ran["batch_size"] = turns.batch_size // self.batch_shares
        if turns.loader_knobs is not None:
            workers, is_pinned = turns.loader_knobs
            ran.setdefault("workers", workers)
            ran.setdefault("pin_memory", "on" if is_pinned else "off")
        if uses_accelerate() and self.steps.framework is None:
            mixed = sys.modules["accelerate.state"].AcceleratorState().mixed_precision
            ran["precision"] = {"no": "fp32"}.get(mixed, mixed)
            accumulated = sys.modules["accelerate.state"].GradientState().num_steps
            # With an accumulation flag of its own a script leaves Accelerate's `num_steps` at 1.
            if accumulated > 1 or "grad_accum" not in self.settings.flagged:
                ran["grad_accum"] = accumulated
        # A framework may not call the model's own forward: no hook sees the dtype then.
        if ran.get("precision") in HALF_DTYPE:
            self.actual["compute_dtype"] = HALF_DTYPE[ran["precision"]]
        # By the second step a hand-made schedule has changed the rate; the rate it began with is then unknown.
        if self.given_rate is not None and (self.has_scheduler or self.given_rate == self.steps.lr):
            ran.setdefault("lr", self.given_rate)
        precision = PRECISION_BY_DTYPE.get(str(self.actual.get("compute_dtype")))
        if precision is not None:
            ran.setdefault("precision", precision)


_runs: dict[str, ScriptRun | None] = {}
"""The run of each directory that `current_run` has looked at; None for one without a readable `run.json`."""


def current_run() -> ScriptRun | None:
    """The run that TRAINFAST_RUN names; None without one, and for a directory that has no readable `run.json`."""
    directory = os.environ.get(RUN_VARIABLE, "")
    if directory not in _runs:
        try:
            _runs[directory] = ScriptRun(directory) if directory else None
        except (OSError, ValueError, KeyError):
            _runs[directory] = None
    return _runs[directory]


def uses_accelerate() -> bool:
    """True if the script has made an Accelerator."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return bool(getattr(state, "_shared_state", None))
