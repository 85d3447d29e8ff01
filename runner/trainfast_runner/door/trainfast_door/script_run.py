"""The run that this process belongs to: its settings, its steps with a record each, and what live objects show."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from time import monotonic_ns
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .memory_limit import MemoryLimit, MemoryPeaks
from .notes import RUN_VARIABLE, RankFiles, never_raises
from .turns import Turn, Turns

if TYPE_CHECKING:
    Times = tuple[int, int | None, int | None, int | None]
    """Nanoseconds of a whole step, and of data, forward and optimizer in it; None for a phase that was not seen."""
    StepRecord = tuple[int, int, int | None, Times, float | None, dict[str, int], float | None]
    """End (CLOCK_MONOTONIC) and number of a step, its samples, times, learning rate, memory peaks and loss."""

DEFAULTS: dict[str, Any] = {
    "steps": None,
    "timing_warmup": 3,
    "samples_per_step": None,
    "steps_from_log": None,
    "flagged": (),
    "trainer_fields": {},
    "loader_defaults": {},
    "trial": False,
    "longest_first": False,
}
"""`script` of `run.json`, as far as the hooks read it; `records.run_file.ScriptAsked` explains each field."""
WRITE_EVERY_NS = 100_000_000
"""Steps faster than this share one write."""
FACTS_AFTER = 2
"""The step after which the hooks know the model, its input and the optimizer."""
OPTIMIZER_SOURCE = "torch.optim"
"""The source of steps when no framework counts them."""
NOTE_PHASE_EVERY_NS = 1_000_000_000
"""Evaluations of less time share a record of the phase."""
UNKNOWN_REASONS = {
    "tokens": "no hook sees how many tokens a sample has",
    "loss": "torch reports no loss; the HF Trainer and Lightning do",
    "backward_ms": "no hook marks the end of a script's backward: it is in other_ms",
    "forward_ms": "no module that holds the optimizer's parameters was called",
    "samples": "no framework, DataLoader or model input shows them; use --samples-per-step N",
}
"""The reason for each null field of the step records, until a hook sees a value."""
PRECISION_BY_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The knob's value by the dtype that the model computes in."""
HALF_DTYPE = {"fp16": "float16", "bf16": "bfloat16", "bf16-pure": "bfloat16"}
"""The dtype that the model computes in by the knob's value, where a framework sets it."""


