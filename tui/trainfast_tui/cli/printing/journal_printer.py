"""Print the journal of a search on stderr as it grows, and the time of the work under way."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.run_directory import rank_file
from trainfast_runner.records.run_lines import Step
from trainfast_runner.search.conducting.conductor import SearchCaller
from trainfast_runner.search.journal.lines import Paused, Resumed, Waiting
from trainfast_runner.search.searches import search_before_edit
from trainfast_runner.units import counted
from trainfast_tui.cli.printing.progress import Progress
from trainfast_tui.cli.signals import Signals
from trainfast_tui.text.format import duration

TICK_S = 2.0
"""Seconds between two lines about the step of a search that goes on."""
COMMON_WORDS: dict[type, str] = {Paused: "paused", Resumed: "resumed"}
"""Words for the lines that both kinds of search write."""
LineT = TypeVar("LineT")
EndT = TypeVar("EndT")


class JournalPrinter(ABC, Generic[LineT]):
    """Prints the journal of one kind of search."""

    def __init__(self, progress: Progress, home: Home) -> None:
        self._progress, self._home = progress, home
        self._work = "starting"
        """The work or wait under way; empty if there is none."""
        self._work_began_s = time.monotonic()
        self._printed_at_s = self._work_began_s
        """The time at which the work began or was shown last."""
        self._step_work = ""
        """The work of the newest step, which goes on after a wait for another run."""
        self._steps: Tail[Step] | None = None
        self._step = 0

    @abstractmethod
    def words(self, line: LineT) -> str:
        """Return a line of the journal in words, empty if it is not to be printed."""

    @abstractmethod
    def work_begun(self, line: LineT) -> str | None:
        """Return the work that begins with a line, empty if none does; None if the line begins and ends nothing."""

    @abstractmethod
    def run_to_count(self, line: LineT) -> str | None:
        """Return the run that a line starts and whose steps are counted; None for any other line."""

    def watch(self, conduct: Callable[[SearchCaller[LineT]], EndT], signals: Signals, began_ns: int) -> EndT:
        """Conduct a search and print each line of its journal; cancel it on Ctrl-C or when the terminal is closed.

        The search's time counts from `began_ns` (CLOCK_MONOTONIC).
        """

        def is_cancelled() -> bool:
            # Called repeatedly during every wait.
            self.tick()
            return bool(signals.interrupts or signals.must_leave)

        try:
            return conduct(SearchCaller(self.print_line, is_cancelled, began_ns))
        finally:
            self._progress.close()

    def print_line(self, line: LineT) -> None:
        """Print a line of the journal, and show the work that it begins from now on."""
        words = COMMON_WORDS.get(type(line)) or self.words(line)
        if words:
            self._progress.print_line(words)
        if isinstance(line, Waiting):
            self._begin(f"waiting for {line.run_id} to end")
        elif isinstance(line, Paused):
            # A pause comes between two steps.
            self._step_work = ""
            self._begin("")
        elif isinstance(line, Resumed):
            self._begin(self._step_work)
        elif (work := self.work_begun(line)) is not None:
            self._step_work = work
            self._begin(work)
        elif (run_id := self.run_to_count(line)) is not None:
            self._steps = Tail(rank_file(self._home.directory(run_id), "steps", 0), Step)

    def tick(self) -> None:
        """Show the time of the work under way, and the steps of a run that is followed; once in two seconds."""
        now_s = time.monotonic()
        if not self._work or now_s - self._printed_at_s < TICK_S:
            return
        self._printed_at_s = now_s
        if self._steps is not None:
            self._step = max((step.step for step in self._steps.new()), default=self._step)
        steps = f", {counted(self._step, 'step')}" if self._step else ""
        self._progress.show_activity(
            f"{self._work}… {duration(int(now_s - self._work_began_s))}{steps}{self.progress_words()}"
        )

    def progress_words(self) -> str:
        """Return words on the search as a whole that follow the work under way; empty without any."""
        return ""

    def _begin(self, work: str) -> None:
        """Begin a task and its clock; with an empty text the last line stays."""
        self._work = work
        self._work_began_s = self._printed_at_s = time.monotonic()
        self._steps, self._step = None, 0


def print_earlier_search(progress: Progress, home: Home, directory: Path, trial_words: str) -> None:
    """Print that a search continues, or that a new one begins because a file of its command was edited.

    `trial_words` names the trials that the search continues with; empty for a new search.
    """
    if trial_words:
        progress.print_line(f"continuing {directory.name}, {trial_words}; --fresh starts over")
    elif (search_before := search_before_edit(home, directory)) is not None:
        progress.print_line(f"a file of the command was edited since {search_before.name}: a new search begins")
