"""The journal of a search on stderr: each line in words, and the work under way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar, cast

from trainfast_runner.records.run_directory import state_text
from trainfast_runner.search.batch_journal import (
    CONFIRM_STEP,
    BatchLine,
    BatchStep,
    ConfirmationRun,
    Predicted,
    Probe,
)
from trainfast_runner.search.best.answer import BestSoFar
from trainfast_runner.search.best_journal import (
    UNDER_LIMIT,
    BestLine,
    BestStep,
    ColdRun,
    ProcessReady,
    Space,
    Trial,
)
from trainfast_runner.search.conductor import SearchCaller
from trainfast_runner.search.journal import Paused, Resumed, Waiting
from trainfast_runner.units import counted
from trainfast_tui.cli.progress import Progress
from trainfast_tui.cli.signals import Signals
from trainfast_tui.text import format as fmt
from trainfast_tui.text.best_words import (
    best_words,
    chance_words,
    doing_words,
    objective_words,
    typed_knobs,
)
from trainfast_tui.text.memory_words import phase_words
from trainfast_tui.text.search_words import outcome_of, role_of

TICK_S = 2.0
"""Seconds between two lines about the step of a search that goes on."""
LineT = TypeVar("LineT", BatchLine, BestLine)
EndT = TypeVar("EndT")


class SearchPrinter:
    """Prints the journal of a search of either kind; `so_far` has the earlier lines of a best-fit search."""

    def __init__(self, so_far: BestSoFar | None = None) -> None:
        self._progress, self._so_far = Progress(), so_far
        self._step_work = ""
        """The work of the newest step, which goes on after a wait for another run."""
        self._work = "starting"
        self._work_began_s = self._printed_at_s = time.monotonic()

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

    def print_line(self, line: BatchLine | BestLine) -> None:
        """Print a line of the journal, and show the work that it begins from now on."""
        if self._so_far is not None:
            self._so_far = BestSoFar((*self._so_far.lines, cast(BestLine, line)))
        if words := line_words(line, self._so_far):
            self._progress.print_line(words)
        match line:
            case Waiting():
                self._begin(f"waiting for {line.run_id} to end")
            case Paused():
                self._step_work = ""  # a pause comes between two steps
                self._begin("")
            case Resumed():
                self._begin(self._step_work)
            case BatchStep(action="end"):
                self._begin("")
            case BatchStep():
                verb = "confirming" if line.action == CONFIRM_STEP else "trying"
                self._begin(f"{verb} {fmt.count(line.batch_size)}")
                self._step_work = self._work
            case BestStep() if self._so_far is not None:
                self._begin(doing_words(self._so_far))
                self._step_work = self._work

    def tick(self) -> None:
        """Show the time of the work under way, and what a best-fit search has found, once in two seconds."""
        now_s = time.monotonic()
        if not self._work or now_s - self._printed_at_s < TICK_S:
            return
        self._printed_at_s = now_s
        parts = [f"{self._work}… {fmt.duration(int(now_s - self._work_began_s))}"]
        if self._so_far is not None:
            best = best_words(self._so_far)
            parts += [f"best so far {best}" if best else "", chance_words(self._so_far)]
        self._progress.show_activity("; ".join(part for part in parts if part))

    def _begin(self, work: str) -> None:
        """Begin a task and its clock; with an empty text the last line stays."""
        self._work = work
        self._work_began_s = self._printed_at_s = time.monotonic()


def line_words(line: BatchLine | BestLine, so_far: BestSoFar | None) -> str:
    """Return a line of a journal in words; empty if nothing is printed. `so_far` ends with a best-fit search's line."""
    match line:
        case Paused():
            return "paused"
        case Resumed():
            return "resumed"
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
    return "" if so_far is None else _best_line_words(cast(BestLine, line), so_far)


def _best_line_words(line: BestLine, so_far: BestSoFar) -> str:
    match line:
        case Space():
            excluded_as = Counter(candidate.excluded_as for candidate in line.candidates)
            counts = [f"{excluded_as[name]:,} {name.replace('_', ' ')}" for name in ("incompatible", "too_large")]
            words = [counted(len(line.candidates), "setting"), *(each for each in counts if not each.startswith("0"))]
            dropped = f"; another global batch: {counted(line.dropped, 'combination')}" if line.dropped else ""
            return ", ".join(words) + dropped
        case ProcessReady():
            return f"  process {line.run_id} ready after {fmt.duration(line.start_s)}"
        case BestStep() if line.candidate_number is not None:
            knob = f" {line.knob} of" if line.knob else ""
            is_first = so_far.space is None
            tried = "the baseline" if is_first else typed_knobs(so_far.candidates[line.candidate_number].knobs)
            return f"{role_of(line.action).noun}{knob} {tried}: {line.why}"
        case Trial() | ColdRun():
            run = f": {line.run_id}" if isinstance(line, ColdRun) else ""
            return f"  {_attempt_words(line, so_far)}{run}"
    return ""


def _attempt_words(line: Trial | ColdRun, so_far: BestSoFar) -> str:
    """Return the outcome of the newest trial or run in words."""
    value = so_far.values.get(len(so_far.attempts) - 1)
    peak = f"peak {fmt.size(line.peak_allocated_bytes)}"
    if isinstance(line, ColdRun) and (line.role, line.outcome) == (UNDER_LIMIT, "measured"):
        return f"fits, {peak}"
    if line.outcome != "measured" or value is None:
        words = outcome_of(line.outcome).verb
        return f"{words}: {fmt.with_sizes(line.reason)}" if line.reason else words
    words = objective_words(so_far.objective, so_far.for_steps, value)
    steps = f", {len(line.step_ms)} steps" if isinstance(line, Trial) else ""
    doubt = f" ({line.reason})" if line.reason else ""
    return f"{words}, {peak}{steps}, {fmt.duration(line.seconds)}{doubt}"
