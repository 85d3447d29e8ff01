"""The steps of a script: counted, timed, and recorded with one line for each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from .memory_limit import MemoryPeaks
from .notes import RankFiles, never_raises, process
from .turns import Turn, Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    Times = tuple[int, int | None, int | None, int | None]
    """Nanoseconds of a whole step, and of data, forward and optimizer in it; None for a phase that was not seen."""
    StepRecord = tuple[int, int, int | None, Times, float | None, dict[str, int] | None, float | None]
    """End (CLOCK_MONOTONIC) and number of a step, its samples, times, learning rate, memory peaks and loss."""


WRITE_EVERY_NS = 100_000_000
"""Steps faster than this share one write."""
FACTS_AFTER = 2
"""The step after which the hooks know the model, its input and the optimizer."""
OPTIMIZER_SOURCE = "torch.optim"
"""The source of steps when no framework counts them."""
PHASES = ("train", "evaluation")
"""The phases of a script: in its training, and in an evaluation."""
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


class StepLog:
    """Counts the optimizer steps of this process and appends their records.

    The hooks write the public fields of the step that runs. The record of a step whose loss may still come waits for
    the next one, and those of fast steps wait for each other.
    """

    def __init__(self, files: RankFiles, settings: Settings, write_facts: Callable[[], None]) -> None:
        """`write_facts` is called after step FACTS_AFTER and must not raise."""
        self.source = OPTIMIZER_SOURCE
        """The reporter whose steps are counted."""
        self.framework: str | None = None
        """The framework that has reported steps; None without one."""
        self.begun_ns = monotonic_ns()
        """Start of the step: the end of the last step. For the first step, the time of the latest parameter or batch
        that was made."""
        self.taken = 0
        """Number of steps so far."""
        self.is_stopping = False
        """True once the steps that `--steps` allows are taken."""
        self.turns = Turns()
        self.optimizer_ns: int | None = None
        """Time of the optimizer's work on a CPU; None if it was not seen."""
        self.lr: float | None = None
        self.waits_for_loss = False
        """True if a framework reports the loss of a step after its end."""
        self.peaks = MemoryPeaks()
        self.hooks: list[str] = []
        """Names of the hooks that were called in this process."""
        self._files = files
        self._write_facts = write_facts
        self._limit = settings.steps
        self._warmup = settings.timing_warmup
        self._samples_per_step = settings.samples_per_step
        self._file: process.LineFile | None = None
        self._records: list[StepRecord] = []
        """Steps that are not written yet."""
        self._write_due_ns = 0
        self._ignored_stop = False
        self._sources: dict[str, int] = {}
        """Steps by the source of their samples."""
        self._noted_phase = PHASES[False]
        self._note_due_ns = 0
        self.unknown = dict(UNKNOWN_REASONS)
        """The reason for each null field. A hook removes a field that it can fill, and adds the reason if it cannot."""

    @property
    def samples_from(self) -> str | None:
        """The source of most steps' samples; None without one."""
        return max(self._sources, key=lambda source: self._sources[source], default=None)

    def count_steps_of(self, source: str) -> None:
        """From now on count only the steps that `source`, a framework, reports."""
        self.source = self.framework = source
        self.note_hook(source)

    def note_hook(self, hook: str) -> None:
        """Record that a hook was called."""
        if hook not in self.hooks:
            self.hooks.append(hook)

    def begin_draw(self, iterator: Any, loader: Any, now_ns: int) -> Turn:
        """Note that the script asks an iterator for a batch, and return the turn that this belongs to."""
        if self.taken == 0 and self.turns.loader_knobs is None:
            self.note_hook("DataLoader")
            self.begun_ns = now_ns
        turn = self.turns.begin_draw(iterator, loader, now_ns)
        if turn.source is not self.turns.training:
            self.note_phase(now_ns)
        return turn

    def note_phase(self, now_ns: int) -> None:
        """Record that an evaluation begins or is over, which may be seen late: fast ones share a record."""
        phase = PHASES[self.turns.is_evaluating]
        if phase != self._noted_phase and now_ns >= self._note_due_ns and self._files.are_ours:
            self._noted_phase, self._note_due_ns = phase, now_ns + NOTE_PHASE_EVERY_NS
            self._files.write("phase", phase=phase)

    def end_backward(self) -> None:
        """Add what the backward that has just ended has reached to the step."""
        self.turns.reach_backward(self.begun_ns)

    def count_optimizer_steps(self) -> None:
        """Count the steps of torch's optimizers again: the framework's training is over."""
        self.flush()
        self.source, self.waits_for_loss = OPTIMIZER_SOURCE, False

    def start_first_step(self) -> None:
        """Time the first step from now; does nothing once a step is recorded."""
        if self.taken == 0:
            self.begun_ns = monotonic_ns()

    def record_step(self, samples: int | None = None, loss: float | None = None) -> bool:
        """Record that a step has ended now; return True once the script must stop, as `--steps` asks."""
        now_ns = monotonic_ns()
        if not self._files.are_ours and not self._claim_files():
            return False
        if self.is_stopping:
            self._note_ignored_stop()
            return False
        turns = self.turns
        if not turns.has_backward:
            # Gradients may come from elsewhere, such as torch.autograd.grad.
            self.end_backward()
        is_due = now_ns >= self._write_due_ns
        if is_due and self.waits_for_loss:
            self.flush(now_ns)
        self.taken = step = self.taken + 1
        step_ns = now_ns - self.begun_ns - turns.step_evaluated_ns
        times = (step_ns, turns.data_ns, turns.forward_ns, self.optimizer_ns)
        peaks = self.peaks.read_due(now_ns) if now_ns >= self.peaks.due_ns else None
        self._records.append((now_ns, step, self._samples(samples), times, self.lr, peaks, loss))
        if loss is not None:
            self.unknown.pop("loss", None)
        self.begun_ns = now_ns
        self.optimizer_ns = None
        turns.begin_step()
        if self._limit is not None and step >= self._limit:
            self.is_stopping = True
        if is_due and not self.waits_for_loss:
            self.flush(now_ns)
        if self._noted_phase != PHASES[False]:
            never_raises(self.note_phase)(now_ns)
        if step == FACTS_AFTER:
            self._write_facts()
        return self.is_stopping

    def samples_beside(self, asked: int) -> int | None:
        """Samples of the batches that the step's backwards reached; `asked` where nothing shows them.

        None where the model's input does.
        """
        return self.turns.samples or (None if self.turns.rows else asked)

    def _claim_files(self) -> bool:
        """Record the rank from here on, if no other process does; return True if this one does."""
        if not self._files.is_claimed:
            self._file = self._files.claim()
            if self._file is not None:
                never_raises(self._files.write)("phase", phase="train")
        return self._files.are_ours

    def _note_ignored_stop(self) -> None:
        """Record, once, that the script trains on; the supervisor ends it."""
        if not self._ignored_stop:
            self.flush()
            self._files.write("ignored_stop", step=self.taken)
            self._ignored_stop = True

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
        if not self._records or self._file is None:
            return
        lines = "".join([step_line(record, self._warmup) for record in self._records])
        self._records.clear()
        self._write_due_ns = now_ns + WRITE_EVERY_NS
        self._file.write_text(lines)

    def _samples(self, from_framework: int | None) -> int | None:
        """Samples of this step and rank by the first source that knows them."""
        if self._samples_per_step is not None:
            source, samples = "--samples-per-step", self._samples_per_step
        elif from_framework:
            source, samples = "framework", from_framework
        elif self.turns.samples:
            source, samples = "DataLoader", self.turns.samples
        elif self.turns.rows:
            source, samples = "forward input", self.turns.rows
        else:
            return None
        steps_before = self._sources.get(source, 0)
        if not steps_before:
            self.unknown.pop("samples", None)
        self._sources[source] = steps_before + 1
        return samples


