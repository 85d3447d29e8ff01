"""Progress on stderr: a bar that redraws itself on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

from trainfast_runner.running.follower import RunSnapshot
from trainfast_tui.cli.printing.output import (
    USUAL_COLUMNS,
    can_redraw,
    print_notice,
    progress_bar,
    terminal_width,
    write_to_stderr,
)
from trainfast_tui.cli.printing.run_status import status_line
from trainfast_tui.text.format import plain

PLAIN_EVERY_S = 5.0
"""Seconds between two lines of progress when stderr is not a terminal."""
SLOW_S = 1.0
"""Seconds after which work shows its progress."""


def progress_when_slow(text: str, *, on_any_stream: bool = False) -> closing[SlowProgress]:
    """Show `text` on a terminal once the block has taken over a second.

    With `on_any_stream` streams other than a terminal get a line as well, every 5 s at most.
    """
    return closing(SlowProgress(text, on_any_stream=on_any_stream))


class SlowProgress:
    """The progress of something that has taken over a second."""

    def __init__(self, text: str, *, on_any_stream: bool) -> None:
        self._progress = Progress()
        self._text = text
        self._due_s = time.monotonic() + SLOW_S
        self._timer: threading.Timer | None = None
        if on_any_stream or self._progress.redraws:
            self._timer = threading.Timer(SLOW_S, self._paint)
            self._timer.daemon = True
            self._timer.start()

    def update(self, text: str, fraction: float | None = None) -> None:
        """Replace the text; on a terminal with a bar before it if the `fraction` done is known."""
        bar = f"{progress_bar(fraction)} " if fraction is not None and self._progress.redraws else ""
        self._text = bar + text
        self._wait_for_first_paint()
        if self._is_due:
            self._paint()

    def print_above(self, print_rows: Callable[[], None]) -> None:
        """Take the bar away, call `print_rows`, which prints on stdout, and show the bar again."""
        self._wait_for_first_paint()
        self._progress.close()
        print_rows()
        sys.stdout.flush()
        if self._progress.redraws and self._is_due:
            self._paint()

    def close(self) -> None:
        """Stop the timer and take the line away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self._progress.close()

    @property
    def _is_due(self) -> bool:
        """True once the time is over after which the line is shown."""
        return self._timer is not None and time.monotonic() >= self._due_s

    def _wait_for_first_paint(self) -> None:
        """Wait until the timer's thread, which is due, has painted."""
        if self._timer is not None and self._is_due:
            self._timer.join()

    def _paint(self) -> None:
        self._progress.show_activity(self._text)


class Progress:
    """Shows the progress of one thing on stderr; call `close` before printing anything else there."""

    def __init__(self, printed: str = "") -> None:
        """`printed` is a status that was printed before, and is not repeated."""
        self.redraws = can_redraw(sys.stderr)
        """True if stderr is a terminal that can redraw a line."""
        self._last = printed
        self._last_state = ""
        self._notices: set[int] = set()
        self._printed_at_s = float("-inf")

    def show_run(self, snapshot: RunSnapshot) -> None:
        """Show a live run: a bar, or without a terminal a line when the phase changed or 5 s have passed."""
        if snapshot.result is not None:
            return
        for event in snapshot.events:
            if event.kind == "no_step" and event.t_ns not in self._notices:
                self._notices.add(event.t_ns)
                self.print_line(event.detail or "")
        if self.redraws:
            self._paint(status_line(snapshot, with_bar=True))
            return
        state = f"{snapshot.state} {'' if snapshot.steps else snapshot.phase}"
        now_s = time.monotonic()
        if state != self._last_state or now_s - self._printed_at_s >= PLAIN_EVERY_S:
            self._last_state, self._printed_at_s = state, now_s
            text = status_line(snapshot)
            if text != self._last:
                self._last = text
                print_notice(text)

    def print_line(self, text: str) -> None:
        """Print a line in place of the bar."""
        self.close()
        print_notice(text)

    def show_activity(self, text: str) -> None:
        """Show the work or the wait under way, elsewhere than on a terminal at most every 5 s."""
        if self.redraws:
            self._paint(text)
        elif time.monotonic() - self._printed_at_s >= PLAIN_EVERY_S:
            self._printed_at_s = time.monotonic()
            print_notice(text)

    def close(self) -> None:
        """Take the bar away."""
        if self.redraws and self._last:
            write_to_stderr("", begin="\r\x1b[K")
            self._last = ""

    def _paint(self, text: str) -> None:
        text = plain(text, (terminal_width(sys.stderr) or USUAL_COLUMNS) - 1)
        if text != self._last:
            self._last = text
            write_to_stderr(text, begin="\r", end="\x1b[K")
