"""The parts that the journals of both kinds of search share: `searches/SEARCH_ID/journal.jsonl`, one line each.

A search continues from its journal, and a screen shows the journal. Sizes are bytes, times CLOCK_MONOTONIC nanoseconds,
as in a run's records. The lines of one kind are in `batch` and `best`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, cast

import msgspec

from trainfast_runner.records.home import JOURNAL_FILE, LIVE_STATES, PAUSE_FILE, home_error, is_conducted
from trainfast_runner.records.json_lines import Appender, Tail, newest, read_all
from trainfast_runner.records.run_file import SCHEMA, ClockAnchor, RecordedSpec

CANCELLED_REASON = "the same command continues it"
"""The reason of an end that the user asked for; any other reason of `cancelled` is the error that ended the search."""
EndState = Literal["answered", "nothing_fits", "failed", "cancelled"]
"""The `state` of a `SearchEnded`; a journal of another version may have other words."""


class SearchQuestion(RecordedSpec, frozen=True, kw_only=True, tag_field="kind"):
    """The first line of a journal: the question of the search."""

    t_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    schema: int = SCHEMA
    search_id: str = ""
    """Empty until the search has its directory."""
    key: str = ""
    """Equal for two commands that ask the same."""
    device: str = "cpu"
    device_uuids: list[str] = []
    """The GPUs of the whole search; empty on a CPU."""
    limits_bytes: list[int] = []
    """One limit a rank."""
    clock: ClockAnchor = msgspec.field(
        default_factory=lambda: ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns())
    )

    @property
    def is_script(self) -> bool:
        """True if the search is of a user's own script, which has no model here."""
        return not self.model

    @property
    def lowest_limit_bytes(self) -> int | None:
        """The limit of the rank that may take the least; None without limits."""
        return min(self.limits_bytes, default=None)


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The field every line has."""

    t_ns: int = msgspec.field(default_factory=time.monotonic_ns)


class Conducted(Line, frozen=True, kw_only=True, tag="conducted"):
    """A process starts to conduct the search, from its start or from where another stopped."""

    pid: int
    start_ticks: int
    boot_id: str


class Paused(Line, frozen=True, kw_only=True, tag="paused"):
    """The search was paused: it has no process and holds no memory until it is resumed."""


class Waiting(Line, frozen=True, kw_only=True, tag="waiting"):
    """The next process waits until the run `run_id`, which is not the search's, has left the device."""

    run_id: str
    """The run; or the process that launches another one, in words."""


class Launched(Line, frozen=True, kw_only=True, tag="launched"):
    """A run of the search was started; `role` is that of the run."""

    run_id: str
    role: str


class Resumed(Line, frozen=True, kw_only=True, tag="resumed"):
    """The search was resumed after a pause, or after a wait for the device."""


class SearchEnded(Line, frozen=True, kw_only=True):
    """The end of a search."""

    state: str
    """An `EndState`; after `cancelled` the same command continues the search."""
    reason: str = ""
    seconds: float = 0.0
    """Seconds that all conductors worked on the search, without pauses and waits for another run."""


LineT = TypeVar("LineT", bound=Line)
EndedT = TypeVar("EndedT", bound=SearchEnded)


SharedLine = Conducted | Launched | Paused | Waiting | Resumed
"""A line that the journals of both kinds have."""
QuestionT = TypeVar("QuestionT", bound=SearchQuestion)
StepT = TypeVar("StepT", bound=Line)


