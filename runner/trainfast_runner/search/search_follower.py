"""Follow a search through its journal: a snapshot at each poll, for a screen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.search_directories import JOURNAL_FILE, is_conducted
from trainfast_runner.search.fit import MemoryLines
from trainfast_runner.search.journal import (
    PAUSE_FILE,
    AnyLine,
    Asked,
    Conducted,
    ConfirmationRun,
    CoolingDown,
    Ended,
    Launched,
    Next,
    Paused,
    Predicted,
    Probe,
    Resumed,
)


@dataclass(frozen=True, slots=True)
class SearchSnapshot:
    """The state of a search at one moment.

    `state` is starting, running, pausing (it finishes its probe first), paused, interrupted (no conductor and no
    recorded end: the same command continues it), answered, nothing_fits, failed or cancelled.
    """

    directory: Path
    state: str
    asked: Asked | None
    prediction: Predicted | None
    probes: tuple[Probe, ...]
    """Probes in the order they were made, void ones included."""
    confirmations: tuple[ConfirmationRun, ...]
    next: Next | None
    """The current step and its reason; the last step once the search has ended."""
    run_id: str | None
    """The search's current run; None between runs."""
    since_ns: int | None
    """CLOCK_MONOTONIC when the current step began; before the first step, when the conductor did."""
    proof_steps: int | None
    """Optimizer steps of a confirmation run."""
    ended: Ended | None
    unreadable_lines: int
    is_decided: bool = True
    """False when `next` is done and the step after it is not decided yet."""
    cooling: tuple[CoolingDown, ...] = ()
    """While the next process waits for the GPUs to cool: the first look and the newest; empty otherwise."""

    @property
    def fits(self) -> tuple[MemoryLines, ...]:
        """The newest fit, one of each rank; empty before the first probe."""
        return tuple(self.next.fits) if self.next is not None else ()

    @property
    def is_live(self) -> bool:
        """True if a conductor works on the search."""
        return self.state in ("starting", "running", "pausing", "paused")


class SearchFollower:
    """Reads new journal lines at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # msgspec decodes a union by its tag; Tail is typed for one struct.
        self._tail: Tail[AnyLine] = Tail(directory / JOURNAL_FILE, AnyLine)  # type: ignore[arg-type]
        self._asked: Asked | None = None
        self._prediction: Predicted | None = None
        self._probes: list[Probe] = []
        self._confirmations: list[ConfirmationRun] = []
        self._next: Next | None = None
        self._is_decided = True
        self._run_id: str | None = None
        self._ended: Ended | None = None
        self._paused = False
        self._cooling: tuple[CoolingDown, ...] = ()
        self._since_ns: int | None = None
        self._proof_steps: int | None = None

    def poll(self) -> SearchSnapshot:
        """Read the new lines and return a snapshot."""
        # The lock is looked at first: a journal read afterwards is at least as new.
        conducted = is_conducted(self.directory)
        try:
            for line in self._tail.new():
                self._take(line)
        except OSError:
            pass  # unreadable for the moment
        return SearchSnapshot(
            directory=self.directory,
            state=self._state(conducted),
            asked=self._asked,
            prediction=self._prediction,
            probes=tuple(self._probes),
            confirmations=tuple(self._confirmations),
            next=self._next,
            run_id=self._run_id,
            since_ns=self._since_ns,
            proof_steps=self._proof_steps,
            ended=self._ended,
            unreadable_lines=self._tail.unreadable,
            is_decided=self._is_decided,
            cooling=self._cooling,
        )

    def _state(self, conducted: bool) -> str:
        if self._ended is not None:
            return self._ended.state
        if not conducted:
            return "interrupted" if self._asked is not None else "starting"
        if self._paused:
            return "paused"
        if (self.directory / PAUSE_FILE).exists():
            return "pausing"
        return "running" if self._next is not None else "starting"

    def _take(self, line: AnyLine) -> None:
        self._cooling = (*self._cooling[:1], line) if isinstance(line, CoolingDown) else ()
        match line:
            case Asked():
                self._asked = line
            case Conducted():
                # Continued: an earlier end (cancelled) no longer counts.
                self._ended, self._paused, self._run_id = None, False, None
                self._since_ns, self._proof_steps = line.t_ns, line.proof_steps
            case Predicted():
                self._prediction = line
            case Next():
                self._next, self._since_ns, self._is_decided = line, line.t_ns, True
            case Launched():
                self._run_id = line.run_id
            case Probe():
                self._probes.append(line)
                self._is_decided = False
            case ConfirmationRun():
                self._confirmations.append(line)
                self._is_decided = False
            case Paused():
                self._paused = True
            case Resumed():
                self._paused = False
            case Ended():
                self._ended, self._run_id = line, None
