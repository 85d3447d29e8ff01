"""Messages that the session's threads post to the app: frozen, named in the past tense."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from trainfast_tui.live.snapshot import SearchKind

if TYPE_CHECKING:
    from trainfast_runner.errors import UserError
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.records.result import OomExplanation, Result
    from trainfast_runner.search.advice import Situation
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.next_run.sources import NextRunMemory, NextRunSpeed

Severity = Literal["information", "warning", "error"]


class Message(msgspec.Struct, frozen=True):
    """The base of all messages: those below, which the session takes in, and those of one screen, beside their code."""


class SnapshotTaken(Message, frozen=True):
    """The reader has looked again; a newer snapshot replaces one that still waits."""

    snapshot: Snapshot
    posted_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    """CLOCK_MONOTONIC."""


class MachineSeen(Message, frozen=True):
    """The devices that a run could use are known."""

    machine: Machine


class SituationGathered(Message, frozen=True):
    """The advisor's facts about the next run's model are known."""

    key: tuple[str, str]
    """The request that this answers: the name of the preset, and its model."""
    situation: Situation


class NextRunPredicted(Message, frozen=True):
    """The next run's memory and speed were predicted, or the reasons why not are known."""

    memory: NextRunMemory
    speed: NextRunSpeed | None = None


class RunStarted(Message, frozen=True):
    """A run's supervisor holds its lock."""

    directory: Path


class RunRefused(Message, frozen=True):
    """The next run cannot be started as it is."""

    error: UserError


class OomExplained(Message, frozen=True):
    """More is known about why a run ran out of memory."""

    run_id: str
    explanation: OomExplanation
    traces_left: int
    """The number of changes that are still to be traced."""


class SearchStarted(Message, frozen=True):
    """A search's conductor holds its lock."""

    directory: Path
    kind: SearchKind


class SearchRefused(Message, frozen=True):
    """The search cannot be started with these knobs."""

    error: UserError
    kind: SearchKind


class RunsCompared(Message, frozen=True):
    """Two ended runs are to be shown side by side, with the earlier pairs of the same settings run in turn."""

    a: Result
    b: Result
    earlier: tuple[tuple[Result, Result], ...] = ()


class Notified(Message, frozen=True):
    """A line for the status line."""

    text: str
    severity: Severity = "information"
    except_on: str = ""
    """The scope of the screen that shows the same by itself."""


class Changes(msgspec.Struct, frozen=True):
    """Changes of the session that the app repaints."""

    next_run: bool = False
    """True if the next run has other settings."""
    knob: str = ""
    """The knob that the cursor goes to; empty to leave the cursor where it is."""
    notices: tuple[Notified, ...] = ()
    refusal: UserError | None = None
    """Why a knob cannot have a value, or why a preset cannot be loaded."""


class TerminalLost(Message, frozen=True):
    """The terminal was closed, or its connection is gone."""


class ThreadFailed(Message, frozen=True):
    """Our own code failed in a thread; the app raises the error where it is seen."""

    error: BaseException


Post = Callable[[Message], object]
"""Accepts a message, from any thread."""
TrainingPython = str | None
"""The path of the training Python; None for the Python of the app."""