class ScriptRun:
    """One process of the run; the hooks write the public fields of the step that runs.

    The record of a step whose loss may still come waits for the next one, and those of fast steps wait for each other.
    """

    def __init__(self, directory: str) -> None:
        """Raises OSError or ValueError without a readable `run.json`."""
        with open(os.path.join(directory, "run.json"), encoding="utf-8") as file:
            recorded: dict[str, Any] = json.load(file)
        self.settings = SimpleNamespace(**{**DEFAULTS, **(recorded["script"] or {})})
        self.is_trial: bool = self.settings.trial
        """True in a search's trial, whose memory is limited and which leaves no files."""
        self.files = RankFiles(directory, steps_from_log=bool(self.settings.steps_from_log))
        limits = (recorded.get("memory_limit_bytes") if self.is_trial else None) or [0]
        limit_bytes = limits[min(self.files.rank, len(limits) - 1)]
        self.memory_limit = MemoryLimit(limit_bytes, str(recorded.get("device")))
        self.opened = False
        """True once the hooks are installed."""

        self.source = OPTIMIZER_SOURCE
        """The reporter whose steps are counted."""
        self.framework: str | None = None
        """The framework that has reported steps; None without one."""
        self.planned_steps: int | None = None
        """The steps of the whole training, where the framework knows them."""
        self.hooks: dict[str, None] = {}
        """Names of the hooks that were called in this process, in the order of their first calls."""
        self.suppressed: dict[str, None] = {}
        """Actions that a trial kept the script from, in their order."""
        self.take_hooks_off: Callable[[], None] = lambda: None
        """Takes the hooks off the script's own objects."""

        self.taken = 0
        """Number of steps so far."""
        self.is_stopping = False
        """True once the steps that `--steps` allows are taken."""
        self.begun_ns = monotonic_ns()
        """Start of the step: the end of the last step. For the first step, the time of the latest parameter or batch
        that was made."""
        self.turns = Turns()
        self.peaks = MemoryPeaks()
        self.optimizer_ns: int | None = None
        """Time of the optimizer's work on a CPU; None if it was not seen."""
        self.lr: float | None = None
        self.waits_for_loss = False
        """True if a framework reports the loss of a step after its end."""
        self.unknown = dict(UNKNOWN_REASONS)
        """The reason for each null field. A hook removes a field that it can fill, and adds the reason if it cannot."""

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

        self._records: list[StepRecord] = []
        """Steps that are not written yet."""
        self._write_due_ns = self._note_due_ns = 0
        self._noted_ignored_stop = False
        self._sources: dict[str, int] = {}
        """Steps by the source of their samples."""
        self._noted_phase = "train"

    def count_steps_of(self, source: str) -> None:
        """From now on count only the steps that `source`, a framework, reports."""
        self.source = self.framework = source
        self.hooks[source] = None

    def end_training(self) -> None:
        """End a framework's training: a trial ends here, any other script may go on with the model.

        Then torch's optimizers count the steps again.
        """
        self.flush()
        self.source, self.waits_for_loss = OPTIMIZER_SOURCE, False
        self.take_hooks_off()
        if self.is_trial:
            raise SystemExit(0)

    def begin_draw(self, iterator: Any, loader: Any, now_ns: int) -> Turn:
        """Note that the script asks an iterator for a batch, and return the turn that this belongs to."""
        if self.taken == 0 and self.turns.loader_knobs is None:
            self.hooks["DataLoader"] = None
            self.begun_ns = now_ns
        turn = self.turns.begin_draw(iterator, loader, now_ns)
        if turn.source is not self.turns.training:
            self.note_phase(now_ns)
        return turn

    def note_phase(self, now_ns: int) -> None:
        """Record that an evaluation begins or is over, which may be seen late: fast ones share a record."""
        phase = "evaluation" if self.turns.is_evaluating else "train"
        if phase != self._noted_phase and now_ns >= self._note_due_ns and self.files.are_ours:
            self._noted_phase, self._note_due_ns = phase, now_ns + NOTE_PHASE_EVERY_NS
            self.files.write("phase", phase=phase)

    def record_step(self, samples: int | None = None, loss: float | None = None) -> bool:
        """Record that a step has ended now; return True once the script must stop, as `--steps` asks.

        `samples` and `loss` are those that a framework reports.
        """
        now_ns = monotonic_ns()
        if not self.files.claim():
            return False
        if not self.taken:
            never_raises(self.files.write)("phase", phase="train")
        if self.is_stopping:
            if not self._noted_ignored_stop:
                # The script trains on; the supervisor ends it.
                self.flush()
                self.files.write("ignored_stop", step=self.taken)
                self._noted_ignored_stop = True
            return False
        turns = self.turns
        if not turns.has_backward:
            # Gradients may come from elsewhere, such as torch.autograd.grad.
            turns.reach_backward(self.begun_ns)
        is_due = now_ns >= self._write_due_ns
        if is_due and self.waits_for_loss:
            self.flush(now_ns)
        self.taken += 1
        step_ns = now_ns - self.begun_ns - turns.step_evaluated_ns
        times = (step_ns, turns.data_ns, turns.forward_ns, self.optimizer_ns)
        record = (now_ns, self.taken, self._samples(samples), times, self.lr, self.peaks.read_due(now_ns), None)
        self._records.append(record)
        if loss is not None:
            self.add_loss(loss)
        self.begun_ns, self.optimizer_ns = now_ns, None
        turns.begin_step()
        self.is_stopping = self.taken == self.settings.steps
        if is_due and not self.waits_for_loss:
            self.flush(now_ns)
        if self._noted_phase != "train":
            never_raises(self.note_phase)(now_ns)
        if self.taken == FACTS_AFTER:
            self.write_facts()
        return self.is_stopping

    def add_loss(self, loss: float) -> None:
        """Put a loss into the newest record; a framework may report it after the step's end."""
        if self._records:
            self.unknown.pop("loss", None)
            self._records[-1] = (*self._records[-1][:-1], loss)

    @never_raises
    def flush(self, now_ns: int = 0) -> None:
        """Append the waiting records in one write. Many at once take a third of the time of one at each step.

        A full disk loses them: the steps are counted all the same.
        """
        if self._records and self.files.steps is not None:
            lines = "".join([step_line(record, self.settings.timing_warmup) for record in self._records])
            self._records.clear()
            self._write_due_ns = now_ns + WRITE_EVERY_NS
            self.files.steps.write_text(lines)

    def samples_beside(self, asked: int) -> int | None:
        """Samples of the batches that the step's backwards reached; `asked` where nothing shows them.

        None where the model's input does.
        """
        return self.turns.samples or (None if self.turns.rows else asked)

    def _samples(self, from_framework: int | None) -> int | None:
        """Samples of this step and rank by the first source that knows them."""
        for source, samples in (
            ("--samples-per-step", self.settings.samples_per_step),
            ("framework", from_framework),
            ("DataLoader", self.turns.samples),
            ("forward input", self.turns.rows),
        ):
            if samples:
                self.unknown.pop("samples", None)
                self._sources[source] = self._sources.get(source, 0) + 1
                return int(samples)
        return None

    @never_raises
    def write_facts(self) -> None:
        """Record the facts about the script that are known so far."""
        self._read_knobs()
        if self.actual:
            self.files.write("actual", world_size=self.files.world_size, **self.actual)
        self.files.write(
            "script",
            framework=self.framework or ("accelerate" if uses_accelerate() else "torch"),
            hooks=list(self.hooks),
            samples_from=max(self._sources, key=self._sources.__getitem__, default=None),
            unknown=self.unknown,
            planned_steps=self.planned_steps,
            ran=self.ran,
            suppressed=list(self.suppressed),
            limit_peak_bytes=self.memory_limit.peak_bytes(),
            widths=self.widths or None,
            evaluation_seconds=self.turns.all_evaluated_ns() / 1e9,
        )
        if self.is_trial and not self.settings.longest_first and self.memory_limit.is_on_cpu:
            # The untimed steps have shown the memory; later ones show the speed.
            self.memory_limit.lift()
            self.peaks.stop()

    def _read_knobs(self) -> None:
        """Add the knobs read from live objects; those that a framework reported stay."""
        ran, turns = self.ran, self.turns
        if turns.batch_size is not None:
            ran["batch_size"] = turns.batch_size // self.batch_shares
        if turns.loader_knobs is not None:
            workers, is_pinned = turns.loader_knobs
            ran.setdefault("workers", workers)
            ran.setdefault("pin_memory", "on" if is_pinned else "off")
        if uses_accelerate() and self.framework is None:
            state = sys.modules["accelerate.state"].AcceleratorState()
            ran["precision"] = {"no": "fp32"}.get(state.mixed_precision, state.mixed_precision)
            ran["compile"] = compiled_by(state.dynamo_plugin)
            accumulated = sys.modules["accelerate.state"].GradientState().num_steps
            # With an accumulation flag of its own a script leaves Accelerate's `num_steps` at 1.
            if accumulated > 1 or "grad_accum" not in self.settings.flagged:
                ran["grad_accum"] = accumulated
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized() and "allocator" not in ran:
            settings = torch.cuda.memory._snapshot()["allocator_settings"]
            ran["allocator"] = "expandable" if settings["expandable_segments"] else "default"
        # A framework may not call the model's own forward: no hook sees the dtype then.
        if ran.get("precision") in HALF_DTYPE:
            self.actual["compute_dtype"] = HALF_DTYPE[ran["precision"]]
        # By the second step a hand-made schedule has changed the rate; the rate it began with is then unknown.
        if self.given_rate is not None and (self.has_scheduler or self.given_rate == self.lr):
            ran.setdefault("lr", self.given_rate)
        precision = PRECISION_BY_DTYPE.get(str(self.actual.get("compute_dtype")))
        if precision is not None:
            ran.setdefault("precision", precision)


