"""Print the journal of a best-fit search as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfast_tui.cli.journal_printer import JournalPrinter

if TYPE_CHECKING:
    from trainfast_runner.records.home import Home
    from trainfast_runner.search.best.journal import BestLine, BestQuestion, Chosen, Space
    from trainfast_tui.cli.progress import Progress


class BestPrinter(JournalPrinter["BestLine"]):
    """Prints the journal of a best-fit search; `lines` are those written before."""

    def __init__(self, progress: Progress, home: Home, lines: Sequence[BestLine]) -> None:
        from trainfast_runner.search.best.journal import Space

        super().__init__(progress, home)
        self._space: Space | None = next((line for line in reversed(lines) if isinstance(line, Space)), None)
        self._chosen: Chosen | None = None

    def print_question(self, question: BestQuestion) -> None:
        """Print what is varied and what is left alone."""
        from trainfast_tui.text.best_search import question_lines
        from trainfast_tui.text.format import plain

        for line in question_lines(question.vary, question.left_alone, question.global_batch):
            self._progress.print_line(plain(line))

    def doing(self, line: BestLine) -> str | None:
        """Return the setting that is tried or run from this line on."""
        from trainfast_runner.search.best.journal import Chosen

        if not isinstance(line, Chosen):
            return None
        self._chosen = line
        words = {"trial": "trying", "race": "racing", "confirm": "confirming", "limit": "running under memory_limit"}
        return "" if line.candidate is None else f"{words.get(line.action, 'running')} {self._knobs(line.candidate)}"

    def run_of(self, line: BestLine) -> tuple[str, bool] | None:
        """Return a started run; the steps of a cold run are counted."""
        from trainfast_runner.records.run_file import TRIAL
        from trainfast_runner.search.best.journal import LaunchedBest

        return (line.run_id, line.role != TRIAL) if isinstance(line, LaunchedBest) else None

    def so_far(self) -> str:
        """Return the best so far with its interval, the chance of 2 % more, and its price."""
        from trainfast_tui.text.best_search import rate_words
        from trainfast_tui.text.format import duration

        line = self._chosen
        if line is None or line.leader is None or line.rate is None:
            return ""
        words = f"; best so far {rate_words({'median': line.rate, 'low': line.low, 'high': line.high})}"
        if line.chance is not None and line.price_s is not None and line.action == "trial":
            words += f", {line.chance:.0%} chance of 2 % more for {duration(line.price_s)}"
        return words

    def words(self, line: BestLine) -> str:
        """Return a line in words."""
        from trainfast_runner.search.best import journal
        from trainfast_runner.search.journal import Paused, Resumed
        from trainfast_tui.text.format import duration

        match line:
            case journal.Space():
                self._space = line
                return self._space_words(line)
            case journal.Visited():
                return f"  process {line.run_id} ready after {duration(line.start_s)}"
            case journal.Chosen(candidate=None):
                return ""
            case journal.Chosen():
                about = f" {line.knob} of" if line.knob else ""
                return f"{line.action.replace('_', ' ')}{about} {self._knobs(line.candidate)}: {line.why}"
            case journal.Trial():
                return f"  {self._outcome(line)}"
            case journal.Race():
                return f"  {self._outcome(line)}: {line.run_id}"
            case journal.Ordered():
                value = "" if line.value is None else f"={line.value}"
                return f"as you ordered: {line.do} {line.knob}{value}"
            case Paused():
                return "paused"
            case Resumed():
                return "going on"
        return ""

    @staticmethod
    def _space_words(space: Space) -> str:
        out = [one for one in space.candidates if one.ruled_out is not None]
        counts = {name: sum(one.ruled_out == name for one in out) for name in ("incompatible", "too_large", "bound")}
        ruled_out = "".join(f", {count} {name.replace('_', ' ')}" for name, count in counts.items() if count)
        dropped = f"; {space.dropped} combinations have another global batch" if space.dropped else ""
        return f"{len(space.candidates)} candidates{ruled_out}{dropped}"

    def _outcome(self, line: object) -> str:
        """Words for the outcome of a trial or run."""
        import statistics

        from trainfast_runner.search.best.journal import Race, Trial
        from trainfast_tui.text.format import duration, per_second, size

        assert isinstance(line, Trial | Race)
        rate = line.samples_per_s if isinstance(line, Race) else None
        if isinstance(line, Trial) and line.step_ms:
            rate = 1000 * line.samples_per_step / statistics.median(line.step_ms)
        if line.outcome != "measured" or rate is None:
            known = {"oom": "ran out of memory", "slow": "is too slow", "void": "is void"}
            words = known.get(line.outcome, line.outcome)
            return f"{words}: {line.reason}" if line.reason else words
        steps = f", {len(line.step_ms)} steps" if isinstance(line, Trial) else ""
        doubt = f" ({line.reason})" if line.reason else ""
        peak = size(line.peak_allocated_bytes)
        return f"{per_second(rate, 'samples')}, peak {peak}{steps}, {duration(line.seconds)}{doubt}"

    def _knobs(self, number: int | None) -> str:
        from trainfast_tui.text.best_search import knob_words

        if number is None or self._space is None:
            return "the baseline"
        return knob_words(self._space.candidates[number].knobs)