def step_line(record: StepRecord, warmup: int) -> str:
    """The line of a step; the first `warmup` steps are marked as such, and a loss that is not finite is.

    Written by hand, with a time as its nanoseconds and an exponent, 1234567e-6 ms: Python's JSON encoder takes 20 us.
    """
    t_ns, step, samples, (step_ns, data_ns, forward_ns, optimizer_ns), lr, peaks, loss = record
    known_ns = (data_ns or 0) + (forward_ns or 0) + (optimizer_ns or 0)
    data = "null" if data_ns is None else f"{data_ns}e-6"
    forward = "null" if forward_ns is None else f"{forward_ns}e-6"
    optimizer = "null" if optimizer_ns is None else f"{optimizer_ns}e-6"
    other = f"{max(0, step_ns - known_ns)}e-6" if known_ns else "null"
    loss_text = "null" if loss is None else loss if math.isfinite(loss) else 'null,"loss_not_finite":true'
    more = "".join([f',"{name}":{size}' for name, size in peaks.items()]) if peaks else ""
    return (
        f'{{"t_ns":{t_ns},"step":{step},"warmup":{"true" if step <= warmup else "false"},'
        f'"samples":{"null" if samples is None else samples},"tokens":null,"loss":{loss_text},'
        f'"step_ms":{step_ns}e-6,"data_ms":{data},"forward_ms":{forward},"backward_ms":null,'
        f'"optimizer_ms":{optimizer},"other_ms":{other},"lr":{"null" if lr is None else lr}{more}}}\n'
    )


class Settings(NamedTuple):
    """`script` of `run.json`, as far as the hooks read it; `records.run_file.ScriptAsked` has all its fields."""

    steps: int | None = None
    """Steps after which the script is ended; None for a script that ends by itself."""
    timing_warmup: int = 3
    """First steps that are not measured."""
    samples_per_step: int | None = None
    """Samples of each step and rank, as the user gives them: no hook knows better."""
    steps_from_log: str | None = None
    """A regular expression that matches a line of output for each step; the hooks then count none."""
    flagged: Sequence[str] = ()
    """Knobs that flags of the script's own take."""
    trainer_fields: Mapping[str, Any] = {}
    """Fields of TrainingArguments that the hooks set."""
    loader_defaults: Mapping[str, Any] = {}
    """Defaults of DataLoader's arguments that the hooks set."""
    trial: bool = False
    """True for a trial of a search: its memory is limited, and the trial leaves no files."""
    longest_first: bool = False
    """True for a trial of a batch search, whose untimed steps take the longest samples."""


def settings_of(recorded: Mapping[str, Any]) -> Settings:
    """Return the settings in `recorded`, which is `script` of `run.json`."""
    return Settings(**{name: value for name, value in recorded.items() if name in Settings._fields})
