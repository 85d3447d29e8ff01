"""Progress on stderr: a bar that redraws itself on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TextIO

from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.warm_process import batch_sizes
from trainfast_runner.running.follower import RunSnapshot
from trainfast_tui.cli.output import encodable
from trainfast_tui.live.figures import planned_steps, recent_figures, seconds_left
from trainfast_tui.text.batch_search import warm_words
from trainfast_tui.text.format import duration, milliseconds, number, per_second, plain, size, truncate
from trainfast_tui.text.phases import STARTING

BAR_CELLS = 20
PLAIN_EVERY_S = 5.0
SLOW_S = 1.0


def progress_when_slow(text: str, everywhere: bool = False) -> closing[Slow]:
    """Show `text` on a terminal once the block has taken over a second.

    With `everywhere` other streams get a line as well, every 5 s at most.
    """
    return closing(Slow(text, everywhere))


class Slow:
    """The progress of something that has taken over a second."""

    def __init__(self, text: str, everywhere: bool) -> None:
        self._progress = Progress()
        self._text = text
        self._due = time.monotonic() + SLOW_S
        self._timer: threading.Timer | None = None
        if everywhere or self._progress.is_live:
            self._timer = threading.Timer(SLOW_S, self._paint)
            self._timer.daemon = True
            self._timer.start()

    def update(self, text: str, fraction: float | None = None) -> None:
        """Show this text instead; on a terminal behind a bar if the `fraction` done is known."""
        bar = f"{_bar(fraction)} " if fraction is not None and self._progress.is_live else ""
        self._text = bar + text
        if self._has_begun():
            self._paint()

    def print(self, line: Callable[[], None]) -> None:
        """Call `line`, which prints on stdout, with the bar out of its way."""
        self._has_begun()
        self._progress.close()
        line()
        sys.stdout.flush()
        if self._progress.is_live and self._has_begun():
            self._paint()

    def close(self) -> None:
        """Take the line away for good."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self._progress.close()

    def _has_begun(self) -> bool:
        """True once a second is over and the timer has painted."""
        if self._timer is None or time.monotonic() < self._due:
            return False
        self._timer.join()
        return True

    def _paint(self) -> None:
        self._progress.waiting(self._text)


class Progress:
    """Shows progress on stderr; call `close` before printing anything else there."""

    def __init__(self, stream: TextIO | None = None, printed: str = "") -> None:
        """`printed` is a status that was printed before, and is not repeated."""
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._last = printed
        self._last_state = ""
        self._notices: set[int] = set()
        self._printed_at = float("-inf")

    @property
    def is_live(self) -> bool:
        """True if stderr is a terminal that can redraw a line."""
        return self._live

    def show(self, snapshot: RunSnapshot) -> None:
        """Paint a bar, or without a terminal print a line when the phase changed or 5 s have passed."""
        if snapshot.result is not None:
            return
        for event in snapshot.events:
            if event.kind == "no_step" and event.t_ns not in self._notices:
                self._notices.add(event.t_ns)
                self.print_line(plain(event.detail or ""))
        if self._live:
            self._paint(status_line(snapshot, bar=_bar))
            return
        state = f"{snapshot.state} {'' if snapshot.steps else snapshot.phase}"
        now = time.monotonic()
        if state != self._last_state or now - self._printed_at >= PLAIN_EVERY_S:
            self._last_state, self._printed_at = state, now
            text = status_line(snapshot)
            if text != self._last:
                self._last = text
                self._write(text + "\n")

    def print_line(self, text: str) -> None:
        """Print a line in place of the bar."""
        self.close()
        self._write(text + "\n")

    def waiting(self, text: str) -> None:
        """Show what is being waited for; on a terminal in place of the bar."""
        if self._live:
            self._paint(text)
        elif time.monotonic() - self._printed_at >= PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            self._write(text + "\n")

    def close(self) -> None:
        """Take the bar away."""
        if self._live and self._last:
            self._write("\r\x1b[K")
            self._last = ""

    def _paint(self, text: str) -> None:
        try:
            # A terminal of unknown size reports 0.
            width = os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            width = 80
        text = truncate(text, width - 1)
        if text != self._last:
            self._last = text
            self._write(f"\r{text}\x1b[K")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(encodable(text, self._stream.encoding))
            self._stream.flush()
        except OSError:
            pass  # the terminal has gone; the run goes on, and its exit code still counts


