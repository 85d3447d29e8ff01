"""Progress on stderr: a bar that redraws itself on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import exit_code_of, rank_file, state_text
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.worker_lines import batch_sizes
from trainfast_runner.running.follower import RunSnapshot
from trainfast_runner.running.present_state import other_host
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
    BestQuestion,
    BestStep,
    ColdRun,
    Instruction,
    ProcessReady,
    Space,
    Trial,
)
from trainfast_runner.search.conductor import SearchCaller
from trainfast_runner.search.journal import Paused, Resumed, Waiting
from trainfast_runner.search.searches import search_before_edit
from trainfast_runner.units import counted
from trainfast_runner.worker.shared.words import CONFIRMATION, TRIAL
from trainfast_tui.cli.printing import (
    USUAL_COLUMNS,
    can_redraw,
    print_json,
    print_lines,
    print_notice,
    progress_bar,
    terminal_width,
    write_to_stderr,
)
from trainfast_tui.cli.signals import Signals
from trainfast_tui.live.figures import planned_steps, run_figures, seconds_left
from trainfast_tui.text import format as fmt
from trainfast_tui.text import memory_words
from trainfast_tui.text.best_words import (
    best_words,
    chance_words,
    doing_words,
    instruction_words,
    objective_words,
    question_lines,
    typed_knobs,
)
from trainfast_tui.text.event_words import start_words
from trainfast_tui.text.format import count, number
from trainfast_tui.text.memory_words import phase_words
from trainfast_tui.text.result_words import figure_rows, headline, result_notes
from trainfast_tui.text.search_words import outcome_of, role_of, warm_words

PLAIN_EVERY_S = 5.0
"""Seconds between two lines of progress when stderr is not a terminal."""
SLOW_S = 1.0
"""Seconds after which work shows its progress."""


def progress_when_slow(text: str, *, on_any_stream: bool = False) -> closing[SlowProgress]:
    """Show `text` on a terminal once the block has taken over a second.

    With `on_any_stream` streams other than a terminal get a line as well, every 5 s at most.
    """
    return closing(SlowProgress(text, on_any_stream=on_any_stream))


class SlowProgress:
    """The progress of something that has taken over a second."""

    def __init__(self, text: str, *, on_any_stream: bool) -> None:
        self._progress = Progress()
        self._text = text
        self._due_s = time.monotonic() + SLOW_S
        self._timer: threading.Timer | None = None
        if on_any_stream or self._progress.redraws:
            self._timer = threading.Timer(SLOW_S, self._paint)
            self._timer.daemon = True
            self._timer.start()

    def update(self, text: str, fraction: float | None = None) -> None:
        """Replace the text; on a terminal with a bar before it if the `fraction` done is known."""
        bar = f"{progress_bar(fraction)} " if fraction is not None and self._progress.redraws else ""
        self._text = bar + text
        self._wait_for_first_paint()
        if self._is_due:
            self._paint()

    def print_above(self, print_rows: Callable[[], None]) -> None:
        """Take the bar away, call `print_rows`, which prints on stdout, and show the bar again."""
        self._wait_for_first_paint()
        self._progress.close()
        print_rows()
        sys.stdout.flush()
        if self._progress.redraws and self._is_due:
            self._paint()

    def close(self) -> None:
        """Stop the timer and take the line away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self._progress.close()

    @property
    def _is_due(self) -> bool:
        """True once the time is over after which the line is shown."""
        return self._timer is not None and time.monotonic() >= self._due_s

    def _wait_for_first_paint(self) -> None:
        """Wait until the timer's thread, which is due, has painted."""
        if self._timer is not None and self._is_due:
            self._timer.join()

    def _paint(self) -> None:
        self._progress.show_activity(self._text)


