"""The narrow strips of the main screen: header, status, footer, log, the welcome and the too-small screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainfast_runner.records.state_words import state_words
from trainfast_tui.charts.painted import Painted
from trainfast_tui.live.figures import planned_steps, recent_figures
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import Command
from trainfast_tui.text.lines import Line, rule, wrap

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot

STATE_SIGNS = {
    "starting": ("○", "secondary"),
    "running": ("●", "success"),
    "stopping": ("●", "warning"),
    "finished": ("✓", "success"),
    "oom": ("✗", "error"),
    "failed": ("✗", "error"),
    "failed_to_start": ("✗", "error"),
    "stopped": ("■", "warning"),
    "killed": ("✗", "warning"),
    "lost": ("✗", "warning"),
}


class Header(Painted):
    """Which run is on the screen and what state it is in."""

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id)
        self._run: RunSnapshot | None = None
        self._looked = False

    def show(self, run: RunSnapshot | None, looked: bool) -> None:
        """`looked`: whether runs have been looked for, so that their absence is known."""
        self._run, self._looked = run, looked
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        line: Line = [("trainfast-tui", "title")]
        run = self._run
        if run is None:
            return [[*line, ("  no run yet" if self._looked else "", "muted")]]
        sign, tone = STATE_SIGNS.get(run.state, ("○", "text"))
        line += [("  ", "text"), (f"{sign} {state_words(run.state)}", tone), (f"  {run.run_id}", "text")]
        if run.synthetic:
            line += [("  ", "text"), (" synthetic data ", "badge")]
        if run.run is not None and width >= 120:
            line += [(f"  {run.run.title}", "muted")]
        return [line]


class StatusLine(Painted):
    """One quiet line: what just happened, or how long a stop still takes."""

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id)
        self._said: tuple[str, str] = ("", "muted")
        self._countdown = ""

    def say(self, text: str, tone: str = "text") -> None:
        """Show this until something else is said."""
        self._said = (text, tone)
        self.repaint()

    def count_down(self, seconds: float | None) -> None:
        """Seconds until SIGKILL; None when no stop is under way."""
        if seconds is None:
            self._countdown = ""
        else:
            self._countdown = f" stopping: SIGKILL in {max(0, round(seconds))} s " if seconds > 0 else " SIGKILL now "
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        if self._countdown:
            return [[(self._countdown, "alarm"), ("  s again kills it at once", "muted")]]
        return [[self._said]]


class Footer(Painted):
    """The keys of the screen, and at the right how far the screen is behind."""

    def __init__(self, commands: Sequence[Command], *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id)
        self._commands = [command for command in commands if command.footer]
        self._useless: frozenset[str] = frozenset()
        self._pace = ""

    def leave_out(self, command_ids: frozenset[str]) -> None:
        """Do not offer these commands, which have nothing to do now."""
        if command_ids != self._useless:
            self._useless = command_ids
            self.repaint()

    def relabel(self, command_id: str, label: str) -> None:
        """Name one of the commands by what it does now."""
        changed = [replace(one, label=label) if one.id == command_id else one for one in self._commands]
        if changed != self._commands:
            self._commands = changed
            self.repaint()

    def show_pace(self, words: str) -> None:
        """What is said about late frames; empty for nothing."""
        if words != self._pace:
            self._pace = words
            self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        room = width - (len(self._pace) + 1 if self._pace else 0)
        shown = [command for command in self._commands if command.id not in self._useless]
        # Help and quit are worth more than the rarer keys of the screen.
        while len(shown) > 2 and sum(map(_length, shown)) - 2 > room:
            droppable = [command for command in shown if command.scope != "everywhere"] or shown
            shown.remove(droppable[-1])
        line: Line = []
        for command in shown:
            line += [("  " if line else "", "muted"), (command.key, "key"), (f" {command.label}", "muted")]
        if self._pace:
            line += [(" " * (room - sum(map(_length, shown)) + 3), "muted"), (self._pace, "warning")]
        return [line]


def _length(command: Command) -> int:
    return len(command.key) + len(command.label) + 3


class LogPane(Painted):
    """The last lines of what the training prints; scrolls back by pages."""

    DEFAULT_CSS = """
    LogPane { height: 40%; display: none; }
    LogPane.-open { display: block; }
    LogPane.-empty { height: 2; }
    """

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id, classes="-empty")
        self._log: tuple[str, ...] = ()
        self._ended = False
        self._back = 0

    def show(self, log: tuple[str, ...], ended: bool) -> None:
        """Show these lines, newest last; of an `ended` run no more will come."""
        if log is not self._log or ended != self._ended:
            self._log, self._ended = log, ended
            self.set_class(not log, "-empty")
            if self.display:
                self.repaint()

    def scroll_pages(self, by: int) -> None:
        """Older lines (-1) or newer ones (1)."""
        page = max(1, self.size.height - 2)
        self._back = max(0, min(self._back - by * page, len(self._log) - page))
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        room = height - 1
        self._back = max(0, min(self._back, len(self._log) - room))
        end = len(self._log) - self._back
        shown = self._log[max(0, end - room) : end]
        title = "log" if not self._back else f"log, {self._back} lines back"
        body: list[Line] = [[(line, "text")] for line in shown]
        nothing = "It printed nothing." if self._ended else "Nothing printed yet."
        return [rule(title, width), *(body or [[(nothing, "muted")]])]


class Welcome(Painted):
    """What to press when there is no run yet."""

    DEFAULT_CSS = """
    Welcome { height: auto; min-height: 11; display: none; }
    Welcome.-shown { display: block; height: 1fr; }
    """

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id)
        self._preset = ""

    def show(self, preset: str) -> None:
        """Name the preset that `r` would run."""
        if preset != self._preset:
            self._preset = preset
            self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        keys = (
            ("r", f"train {self._preset} for a few seconds, and watch it here"),
            ("p", "choose another preset"),
            ("↑ ↓", "pick a knob; its cost in speed and memory is told below it"),
            ("← →", "turn it; Enter types a value"),
            ("?", "every key and every knob"),
            ("q", "leave; a run goes on without this screen"),
        )
        body: list[Line] = [
            [("No run yet.", "title")],
            *(
                [(line, "muted")]
                for line in wrap("A run trains for real, for seconds, and keeps no weights.", width - 2)
            ),
            [],
        ]
        for key, text in keys:
            first, *rest = wrap(text, max(8, width - 9))
            body += [[(f" {key:<5}", "key"), (first, "text")], *([(f"{'':<6}{line}", "text")] for line in rest)]
        return [[] for _ in range(max(0, (height - len(body)) // 3))] + [[("  ", "text"), *line] for line in body]


class TooSmall(Painted):
    """The essentials, for a terminal in which the screen does not fit."""

    DEFAULT_CSS = """
    TooSmall { height: 1fr; display: none; }
    """

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id)
        self._run: RunSnapshot | None = None

    def show(self, run: RunSnapshot | None) -> None:
        """Show the essentials of this run."""
        self._run = run
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        size = self.screen.size
        lines: list[Line] = [[(f"This terminal is {size.width}x{size.height}; the screen needs 80x24.", "warning")]]
        run = self._run
        if run is None:
            return [*lines, [("No run. r starts one, q leaves.", "text")]]
        planned, figures = planned_steps(run), recent_figures(run)
        done = run.steps[-1].step if run.steps else 0
        peak = run.result.memory.peak_allocated_bytes if run.result is not None else run.peak_allocated_bytes
        sign, tone = STATE_SIGNS.get(run.state, ("○", "text"))
        return [
            *lines,
            [(f"{sign} {state_words(run.state)}", tone), (f"  {run.run_id}", "muted")],
            [(f"step {fmt.count(done)} of {fmt.count(planned)}", "title")],
            [(fmt.per_second(figures.samples_per_s, "samples"), "title"), _synthetic(run)],
            [("peak allocated ", "muted"), (fmt.size(peak), "text")],
            [(run.reason, "text")],
        ]


def _synthetic(run: RunSnapshot) -> tuple[str, str]:
    return ("  synthetic data" if run.synthetic else "", "warning")
