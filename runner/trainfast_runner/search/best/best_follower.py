"""Follow a best-fit search through its journal: a snapshot at each poll, for a screen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.search_directories import JOURNAL_FILE, is_conducted
from trainfast_runner.search.best.journal import (
    BestEnded,
    BestLine,
    BestQuestion,
    Candidate,
    Chosen,
    Interval,
    Ordered,
    Race,
    Space,
    Trial,
)
from trainfast_runner.search.best.observed import measurements
from trainfast_runner.search.best.orders import KnobOrder, read_orders
from trainfast_runner.search.conducting import worked_seconds
from trainfast_runner.search.journal import PAUSE_FILE, Conducted, CoolingDown, Paused, Resumed

NORMAL = 1.96
LineT = TypeVar("LineT")


@dataclass(frozen=True)
class BestSoFar:
    """The content of a journal, oldest line first."""

    lines: tuple[BestLine, ...]

    @cached_property
    def question(self) -> BestQuestion | None:
        """The first line; None while it is unwritten."""
        return self._newest(BestQuestion)

    @cached_property
    def space(self) -> Space | None:
        """The candidates; None before they are listed."""
        return self._newest(Space)

    @cached_property
    def ran(self) -> tuple[Trial | Race, ...]:
        """Every trial and every run in a fresh process, void ones included, in their order."""
        return tuple(line for line in self.lines if isinstance(line, Trial | Race))

    @cached_property
    def chosen(self) -> Chosen | None:
        """The newest step and its reason."""
        return self._newest(Chosen)

    @cached_property
    def leading(self) -> Chosen | None:
        """The newest step that names a leader."""
        return next((one for one in reversed(self.lines) if isinstance(one, Chosen) and one.leader is not None), None)

    @cached_property
    def is_under_way(self) -> bool:
        """True while the newest step has no outcome yet."""
        last = next((one for one in reversed(self.lines) if isinstance(one, Chosen | Trial | Race)), None)
        return isinstance(last, Chosen) and last.candidate is not None

    @cached_property
    def ended(self) -> BestEnded | None:
        """The end; None while the search goes on or was continued."""
        last = next((one for one in reversed(self.lines) if isinstance(one, BestEnded | Conducted)), None)
        return last if isinstance(last, BestEnded) else None

    @cached_property
    def is_paused(self) -> bool:
        """True if the conductor waits."""
        last = next((one for one in reversed(self.lines) if isinstance(one, Paused | Resumed | Conducted)), None)
        return isinstance(last, Paused)

    @cached_property
    def cooling(self) -> CoolingDown | None:
        """The newest look at the temperature while the next process waits for cooler GPUs, else None."""
        last = self.lines[-1] if self.lines else None
        return last if isinstance(last, CoolingDown) else None

    @cached_property
    def orders(self) -> tuple[Ordered, ...]:
        """The person's orders that the conductor has taken."""
        return tuple(line for line in self.lines if isinstance(line, Ordered))

    @cached_property
    def since_ns(self) -> int | None:
        """CLOCK_MONOTONIC when the current step began; before the first one, when the conductor did."""
        last = next((one for one in reversed(self.lines) if isinstance(one, Chosen | Conducted)), None)
        return None if last is None else last.t_ns

    @cached_property
    def rates(self) -> Mapping[int, Interval]:
        """Samples/s of each trial by its place in `ran`, with the 95 % interval by its own and the pooled steps."""
        noise = measurements(self.lines)
        found = {}
        for place, line in enumerate(self.ran):
            if isinstance(line, Trial) and line.step_ms and min(line.step_ms) > 0:
                middle = 1000 * line.samples_per_step / statistics.median(line.step_ms)
                wide = math.exp(NORMAL * math.sqrt(noise.variance(line)))
                found[place] = Interval(median=middle, low=middle / wide, high=middle * wide)
        return found

    @cached_property
    def limit_bytes(self) -> int | None:
        """Bytes that a rank may take: `memory_limit`, else the limit that candidates exceed; None if unknown."""
        if self.question is not None and self.question.limits_bytes:
            return min(self.question.limits_bytes)
        limits = (
            one.predicted_bytes - one.excess_bytes
            for one in self.candidates
            if one.predicted_bytes is not None and one.excess_bytes is not None
        )
        return next(limits, None)

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates, by number; empty before they are listed."""
        return self.space.candidates if self.space is not None else []

    def memory_bytes(self, number: int) -> int | None:
        """The highest measured peak of a candidate, else its prediction; None without either."""
        peaks = [
            line.peak_allocated_bytes
            for line in self.ran
            if line.candidate == number and line.peak_allocated_bytes is not None
        ]
        return max(peaks, default=self.candidates[number].predicted_bytes)

    def spent_s(self, now_ns: int | None = None) -> float:
        """Seconds that conductors worked on the search; with `now_ns` (CLOCK_MONOTONIC) until then."""
        if self.ended is not None:
            return self.ended.seconds
        since_last = 0 if now_ns is None or self.is_paused or not self.lines else now_ns - self.lines[-1].t_ns
        return worked_seconds(self.lines) + max(0, since_last) / 1e9

    def _newest(self, kind: type[LineT]) -> LineT | None:
        return next((line for line in reversed(self.lines) if isinstance(line, kind)), None)


@dataclass(frozen=True)
class BestSnapshot:
    """The state of a best-fit search at one moment.

    `state` is starting, running, pausing (it finishes its step first), paused, interrupted (no conductor and no
    recorded end: the same question continues it), answered, nothing_fits, failed or cancelled. `waiting` are orders
    that the conductor has not taken yet.
    """

    directory: Path
    state: str
    so_far: BestSoFar
    waiting: tuple[KnobOrder, ...] = ()

    @property
    def is_live(self) -> bool:
        """True if a conductor works on the search."""
        return self.state in ("starting", "running", "pausing", "paused")


class BestFollower:
    """Reads new journal lines at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # msgspec decodes a union by its tag; Tail is typed for one struct.
        self._tail: Tail[BestLine] = Tail(directory / JOURNAL_FILE, BestLine)  # type: ignore[arg-type]
        self._so_far = BestSoFar(())

    def poll(self) -> BestSnapshot:
        """Read the new lines and return a snapshot."""
        # The lock is looked at first: a journal read afterwards is at least as new.
        conducted = is_conducted(self.directory)
        waiting: list[KnobOrder] = []
        try:
            if new := self._tail.new():
                self._so_far = BestSoFar((*self._so_far.lines, *new))
            waiting = read_orders(self.directory)[len(self._so_far.orders) :]
        except OSError:
            pass  # unreadable for the moment
        return BestSnapshot(self.directory, self._state(conducted), self._so_far, tuple(waiting))

    def _state(self, conducted: bool) -> str:
        so_far = self._so_far
        if so_far.ended is not None:
            return so_far.ended.state
        if not conducted:
            return "interrupted" if so_far.question is not None else "starting"
        if so_far.is_paused:
            return "paused"
        if (self.directory / PAUSE_FILE).exists():
            return "pausing"
        return "running" if so_far.chosen is not None else "starting"