@dataclass(frozen=True)
class JournalLines(Generic[QuestionT, StepT, EndedT]):
    """The lines of a journal of either kind, oldest first, and the state of its search when they were read.

    `state` is starting, running, pausing (finishing its step first), paused, interrupted (no conductor and no
    recorded end: the same command continues the search), answered, nothing_fits, failed or cancelled.
    """

    LINE_TYPE: ClassVar[Any]
    """The union of the lines that this kind of journal has."""
    KINDS: ClassVar[tuple[Any, Any, Any]]
    """The classes of its question, its steps and its end."""
    lines: tuple[Any, ...] = ()
    directory: Path = Path()
    state: str = "starting"

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Return every readable line, without a half-written last one, and without the state of the search."""
        return cls(tuple(read_all(directory / JOURNAL_FILE, cls.LINE_TYPE)[0]), directory)

    def all_of(self, kind: type[LineT]) -> tuple[LineT, ...]:
        """The lines of this kind, in their order."""
        return tuple(line for line in self.lines if isinstance(line, kind))

    @property
    def is_live(self) -> bool:
        """True if a conductor works on the search."""
        return self.state in LIVE_STATES

    @cached_property
    def is_paused(self) -> bool:
        """True if the conductor waits for a pause to end."""
        changes = (line for line in reversed(self.lines) if isinstance(line, Paused | Resumed | Conducted))
        return isinstance(next(changes, None), Paused)

    @property
    def waits_for(self) -> str | None:
        """The id of the run that the next process waits for to leave the device; None otherwise."""
        last_line = self.lines[-1] if self.lines else None
        return last_line.run_id if isinstance(last_line, Waiting) else None

    @cached_property
    def question(self) -> QuestionT | None:
        """The first line; None while it is unwritten."""
        return cast(QuestionT | None, newest(self.lines, self.KINDS[0]))

    @cached_property
    def newest_step(self) -> StepT | None:
        """The current step and its reason; the last step once the search has ended, None before the first."""
        return cast(StepT | None, newest(self.lines, self.KINDS[1]))

    @cached_property
    def ended(self) -> EndedT | None:
        """The end; None while the search goes on or was continued."""
        last_line = next((line for line in reversed(self.lines) if isinstance(line, SearchEnded | Conducted)), None)
        return cast(EndedT, last_line) if isinstance(last_line, self.KINDS[2]) else None

    def after(self, new_lines: Sequence[object], *, has_conductor: bool) -> Self:
        """Return the journal with these lines added; the same one if neither the lines nor the state changed."""
        journal = replace(self, lines=(*self.lines, *new_lines)) if new_lines else self
        state = journal.state_now(has_conductor=has_conductor)
        return journal if state == journal.state else replace(journal, state=state)

    def state_now(self, *, has_conductor: bool) -> str:
        """Return the state of the search: that of its end, else by its lines and by its lock."""
        if self.ended is not None:
            return self.ended.state
        if not has_conductor:
            return "interrupted" if self.lines else "starting"
        if self.is_paused:
            return "paused"
        if (self.directory / PAUSE_FILE).exists():
            return "pausing"
        return "starting" if self.newest_step is None else "running"


JournalT = TypeVar("JournalT", bound=JournalLines[Any, Any, Any])


class JournalFollower(Generic[JournalT]):
    """Reads the new lines of a journal at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path, kind: type[JournalT]) -> None:
        self.directory = directory
        self._journal = kind((), directory)
        self._tail: Tail[Any] = Tail(directory / JOURNAL_FILE, kind.LINE_TYPE)

    def poll(self) -> JournalT:
        """Return the journal so far: the last one if neither the lines nor the state changed."""
        # The lock is looked at first: a journal read afterwards is at least as new.
        has_conductor = is_conducted(self.directory)
        new_lines: list[Any] = []
        with suppress(OSError):  # unreadable for the moment
            new_lines = self._tail.new()
        self._journal = self._journal.after(new_lines, has_conductor=has_conductor)
        return self._journal


def worked_seconds(lines: Iterable[Any]) -> float:
    """Return the seconds that conductors worked on a search.

    Pauses, waits for other runs, and gaps between conductors do not count.
    """
    total_ns, since_ns, last_ns = 0, None, 0
    for line in lines:
        if isinstance(line, (Conducted, Paused, Waiting)) and since_ns is not None:
            total_ns += (last_ns if isinstance(line, Conducted) else line.t_ns) - since_ns
            since_ns = None
        if isinstance(line, (Conducted, Resumed)):
            since_ns = line.t_ns
        last_ns = line.t_ns
    if since_ns is not None:
        total_ns += last_ns - since_ns
    return total_ns / 1e9


class JournalWriter:
    """The journal of one search of either kind, open for appending by the holder of its lock; or another such file."""

    def __init__(self, directory: Path, name: str = JOURNAL_FILE) -> None:
        """Open the file. Raises UserError when it cannot be written."""
        self.directory = directory
        try:
            _end_cut_line(directory / name)
            self._file = Appender(directory / name)
        except OSError as error:
            raise home_error(directory, error) from None

    def write(self, line: msgspec.Struct) -> None:
        """Append one line; other processes see it on return. Raises UserError when it cannot be written."""
        try:
            self._file.write(line)
        except OSError as error:
            raise home_error(self.directory, error) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _end_cut_line(path: Path) -> None:
    """End a line that a killed conductor left half-written, so that the next one starts its own."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def newest_conducted(directory: Path) -> Conducted | None:
    """Return the last line about a conductor in a journal of either kind; None before the first."""
    lines, _ = read_all(directory / JOURNAL_FILE, Conducted)
    return lines[-1] if lines else None


def first_fields(question: msgspec.Struct, end_line: msgspec.Struct | None) -> dict[str, Any]:
    """Return the first fields of a report, from a journal's first line and its end; `end_line` is None before that."""
    end = {"state": None, "reason": ""} if end_line is None else fields_of(end_line, "state", "reason")
    return {"schema": SCHEMA, **fields_of(question, "search_id"), **end, **fields_of(question, "preset", "variant")}


def fields_of(struct: msgspec.Struct | None, *names: str) -> dict[str, Any]:
    """Return these fields of `struct` by name; every value is None without a struct."""
    return {name: None if struct is None else getattr(struct, name) for name in names}
