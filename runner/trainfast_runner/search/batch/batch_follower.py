"""Follow a search through its journal: a snapshot at each poll, for a screen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.search_directories import JOURNAL_FILE, is_conducted
from trainfast_runner.records.search_states import LIVE_STATES
from trainfast_runner.search.journal.batch import (
    BatchEnded,
    BatchLaunched,
    BatchLine,
    BatchQuestion,
    BatchStep,
    ConfirmationRun,
    Predicted,
    Probe,
)
from trainfast_runner.search.journal.lines import (
    Conducted,
    CoolingDown,
    Paused,
    Resumed,
    Waiting,
    state_of_search,
)
from trainfast_runner.search.journal.memory_lines import MemoryLines


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The state of a search at one moment.

    `state` is starting, running, pausing (it finishes its probe first), paused, interrupted (no conductor and no
    recorded end: the same command continues it), answered, nothing_fits, failed or cancelled.
    """

    directory: Path
    state: str = "starting"
    question: BatchQuestion | None = None
    prediction: Predicted | None = None
    probes: tuple[Probe, ...] = ()
    """Probes in the order they were made, void ones included."""
    confirmations: tuple[ConfirmationRun, ...] = ()
    next: BatchStep | None = None
    """The current step and its reason; the last step once the search has ended."""
    run_id: str | None = None
    """The search's current run; None between runs."""
    since_ns: int | None = None
    """CLOCK_MONOTONIC when the current step or wait began; before the first step, when the conductor did."""
    proof_steps: int | None = None
    """Optimizer steps of a confirmation run."""
    ended: BatchEnded | None = None
    unreadable_lines: int = 0
    is_decided: bool = True
    """False when `next` is done and the step after it is not decided yet."""
    cooling: tuple[CoolingDown, ...] = ()
    """While the next process waits for the GPUs to cool: the first look and the newest; empty otherwise."""
    waits_for: str | None = None
    """The run that the next process waits for to leave the device; None otherwise."""

    @property
    def fits(self) -> tuple[MemoryLines, ...]:
        """The newest fit, one of each rank; empty before the first probe."""
        return tuple(self.next.fits) if self.next is not None else ()

    @property
    def is_live(self) -> bool:
        """True if a conductor works on the search."""
        return self.state in LIVE_STATES


class BatchFollower:
    """Reads new journal lines at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # msgspec decodes a union by its tag; Tail is typed for one struct.
        self._tail: Tail[BatchLine] = Tail(directory / JOURNAL_FILE, BatchLine)  # type: ignore[arg-type]
        self._snapshot = BatchSnapshot(directory)
        self._paused = False

    def poll(self) -> BatchSnapshot:
        """Read the new lines and return a snapshot."""
        # The lock is looked at first: a journal read afterwards is at least as new.
        conducted = is_conducted(self.directory)
        try:
            for line in self._tail.new():
                self._add(line)
        except OSError:
            pass  # unreadable for the moment
        snapshot = self._snapshot
        state = state_of_search(
            self.directory,
            end=None if snapshot.ended is None else snapshot.ended.state,
            is_conducted=conducted,
            is_asked=snapshot.question is not None,
            is_paused=self._paused,
            has_step=snapshot.next is not None,
        )
        return replace(snapshot, state=state, unreadable_lines=self._tail.unreadable)

    def _add(self, line: BatchLine) -> None:
        snapshot = self._snapshot
        if snapshot.cooling and not isinstance(line, CoolingDown):
            # The step itself begins with the line after the wait.
            snapshot = replace(snapshot, since_ns=line.t_ns)
        snapshot = replace(
            snapshot,
            cooling=(*snapshot.cooling[:1], line) if isinstance(line, CoolingDown) else (),
            waits_for=line.run_id if isinstance(line, Waiting) else None,
        )
        match line:
            case BatchQuestion():
                snapshot = replace(snapshot, question=line)
            case Conducted():
                # Continued: an earlier end (cancelled) no longer counts.
                self._paused = False
                snapshot = replace(snapshot, ended=None, run_id=None, since_ns=line.t_ns, proof_steps=line.proof_steps)
            case Predicted():
                snapshot = replace(snapshot, prediction=line)
            case BatchStep():
                snapshot = replace(snapshot, next=line, since_ns=line.t_ns, is_decided=True)
            case BatchLaunched():
                snapshot = replace(snapshot, run_id=line.run_id)
            case Probe():
                snapshot = replace(snapshot, probes=(*snapshot.probes, line), is_decided=False)
            case ConfirmationRun():
                snapshot = replace(snapshot, confirmations=(*snapshot.confirmations, line), is_decided=False)
            case Paused() | Waiting() | Resumed():
                self._paused = isinstance(line, Paused)
                snapshot = replace(snapshot, since_ns=line.t_ns)
            case BatchEnded():
                snapshot = replace(snapshot, ended=line, run_id=None)
        self._snapshot = snapshot