class Progress:
    """Shows the progress of one thing on stderr; call `close` before printing anything else there."""

    def __init__(self, printed: str = "") -> None:
        """`printed` is a status that was printed before, and is not repeated."""
        self.redraws = can_redraw(sys.stderr)
        """True if stderr is a terminal that can redraw a line."""
        self._last = printed
        self._last_state = ""
        self._notices: set[int] = set()
        self._printed_at_s = float("-inf")

    def show_run(self, snapshot: RunSnapshot) -> None:
        """Show a live run: a bar, or without a terminal a line when the phase changed or 5 s have passed."""
        if snapshot.result is not None:
            return
        for event in snapshot.events:
            if event.kind == "no_step" and event.t_ns not in self._notices:
                self._notices.add(event.t_ns)
                self.print_line(event.detail or "")
        if self.redraws:
            self._paint(status_line(snapshot, with_bar=True))
            return
        state = f"{snapshot.state} {'' if snapshot.steps else snapshot.phase}"
        now_s = time.monotonic()
        if state != self._last_state or now_s - self._printed_at_s >= PLAIN_EVERY_S:
            self._last_state, self._printed_at_s = state, now_s
            text = status_line(snapshot)
            if text != self._last:
                self._last = text
                print_notice(text)

    def print_line(self, text: str) -> None:
        """Print a line in place of the bar."""
        self.close()
        print_notice(text)

    def show_activity(self, text: str) -> None:
        """Show the work or the wait under way, elsewhere than on a terminal at most every 5 s."""
        if self.redraws:
            self._paint(text)
        elif time.monotonic() - self._printed_at_s >= PLAIN_EVERY_S:
            self._printed_at_s = time.monotonic()
            print_notice(text)

    def close(self) -> None:
        """Take the bar away."""
        if self.redraws and self._last:
            write_to_stderr("", begin="\r\x1b[K")
            self._last = ""

    def _paint(self, text: str) -> None:
        text = fmt.plain(text, (terminal_width(sys.stderr) or USUAL_COLUMNS) - 1)
        if text != self._last:
            self._last = text
            write_to_stderr(text, begin="\r", end="\x1b[K")


def status_line(snapshot: RunSnapshot, *, with_bar: bool = False) -> str:
    """Return state, step n of N, throughput, step time, loss, peak memory and time left.

    `with_bar` adds a bar of the steps that are done.
    """
    parts = [_state_words(snapshot)]
    if snapshot.tried:
        parts.append(warm_words(snapshot.run_file.role if snapshot.run_file else None, batch_sizes(snapshot.tried)))
        return "  ".join(parts)
    total = planned_steps(snapshot)
    if snapshot.steps:
        steps_done = snapshot.steps[-1].step
        bar = f" {progress_bar(steps_done / total)}" if with_bar and total else ""
        parts[0] += f" {steps_done:,}/{total:,}{bar}" if total else f" step {steps_done:,}"
        parts += _figures(snapshot)
    elif snapshot.phase and snapshot.stop_deadline_ns is None:
        parts.append(start_words(snapshot.phase, snapshot.detail))
    return "  ".join(part for part in parts if part)


