"""Print the journal of a batch search as it grows."""

from __future__ import annotations

from trainfast_runner.records.run_states import state_text
from trainfast_runner.search.journal.batch import (
    CONFIRM_STEP,
    BatchLaunched,
    BatchLine,
    BatchStep,
    ConfirmationRun,
    Predicted,
    Probe,
)
from trainfast_runner.worker.shared.search_roles import CONFIRMATION
from trainfast_tui.cli.printing.journal_printer import JournalPrinter
from trainfast_tui.text.format import count, duration, milliseconds, per_second, size, with_sizes
from trainfast_tui.text.memory_words import phase_words
from trainfast_tui.text.search.outcomes import outcome_of


class BatchPrinter(JournalPrinter[BatchLine]):
    """Prints the journal of a batch search."""

    def work_begun(self, line: BatchLine) -> str | None:
        """Return the size that is tried or confirmed from this line on."""
        if not isinstance(line, BatchStep):
            return None
        batch = count(line.batch_size)
        return {CONFIRM_STEP: f"confirming {batch}", "end": ""}.get(line.action, f"trying {batch}")

    def run_to_count(self, line: BatchLine) -> str | None:
        """Return a started confirmation run: a warm process tries many sizes, so its steps mean little."""
        return line.run_id if isinstance(line, BatchLaunched) and line.role == CONFIRMATION else None

    def words(self, line: BatchLine) -> str:
        """Return a line in words."""
        match line:
            case Predicted(max_batch=None):
                return line.reason
            case Predicted(max_batch=0):
                return f"predicted: not even 1 fits ({line.basis})"
            case Predicted():
                return f"predicted: up to {line.max_batch:,} ({line.basis})"
            case BatchStep(action="end"):
                return ""
            case BatchStep():
                return (
                    f"{'confirm' if line.action == CONFIRM_STEP else line.action} {count(line.batch_size)}: {line.why}"
                )
            case Probe(outcome="fits"):
                rate = per_second(line.samples_per_s, "samples")
                peak = size(line.peak_allocated_bytes)
                return f"  {line.batch_size:,} fits: peak {peak}, {milliseconds(line.step_ms)} a step, {rate}"
            case Probe():
                phase = f" in {phase_words(line.phase)}" if line.phase else ""
                return f"  {line.batch_size:,} {outcome_of(line.outcome).verb}{phase}: {with_sizes(line.reason)}"
            case ConfirmationRun():
                sizes = " and ".join(f"{batch:,}" for batch in line.refutes)
                refuted_words = f", which refutes that {sizes} fitted" if sizes else ""
                time_taken = duration(line.seconds)
                ended = f"{state_text(line.state)} in a fresh process, {time_taken}"
                return f"  {line.batch_size:,} {ended}{refuted_words}: {line.run_id}"
        return ""