def step_line(record: StepRecord, warmup: int) -> str:
    """The line of a step; the first `warmup` steps are marked as such, and a loss that is not finite is.

    Written by hand, with a time as its nanoseconds and an exponent, 1234567e-6 ms: Python's JSON encoder takes 20 us.
    """
    t_ns, step, samples, (step_ns, data_ns, forward_ns, optimizer_ns), lr, peaks, loss = record
    known_ns = (data_ns or 0) + (forward_ns or 0) + (optimizer_ns or 0)
    other = f"{max(0, step_ns - known_ns)}e-6" if known_ns else "null"
    loss_text = _json(loss) if loss is None or math.isfinite(loss) else 'null,"loss_not_finite":true'
    more = "".join([f',"{name}":{size}' for name, size in peaks.items()])
    return (
        f'{{"t_ns":{t_ns},"step":{step},"warmup":{"true" if step <= warmup else "false"},'
        f'"samples":{_json(samples)},"tokens":null,"loss":{loss_text},"step_ms":{step_ns}e-6,'
        f'"data_ms":{_json(data_ns, "e-6")},"forward_ms":{_json(forward_ns, "e-6")},"backward_ms":null,'
        f'"optimizer_ms":{_json(optimizer_ns, "e-6")},"other_ms":{other},"lr":{_json(lr)}{more}}}\n'
    )


def _json(value: float | None, exponent: str = "") -> str:
    """A finite number as JSON has it, with an exponent; null for None."""
    return "null" if value is None else f"{value}{exponent}"


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


def compiled_by(plugin: Any) -> str:
    """The value of `compile` by accelerate's plugin; the name of a compiler other than torch's own."""
    backend: str = getattr(plugin.backend, "value", plugin.backend).lower()
    mode = "blocks" if getattr(plugin, "use_regional_compilation", False) else plugin.mode or "default"
    return {"no": "off", "inductor": mode.replace("-no-cudagraphs", "")}.get(backend, backend)


def uses_accelerate() -> bool:
    """True if the script has made an Accelerator."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return bool(getattr(state, "_shared_state", None))
