"""Print the journal of a best-fit search as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.records.home import Home
from trainfast_runner.search.best.best_so_far import BestSoFar
from trainfast_runner.search.journal.best import (
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
from trainfast_runner.units import counted
from trainfast_runner.worker.shared.search_roles import TRIAL
from trainfast_tui.cli.printing.journal_printer import JournalPrinter
from trainfast_tui.cli.printing.progress import Progress
from trainfast_tui.text.format import duration, size, with_sizes
from trainfast_tui.text.search.best_figures import objective_words, typed_knobs
from trainfast_tui.text.search.best_question import question_lines
from trainfast_tui.text.search.best_state import best_words, chance_words, doing_words, instruction_words
from trainfast_tui.text.search.outcomes import outcome_of, role_of


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

    def work_begun(self, line: BestLine) -> str | None:
        """Return the setting that is tried or run from this line on."""
        return doing_words(self._so_far) if isinstance(line, BestStep) else None

    def run_to_count(self, line: BestLine) -> str | None:
        """Return a started cold run: a warm process tries many settings, so its steps mean little."""
        return line.run_id if isinstance(line, BestLaunched) and line.role != TRIAL else None

    def progress_words(self) -> str:
        """Return the best so far with its interval, the chance of 2 % more, and its price."""
        best = best_words(self._so_far)
        return "".join(
            f"; {words}" for words in (f"best so far {best}" if best else "", chance_words(self._so_far)) if words
        )

    def words(self, line: BestLine) -> str:
        """Return a line in words."""
        match line:
            case Space():
                return self._space_words(line)
            case ProcessReady():
                return f"  process {line.run_id} ready after {duration(line.start_s)}"
            case BestStep(candidate_number=None):
                return ""
            case BestStep():
                knob_words = f" {line.knob} of" if line.knob else ""
                return f"{role_of(line.action).noun}{knob_words} {self._knobs(line.candidate_number)}: {line.why}"
            case Trial():
                return f"  {self._outcome(line)}"
            case ColdRun():
                return f"  {self._outcome(line)}: {line.run_id}"
            case Instruction():
                return f"your instruction: {instruction_words(line, self._so_far.space)}"
        return ""

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
            return f"fits, peak {size(line.peak_allocated_bytes)}"
        if line.outcome != "measured" or value is None:
            words = outcome_of(line.outcome).verb
            return f"{words}: {with_sizes(line.reason)}" if line.reason else words
        words = objective_words(so_far.objective, so_far.for_steps, value)
        steps = f", {len(line.step_ms)} steps" if isinstance(line, Trial) else ""
        doubt = f" ({line.reason})" if line.reason else ""
        return f"{words}, peak {size(line.peak_allocated_bytes)}{steps}, {duration(line.seconds)}{doubt}"

    def _knobs(self, number: int | None) -> str:
        if number is None or self._so_far.space is None:
            return "the baseline"
        return typed_knobs(self._so_far.candidates[number].knobs)