def live_record(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return a live run's figures so far for `--json`; absent readings are null."""
    run, last = snapshot.run_file, snapshot.steps[-1] if snapshot.steps else None
    figures = run_figures(snapshot)
    return {
        "schema": SCHEMA,
        "run_id": snapshot.run_id,
        "state": snapshot.state,
        "reason": snapshot.reason,
        "supervised": snapshot.supervised,
        "preset": run.preset if run else None,
        "variant": run.variant if run else None,
        "knobs": run.knobs if run else {},
        "synthetic_data": snapshot.synthetic,
        "phase": snapshot.phase or None,
        "step": last.step if last else 0,
        "total_steps": planned_steps(snapshot),
        "loss": last.loss if last else None,
        "step_ms": last.step_ms if last else None,
        "samples_per_s": None if figures.warming_up else figures.samples_per_s,
        "peak_allocated_bytes": snapshot.peak_allocated_bytes,
        "still_warming": snapshot.steady.still_warming,
        "diagnosis": snapshot.diagnosis,
        "run_dir": str(snapshot.directory),
    }


def _state_words(snapshot: RunSnapshot) -> str:
    is_unsupervised = not snapshot.supervised and snapshot.state != "starting"
    host = other_host(snapshot.run_file)
    words = state_text(snapshot.state) + (f" on host {host}" if host else " (unsupervised)" if is_unsupervised else "")
    if snapshot.stop_deadline_ns is not None:
        left_s = max(0.0, (snapshot.stop_deadline_ns - time.monotonic_ns()) / 1e9)
        words += f", SIGKILL in {left_s:.0f} s"
    return words


def _figures(snapshot: RunSnapshot) -> list[str]:
    figures = run_figures(snapshot)
    parts = []
    if figures.warming_up:
        parts.append(figures.basis)
    elif figures.samples_per_s is not None:
        parts += [fmt.per_second(figures.samples_per_s, "samples"), fmt.milliseconds(figures.step_ms)]
    loss = next((step.loss for step in reversed(snapshot.steps) if step.loss is not None), None)
    if loss is not None:
        parts.append(f"loss {number(loss)}")
    if snapshot.peak_allocated_bytes is not None:
        parts.append(f"peak {fmt.size(snapshot.peak_allocated_bytes)}")
    left_s = None if figures.warming_up else seconds_left(snapshot)
    if left_s is not None:
        parts.append(f"{fmt.duration(left_s)} left")
    return parts


TICK_S = 2.0
"""Seconds between two lines about the step of a search that goes on."""
COMMON_WORDS: dict[type, str] = {Paused: "paused", Resumed: "resumed"}
"""Words for the lines that both kinds of search write."""
LineT = TypeVar("LineT")
EndT = TypeVar("EndT")


class Told(NamedTuple):
    """The words of one journal line for a person, and what it begins."""

    words: str = ""
    """Empty if nothing is printed."""
    work: str | None = None
    """The work that begins, empty if none does; None if the line begins and ends nothing."""
    counted_run_id: str | None = None
    """The run that the line starts and whose steps are counted; a warm process tries many, so its steps are not."""


class JournalPrinter(ABC, Generic[LineT]):
    """Prints the journal of one kind of search."""

    def __init__(self, progress: Progress, home: Home) -> None:
        self._progress, self._home = progress, home
        self._work = "starting"
        """The work or wait under way; empty if there is none."""
        self._work_began_s = time.monotonic()
        self._printed_at_s = self._work_began_s
        """The time at which the work began or was shown last."""
        self._step_work = ""
        """The work of the newest step, which goes on after a wait for another run."""
        self._steps: Tail[Step] | None = None
        self._step = 0

    @abstractmethod
    def tell(self, line: LineT) -> Told:
        """Return what a line of this kind of search tells."""

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
        told = self.tell(line)
        if words := COMMON_WORDS.get(type(line)) or told.words:
            self._progress.print_line(words)
        if isinstance(line, Waiting):
            self._begin(f"waiting for {line.run_id} to end")
        elif isinstance(line, Paused):
            # A pause comes between two steps.
            self._step_work = ""
            self._begin("")
        elif isinstance(line, Resumed):
            self._begin(self._step_work)
        elif told.work is not None:
            self._step_work = told.work
            self._begin(told.work)
        elif told.counted_run_id is not None:
            self._steps = Tail(rank_file(self._home.directory(told.counted_run_id), "steps", 0), Step)

    def tick(self) -> None:
        """Show the time of the work under way, and the steps of a run that is followed; once in two seconds."""
        now_s = time.monotonic()
        if not self._work or now_s - self._printed_at_s < TICK_S:
            return
        self._printed_at_s = now_s
        if self._steps is not None:
            self._step = max((step.step for step in self._steps.new()), default=self._step)
        steps = f", {counted(self._step, 'step')}" if self._step else ""
        self._progress.show_activity(
            f"{self._work}… {fmt.duration(int(now_s - self._work_began_s))}{steps}{self.progress_words()}"
        )

    def progress_words(self) -> str:
        """Return words on the search as a whole that follow the work under way; empty without any."""
        return ""

    def _begin(self, work: str) -> None:
        """Begin a task and its clock; with an empty text the last line stays."""
        self._work = work
        self._work_began_s = self._printed_at_s = time.monotonic()
        self._steps, self._step = None, 0


def print_earlier_search(progress: Progress, home: Home, directory: Path, trial_words: str) -> None:
    """Print that a search continues, or that a new one begins because a file of its command was edited.

    `trial_words` names the trials that the search continues with; empty for a new search.
    """
    if trial_words:
        progress.print_line(f"continuing {directory.name}, {trial_words}; --fresh starts over")
    elif (search_before := search_before_edit(home, directory)) is not None:
        progress.print_line(f"a file of the command was edited since {search_before.name}: a new search begins")


class BatchPrinter(JournalPrinter[BatchLine]):
    """Prints the journal of a batch search."""

    def tell(self, line: BatchLine) -> Told:
        match line:
            case Predicted(max_batch=None):
                return Told(line.reason)
            case Predicted(max_batch=0):
                return Told(f"predicted: not even 1 fits ({line.basis})")
            case Predicted():
                return Told(f"predicted: up to {line.max_batch:,} ({line.basis})")
            case BatchStep(action="end"):
                return Told(work="")
            case BatchStep():
                batch, confirms = count(line.batch_size), line.action == CONFIRM_STEP
                words = f"{'confirm' if confirms else line.action} {batch}: {line.why}"
                return Told(words, work=f"{'confirming' if confirms else 'trying'} {batch}")
            case BatchLaunched():
                return Told(counted_run_id=line.run_id if line.role == CONFIRMATION else None)
            case Probe(outcome="fits"):
                rate = fmt.per_second(line.samples_per_s, "samples")
                peak = fmt.size(line.peak_allocated_bytes)
                return Told(f"  {line.batch_size:,} fits: peak {peak}, {fmt.milliseconds(line.step_ms)} a step, {rate}")
            case Probe():
                phase = f" in {phase_words(line.phase)}" if line.phase else ""
                verb = outcome_of(line.outcome).verb
                return Told(f"  {line.batch_size:,} {verb}{phase}: {fmt.with_sizes(line.reason)}")
            case ConfirmationRun():
                sizes = " and ".join(f"{batch:,}" for batch in line.refutes)
                refuted_words = f", which refutes that {sizes} fitted" if sizes else ""
                time_taken = fmt.duration(line.seconds)
                ended = f"{state_text(line.state)} in a fresh process, {time_taken}"
                return Told(f"  {line.batch_size:,} {ended}{refuted_words}: {line.run_id}")
        return Told()


class BestPrinter(JournalPrinter[BestLine]):
    """Prints the journal of a best-fit search; `lines` are those written before."""

    def __init__(self, progress: Progress, home: Home, lines: Sequence[BestLine]) -> None:
        super().__init__(progress, home)
        self._so_far = BestSoFar(tuple(lines))

    def print_question(self, question: BestQuestion) -> None:
        """Print the knobs that are varied and those left alone, with the reasons."""
        for line in question_lines(question.vary, question.left_alone, question.global_batch):
            self._progress.print_line(line)

    def print_line(self, line: BestLine) -> None:
        """Print a line of the journal."""
        self._so_far = BestSoFar((*self._so_far.lines, line))
        super().print_line(line)

    def progress_words(self) -> str:
        """Return the best so far with its interval, the chance of 2 % more, and its price."""
        best = best_words(self._so_far)
        return "".join(
            f"; {words}" for words in (f"best so far {best}" if best else "", chance_words(self._so_far)) if words
        )

    def tell(self, line: BestLine) -> Told:
        match line:
            case Space():
                return Told(self._space_words(line))
            case ProcessReady():
                return Told(f"  process {line.run_id} ready after {fmt.duration(line.start_s)}")
            case BestStep(candidate_number=None):
                return Told(work=doing_words(self._so_far))
            case BestStep():
                knob_words = f" {line.knob} of" if line.knob else ""
                words = f"{role_of(line.action).noun}{knob_words} {self._knobs(line.candidate_number)}: {line.why}"
                return Told(words, work=doing_words(self._so_far))
            case BestLaunched():
                return Told(counted_run_id=line.run_id if line.role != TRIAL else None)
            case Trial():
                return Told(f"  {self._outcome(line)}")
            case ColdRun():
                return Told(f"  {self._outcome(line)}: {line.run_id}")
            case Instruction():
                return Told(f"your instruction: {instruction_words(line, self._so_far.space)}")
        return Told()

    @staticmethod
    def _space_words(space: Space) -> str:
        excluded_as = [candidate.excluded_as for candidate in space.candidates]
        counts = {name: excluded_as.count(name) for name in ("incompatible", "too_large")}
        ruled_out = "".join(f", {count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
        dropped_words = f"; another global batch: {counted(space.dropped, 'combination')}" if space.dropped else ""
        return f"{counted(len(space.candidates), 'setting')}{ruled_out}{dropped_words}"

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

    def _knobs(self, number: int | None) -> str:
        if number is None or self._so_far.space is None:
            return "the baseline"
        return typed_knobs(self._so_far.candidates[number].knobs)


def print_result(result: Result, as_json: bool) -> int:
    """Print a result for a person or a program and return its exit code."""
    if as_json:
        print_json(result)
    else:
        print_lines(summary_lines(result))
    return exit_code_of(result.state)


def summary_lines(result: Result) -> list[str]:
    """Return the whole summary in lines of text."""
    return [*figure_lines(result), *oom_lines(result)]


def figure_lines(result: Result) -> list[str]:
    """Return the verdict, the figures, notes and bottlenecks in lines of text."""
    lines = [
        headline(result),
        *fmt.pair_lines(figure_rows(result)),
        *(f"note: {note}" for note in result_notes(result)),
    ]
    for index, diagnosis in enumerate(result.diagnosis):
        lines += [f"{'also' if index else 'bottleneck'}: {diagnosis.line}", f"  try: {diagnosis.advice}"]
    return lines


def oom_lines(result: Result) -> list[str]:
    """Return the explanation of an out-of-memory error and the changes that would fit; empty for another end."""
    explained = result.oom
    if explained is None or result.state != "oom":
        return []
    lines = list(memory_words.oom_sentences(explained))
    if explained.changes:
        lines.append(f"to make it fit, {memory_words.changes_title(explained.changes)}")
        lines += fmt.pair_lines(
            (f"  {memory_words.change_options(change)}", memory_words.effect_words(change))
            for change in explained.changes
        )
    return lines
