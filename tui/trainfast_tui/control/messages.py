"""What happened outside the event loop, told to the app. Past tense, frozen content."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from trainfast_runner.errors import UserError
from trainfast_runner.records.result import OomExplanation, Result
from trainfast_tui.control.memory_view import MemoryView
from trainfast_tui.live.snapshot import Snapshot

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.advice.advisor import Situation


class Told(Message):
    """Any of these. From a thread it may come while the app is being left: the screens it is about are gone then."""


class SnapshotTaken(Told):
    """The reader has looked again. Only the newest counts: one that still waits is dropped."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot
        self.posted_ns = time.monotonic_ns()

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, SnapshotTaken)


class MachineSeen(Told):
    """The devices a run could use are known."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine


class SituationSeen(Told):
    """What the advisor has to know about the next run's model and its runs so far."""

    def __init__(self, situation: Situation) -> None:
        super().__init__()
        self.situation = situation


class MemoryForeseen(Told):
    """The next run's memory has been predicted, or why it has not."""

    def __init__(self, view: MemoryView) -> None:
        super().__init__()
        self.view = view


class RunStarted(Told):
    """A run's supervisor holds its lock."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory


class OomExplained(Told):
    """More is known of why a run ran out of memory; `left` models are still to be traced."""

    def __init__(self, run_id: str, explanation: OomExplanation, left: int) -> None:
        super().__init__()
        self.run_id, self.explanation, self.left = run_id, explanation, left


class SearchStarted(Told):
    """A search's conductor holds its lock."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory


class SearchRefused(Told):
    """The search cannot be started as the knobs are; `problem` says why in one line."""

    def __init__(self, problem: UserError) -> None:
        super().__init__()
        self.problem = problem


class Refused(Told):
    """The next run cannot be started as it is; `problem` says why in one line."""

    def __init__(self, problem: UserError) -> None:
        super().__init__()
        self.problem = problem


class Said(Told):
    """A line for the status line."""

    def __init__(self, text: str, tone: str = "text") -> None:
        super().__init__()
        self.text, self.tone = text, tone


def said_no(problem: UserError) -> Said:
    """A refusal that is about no knob."""
    return Said(problem.line(), "warning")


class TerminalLost(Told):
    """Nobody is at the other end of the terminal any more."""


class Broke(Told):
    """Our own code failed in a background thread; the app raises it where it is seen."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Compared(Told):
    """Two ended runs, to be put side by side."""

    def __init__(self, a: Result, b: Result) -> None:
        super().__init__()
        self.a, self.b = a, b