def status_line(snapshot: RunSnapshot, bar: Any = None) -> str:
    """Return state, step n of N, throughput, step time, loss, peak memory and time left."""
    parts = [_state_words(snapshot)]
    if snapshot.tried:
        parts.append(warm_words(snapshot.run_file.role if snapshot.run_file else None, batch_sizes(snapshot.tried)))
        return plain("  ".join(parts))
    total = planned_steps(snapshot)
    if snapshot.steps:
        done = snapshot.steps[-1].step
        drawn = f" {bar(done / total)}" if bar and total else ""
        parts[0] += f" {done}/{total}{drawn}" if total else f" step {done}"
        parts += _figures(snapshot)
    elif snapshot.phase and snapshot.stop_deadline_ns is None:
        parts.append(STARTING.get(snapshot.phase, snapshot.phase) + (f": {snapshot.detail}" if snapshot.detail else ""))
    return plain("  ".join(part for part in parts if part))


def live_record(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return a live run's figures so far for `--json`; absent readings are null."""
    run, last = snapshot.run_file, snapshot.steps[-1] if snapshot.steps else None
    figures = recent_figures(snapshot)
    return {
        "schema": SCHEMA,
        "run_id": snapshot.run_id,
        "state": snapshot.state,
        "reason": snapshot.reason,
        "supervised": snapshot.supervised,
        "preset": run.preset if run else None,
        "variant": run.variant if run else None,
        "knobs": run.knobs if run else {},
        "synthetic_data": snapshot.synthetic,
        "phase": snapshot.phase or None,
        "step": last.step if last else 0,
        "total_steps": planned_steps(snapshot),
        "loss": last.loss if last else None,
        "step_ms": last.step_ms if last else None,
        "samples_per_s": None if figures.warming_up else figures.samples_per_s,
        "peak_allocated_bytes": snapshot.peak_allocated_bytes,
        "still_warming": snapshot.steady.still_warming,
        "diagnosis": snapshot.diagnosis,
        "run_dir": str(snapshot.directory),
    }


def _state_words(snapshot: RunSnapshot) -> str:
    alone = not snapshot.supervised and snapshot.state != "starting"
    words = snapshot.state if not alone else f"{snapshot.state} (unsupervised)"
    if snapshot.stop_deadline_ns is not None:
        left_s = max(0.0, (snapshot.stop_deadline_ns - time.monotonic_ns()) / 1e9)
        words += f", SIGKILL in {left_s:.0f} s"
    return words


def _figures(snapshot: RunSnapshot) -> list[str]:
    figures = recent_figures(snapshot)
    found = []
    if figures.warming_up:
        found.append(figures.basis)
    elif figures.samples_per_s is not None:
        found += [per_second(figures.samples_per_s, "samples"), milliseconds(figures.step_ms)]
    loss = next((step.loss for step in reversed(snapshot.steps) if step.loss is not None), None)
    if loss is not None:
        found.append(f"loss {number(loss)}")
    if snapshot.peak_allocated_bytes is not None:
        found.append(f"peak {size(snapshot.peak_allocated_bytes)}")
    left_s = None if figures.warming_up else seconds_left(snapshot)
    if left_s is not None:
        found.append(f"{duration(left_s)} left")
    return found


def _bar(fraction: float) -> str:
    """Return a bar filled to a fraction from 0 to 1."""
    full = round(max(0.0, min(1.0, fraction)) * BAR_CELLS)
    return "█" * full + "░" * (BAR_CELLS - full)
