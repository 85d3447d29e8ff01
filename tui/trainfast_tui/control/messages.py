"""Messages that the session's threads post to the app: frozen, named in the past tense."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainfast_tui.live.search_kind import SearchKind

if TYPE_CHECKING:
    from trainfast_runner.errors import UserError
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.records.result import OomExplanation, Result
    from trainfast_runner.search.advice.facts import Situation
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.next_run.memory_and_speed import NextRunMemory, NextRunSpeed

Severity = Literal["information", "warning", "error"]
TrainingPython = str | None
"""Path of the training Python; None for the app's."""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The reader has looked again; a newer snapshot replaces one that still waits."""

    snapshot: Snapshot
    posted_ns: int = field(default_factory=time.monotonic_ns)
    """CLOCK_MONOTONIC."""


@dataclass(frozen=True, slots=True)
class MachineSeen:
    """The devices that a run could use are known."""

    machine: Machine


@dataclass(frozen=True, slots=True)
class SituationGathered:
    """The advisor's facts about the next run's model and its runs so far are known."""

    key: tuple[str, str, str]
    """The request that this answers: name, model and shown run."""
    situation: Situation


@dataclass(frozen=True, slots=True)
class NextRunPredicted:
    """The next run's memory and speed were predicted, or the reasons why not are known."""

    memory: NextRunMemory
    speed: NextRunSpeed | None = None


@dataclass(frozen=True, slots=True)
class DeviceCalibrated:
    """The device's speeds were measured while the machine was idle."""


@dataclass(frozen=True, slots=True)
class NextRunChanged:
    """The next run has other knobs; the cursor goes to `knob`, where one is named."""

    knob: str = ""


@dataclass(frozen=True, slots=True)
class NextRunRefused:
    """A knob cannot have this value, or a preset cannot be loaded."""

    error: UserError


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run's supervisor holds its lock."""

    directory: Path


@dataclass(frozen=True, slots=True)
class RunRefused:
    """The next run cannot be started as it is."""

    error: UserError


@dataclass(frozen=True, slots=True)
class RunGivenUp:
    """A run that waited for its GPUs to cool was given up; `text` says so."""

    text: str


@dataclass(frozen=True, slots=True)
class OomExplained:
    """More is known about why a run ran out of memory; `traces_left` traces remain."""

    run_id: str
    explanation: OomExplanation
    traces_left: int


@dataclass(frozen=True, slots=True)
class SearchStarted:
    """A search's conductor holds its lock."""

    directory: Path
    kind: SearchKind


@dataclass(frozen=True, slots=True)
class SearchRefused:
    """The search cannot be started with these knobs."""

    error: UserError
    kind: SearchKind


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """The followed search has ended; `words` say how."""

    words: str
    kind: SearchKind


@dataclass(frozen=True, slots=True)
class RunsCompared:
    """Two ended runs are to be shown side by side."""

    a: Result
    b: Result


@dataclass(frozen=True, slots=True)
class Notified:
    """A line for the status line."""

    text: str
    severity: Severity = "information"


@dataclass(frozen=True, slots=True)
class TerminalLost:
    """The terminal was closed, or its connection is gone."""


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """Our own code failed in a thread; the app raises the error where it is seen."""

    error: BaseException


class ScreenMessage:
    """The base of messages that one screen takes in; each is defined beside the code that posts it."""

    __slots__ = ()


Message = (
    SnapshotTaken
    | MachineSeen
    | SituationGathered
    | NextRunPredicted
    | DeviceCalibrated
    | NextRunChanged
    | NextRunRefused
    | RunStarted
    | RunRefused
    | RunGivenUp
    | OomExplained
    | SearchStarted
    | SearchRefused
    | SearchEnded
    | RunsCompared
    | Notified
    | TerminalLost
    | ThreadFailed
    | ScreenMessage
)
Post = Callable[[Message], object]
"""Accepts a message, from any thread."""


def as_warning(error: UserError) -> Notified:
    """Return the notice of an error that concerns no knob."""
    return Notified(error.line(), "warning")
