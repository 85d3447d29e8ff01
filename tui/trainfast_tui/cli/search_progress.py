"""The journal of a search on stderr: each line in words, and the work under way."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.run_directory import rank_file, state_text
from trainfast_runner.records.run_lines import Step
from trainfast_runner.search.batch_journal import (
    CONFIRM_STEP,
    BatchLaunched,
    BatchLine,
    BatchStep,
    ConfirmationRun,
    Predicted,
    Probe,
)
from trainfast_runner.search.best.answer import BestSoFar
from trainfast_runner.search.best_journal import (
    UNDER_LIMIT,
    BestLaunched,
    BestLine,
    BestStep,
    ColdRun,
    Instruction,
    ProcessReady,
    Space,
    Trial,
)
from trainfast_runner.search.conductor import SearchCaller
from trainfast_runner.search.journal import Paused, Resumed, Waiting
from trainfast_runner.units import counted
from trainfast_runner.worker.shared.words import PROBE, TRIAL
from trainfast_tui.cli.progress import Progress
from trainfast_tui.cli.signals import Signals
from trainfast_tui.text import format as fmt
from trainfast_tui.text.best_words import (
    best_words,
    chance_words,
    doing_words,
    instruction_words,
    objective_words,
    typed_knobs,
)
from trainfast_tui.text.memory_words import phase_words
from trainfast_tui.text.search_words import outcome_of, role_of

TICK_S = 2.0
"""Seconds between two lines about the step of a search that goes on."""
LineT = TypeVar("LineT")
EndT = TypeVar("EndT")


class JournalPrinter(ABC, Generic[LineT]):
    """Prints the journal of one kind of search."""

    def __init__(self, home: Home) -> None:
        self._progress, self._home = Progress(), home
        self._step_work = ""
        """The work of the newest step, which goes on after a wait for another run."""
        self._steps: Tail[Step] | None = None
        self._step = 0
        self._work_began_s = self._printed_at_s = time.monotonic()
        self._work = "starting"

    @abstractmethod
    def words_of(self, line: LineT) -> str:
        """Return a line of this kind of search in words; empty if nothing is printed."""

    @abstractmethod
    def work_of(self, step: BatchStep | BestStep) -> str:
        """Return the work that a step begins; empty if it begins none."""

    def watch(self, conduct: Callable[[SearchCaller[LineT]], EndT], signals: Signals, began_ns: int) -> EndT:
        """Conduct a search and print each line of its journal; cancel it on Ctrl-C or when the terminal is closed.

        The search's time counts from `began_ns` (CLOCK_MONOTONIC).
        """

        def is_cancelled() -> bool:
            # Called repeatedly during every wait.
            self.tick()
            return bool(signals.interrupts or signals.must_leave)

        try:
            return conduct(SearchCaller(self.print_line, is_cancelled, began_ns))
        finally:
            self._progress.close()

    def print_line(self, line: LineT) -> None:
        """Print a line of the journal, and show the work that it begins from now on."""
        match line:
            case Waiting():
                self._begin(f"waiting for {line.run_id} to end")
            case Paused():
                self._progress.print_line("paused")
                self._step_work = ""  # a pause comes between two steps
                self._begin("")
            case Resumed():
                self._progress.print_line("resumed")
                self._begin(self._step_work)
            case BatchLaunched() | BestLaunched():
                # A warm process tries many settings, so its steps are not counted.
                if line.role not in (PROBE, TRIAL):
                    self._steps = Tail(rank_file(self._home.directory(line.run_id), "steps", 0), Step)
            case _:
                if words := self.words_of(line):
                    self._progress.print_line(words)
                if isinstance(line, BatchStep | BestStep):
                    self._step_work = self.work_of(line)
                    self._begin(self._step_work)

    def tick(self) -> None:
        """Show the time of the work under way, and the steps of a run that is followed; once in two seconds."""
        now_s = time.monotonic()
        if not self._work or now_s - self._printed_at_s < TICK_S:
            return
        self._printed_at_s = now_s
        if self._steps is not None:
            self._step = max((step.step for step in self._steps.new()), default=self._step)
        steps = f", {counted(self._step, 'step')}" if self._step else ""
        work_s = int(now_s - self._work_began_s)
        self._progress.show_activity(f"{self._work}… {fmt.duration(work_s)}{steps}{self.progress_words()}")

    def progress_words(self) -> str:
        """Return words on the search as a whole that follow the work under way; empty without any."""
        return ""

    def _begin(self, work: str) -> None:
        """Begin a task and its clock; with an empty text the last line stays."""
        self._work = work
        self._work_began_s = self._printed_at_s = time.monotonic()
        self._steps, self._step = None, 0


class BatchPrinter(JournalPrinter[BatchLine]):
    """Prints the journal of a batch search."""

    def work_of(self, step: BatchStep | BestStep) -> str:
        if isinstance(step, BestStep) or step.action == "end":
            return ""
        return f"{'confirming' if step.action == CONFIRM_STEP else 'trying'} {fmt.count(step.batch_size)}"

    def words_of(self, line: BatchLine) -> str:
        match line:
            case Predicted():
                found = f"up to {line.max_batch:,}" if line.max_batch else "not even 1 fits"
                return line.reason if line.max_batch is None else f"predicted: {found} ({line.basis})"
            case BatchStep() if line.action != "end":
                verb = "confirm" if line.action == CONFIRM_STEP else line.action
                return f"{verb} {fmt.count(line.batch_size)}: {line.why}"
            case Probe(outcome="fits"):
                rate = fmt.per_second(line.samples_per_s, "samples")
                peak = fmt.size(line.peak_allocated_bytes)
                return f"  {line.batch_size:,} fits: peak {peak}, {fmt.milliseconds(line.step_ms)} a step, {rate}"
            case Probe():
                phase = f" in {phase_words(line.phase)}" if line.phase else ""
                return f"  {line.batch_size:,} {outcome_of(line.outcome).verb}{phase}: {fmt.with_sizes(line.reason)}"
            case ConfirmationRun():
                sizes = " and ".join(f"{batch:,}" for batch in line.refutes)
                refuted_words = f", which refutes that {sizes} fitted" if sizes else ""
                ended = f"{state_text(line.state)} in a fresh process, {fmt.duration(line.seconds)}"
                return f"  {line.batch_size:,} {ended}{refuted_words}: {line.run_id}"
        return ""


class BestPrinter(JournalPrinter[BestLine]):
    """Prints the journal of a best-fit search; `lines` are those written before."""

    def __init__(self, home: Home, lines: Sequence[BestLine]) -> None:
        super().__init__(home)
        self._so_far = BestSoFar(tuple(lines))

    def print_line(self, line: BestLine) -> None:
        """Print a line of the journal."""
        self._so_far = BestSoFar((*self._so_far.lines, line))
        super().print_line(line)

    def progress_words(self) -> str:
        """Return the best so far with its interval, the chance of 2 % more, and its price."""
        best = best_words(self._so_far)
        words = (f"best so far {best}" if best else "", chance_words(self._so_far))
        return "".join(f"; {part}" for part in words if part)

    def work_of(self, step: BatchStep | BestStep) -> str:
        return doing_words(self._so_far)

    def words_of(self, line: BestLine) -> str:
        match line:
            case Space():
                return _space_words(line)
            case ProcessReady():
                return f"  process {line.run_id} ready after {fmt.duration(line.start_s)}"
            case BestStep() if line.candidate_number is not None:
                knob = f" {line.knob} of" if line.knob else ""
                return f"{role_of(line.action).noun}{knob} {self._knobs(line.candidate_number)}: {line.why}"
            case Trial():
                return f"  {self._outcome(line)}"
            case ColdRun():
                return f"  {self._outcome(line)}: {line.run_id}"
            case Instruction():
                return f"your instruction: {instruction_words(line, self._so_far.space)}"
        return ""

    def _outcome(self, line: Trial | ColdRun) -> str:
        """Return the outcome of the newest trial or run in words."""
        so_far = self._so_far
        value = so_far.values.get(len(so_far.attempts) - 1)
        if isinstance(line, ColdRun) and (line.role, line.outcome) == (UNDER_LIMIT, "measured"):
            return f"fits, peak {fmt.size(line.peak_allocated_bytes)}"
        if line.outcome != "measured" or value is None:
            words = outcome_of(line.outcome).verb
            return f"{words}: {fmt.with_sizes(line.reason)}" if line.reason else words
        words = objective_words(so_far.objective, so_far.for_steps, value)
        steps = f", {len(line.step_ms)} steps" if isinstance(line, Trial) else ""
        doubt = f" ({line.reason})" if line.reason else ""
        return f"{words}, peak {fmt.size(line.peak_allocated_bytes)}{steps}, {fmt.duration(line.seconds)}{doubt}"

    def _knobs(self, number: int) -> str:
        return "the baseline" if self._so_far.space is None else typed_knobs(self._so_far.candidates[number].knobs)


def _space_words(space: Space) -> str:
    excluded_as = [candidate.excluded_as for candidate in space.candidates]
    words = counted(len(space.candidates), "setting")
    for name in ("incompatible", "too_large"):
        if count := excluded_as.count(name):
            words += f", {count:,} {name.replace('_', ' ')}"
    return words + (f"; another global batch: {counted(space.dropped, 'combination')}" if space.dropped else "")
