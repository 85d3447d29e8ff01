"""Print the journal of a search on stderr as it grows, and the time of the work under way."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.run_records import rank_file
from trainfast_runner.search.journal.lines import CoolingDown, Paused, Resumed, Waiting
from trainfast_tui.cli.follow_run import Signals
from trainfast_tui.cli.progress import Progress
from trainfast_tui.text.cooling import cooling_words
from trainfast_tui.text.format import duration, plain

TICK_S = 2.0
COMMON_WORDS: dict[type, str] = {Paused: "paused", Resumed: "resumed"}
"""Words for the lines that both kinds of search write."""
LineT = TypeVar("LineT")
EndT = TypeVar("EndT")


class JournalPrinter(ABC, Generic[LineT]):
    """Prints the journal of one kind of search."""

    def __init__(self, progress: Progress, home: Home) -> None:
        self._progress, self._home = progress, home
        self._cooling_work = self._paused_work = ""
        """The work that waits for cool GPUs; the work that a pause or another run holds up."""
        self._wait: tuple[CoolingDown, float] | None = None
        """The newest reading of GPUs that are too warm, and when it was printed; None if nothing waits for them."""
        self._steps: Tail[Step] | None = None
        self._step = 0
        self._begin("starting")

    @abstractmethod
    def words(self, line: LineT) -> str:
        """Return a line of the journal in words, empty if it is not to be printed."""

    @abstractmethod
    def doing(self, line: LineT) -> str | None:
        """Return the work that begins with a line, empty if none does; None if the line begins and ends nothing."""

    @abstractmethod
    def run_of(self, line: LineT) -> tuple[str, bool] | None:
        """Return the id of the run that a line starts, and True if its steps are counted; None for any other line."""

    def watch(self, conduct: Callable[..., EndT], signals: Signals) -> EndT:
        """Conduct a search and print each line of its journal; cancel it on Ctrl-C or when the terminal is closed."""

        def is_cancelled() -> bool:
            # Called repeatedly during every wait.
            self.tick()
            return bool(signals.interrupts or signals.hung_up)

        try:
            return conduct(on_line=self.print_line, is_cancelled=is_cancelled)
        finally:
            self._progress.close()

    def print_line(self, line: LineT) -> None:
        """Print a line of the journal."""
        words = COMMON_WORDS.get(type(line)) or self.words(line)
        if words:
            self._progress.print_line(plain(words))
        self._wait = None
        doing = self.doing(line)
        if isinstance(line, CoolingDown):
            self._printed_at_s = time.monotonic()
            self._wait = line, self._printed_at_s
            self._show_wait(line, self._printed_at_s, self._printed_at_s)
            self._doing, self._cooling_work = "", self._doing or self._cooling_work
        elif isinstance(line, Waiting):
            self._paused_work = self._doing
            self._begin(f"waiting for {line.run_id} to end")
        elif isinstance(line, Paused | Resumed):
            self._begin(self._paused_work)
            self._paused_work = ""
        elif doing is not None:
            self._begin(doing)
        if (run := self.run_of(line)) is not None:
            self._doing = self._doing or self._cooling_work
            if run[1]:
                self._steps = Tail(rank_file(self._home.directory(run[0]), "steps", 0), Step)

    def tick(self) -> None:
        """Show the time of the work under way, and the steps of a run that is followed; once in two seconds."""
        now_s = time.monotonic()
        if (not self._doing and self._wait is None) or now_s - self._printed_at_s < TICK_S:
            return
        self._printed_at_s = now_s
        if self._wait is not None:
            self._show_wait(*self._wait, now_s)
            return
        if self._steps is not None:
            self._step = max((step.step for step in self._steps.new()), default=self._step)
        steps = f", {self._step} step{'s' if self._step > 1 else ''}" if self._step else ""
        self._progress.show_activity(f"{self._doing}… {duration(int(now_s - self._began_s))}{steps}{self.so_far()}")

    def so_far(self) -> str:
        """Return words on the search as a whole that follow the work under way; empty without any."""
        return ""

    def _begin(self, doing: str) -> None:
        """Begin a work and its clock; with an empty text the last line stays."""
        self._doing, self._began_s, self._printed_at_s = doing, time.monotonic(), time.monotonic()
        self._steps, self._step = None, 0

    def _show_wait(self, reading: CoolingDown, printed_at_s: float, now_s: float) -> None:
        """Show the wait; the journal has a line only when the temperature changes."""
        waited_s, stuck_s = reading.waited_s + now_s - printed_at_s, reading.stuck_s + now_s - printed_at_s
        self._progress.show_activity(
            cooling_words(reading.device, reading.temperature_c, reading.below_c, waited_s, stuck_s)
        )
