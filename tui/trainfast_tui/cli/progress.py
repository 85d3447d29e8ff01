"""Progress on stderr: a bar that redraws itself on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import exit_code_of, state_text
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.worker_lines import batch_sizes
from trainfast_runner.running.follower import RunSnapshot
from trainfast_runner.running.present_state import other_host
from trainfast_tui.cli import printing
from trainfast_tui.live.figures import planned_steps, run_figures, seconds_left
from trainfast_tui.text import format as fmt
from trainfast_tui.text import memory_words
from trainfast_tui.text.event_words import start_words
from trainfast_tui.text.format import number
from trainfast_tui.text.result_words import figure_rows, headline, result_notes
from trainfast_tui.text.search_words import warm_words

PLAIN_EVERY_S = 5.0
"""Seconds between two lines of progress when stderr is not a terminal."""
SLOW_S = 1.0
"""Seconds after which work shows its progress."""


class Update(Protocol):
    """Replaces the text of a progress; on a terminal with a bar before it if the `fraction` done is known."""

    def __call__(self, text: str, fraction: float | None = None) -> None: ...


@contextmanager
def progress_when_slow(text: str, *, on_any_stream: bool = False) -> Iterator[Update]:
    """Show `text` on a terminal once the block has taken over a second; a timer shows it while the work blocks.

    With `on_any_stream` streams other than a terminal get a line as well, every 5 s at most.
    """
    progress, due_s = Progress(), time.monotonic() + SLOW_S
    is_shown = on_any_stream or progress.redraws
    timer = threading.Timer(SLOW_S, progress.show_activity, [text])
    timer.daemon = True

    def update(text: str, fraction: float | None = None) -> None:
        if is_shown and time.monotonic() >= due_s:
            timer.join()
            bar = f"{printing.progress_bar(fraction)} " if fraction is not None and progress.redraws else ""
            progress.show_activity(bar + text)

    if is_shown:
        timer.start()
    try:
        yield update
    finally:
        timer.cancel()
        if is_shown:
            timer.join()
        progress.close()


class Progress:
    """Shows the progress of one thing on stderr; call `close` before printing anything else there."""

    def __init__(self) -> None:
        self.redraws = printing.can_redraw(sys.stderr)
        """True if stderr is a terminal that can redraw a line."""
        self._last = ""
        self._last_state = ""
        self._notices: set[int] = set()
        self._printed_at_s = float("-inf")

    def show_run(self, snapshot: RunSnapshot) -> None:
        """Show a live run: a bar, or without a terminal a line when the phase changed or 5 s have passed."""
        if snapshot.result is not None or (snapshot.state == "starting" and not snapshot.phase):
            return
        for event in snapshot.events:
            if event.kind == "no_step" and event.t_ns not in self._notices:
                self._notices.add(event.t_ns)
                self.print_line(event.detail or "")
        state = f"{snapshot.state} {'' if snapshot.steps else snapshot.phase}"
        self.show_activity(status_line(snapshot, with_bar=self.redraws), state)

    def print_line(self, text: str) -> None:
        """Print a line in place of the bar."""
        self.close()
        printing.print_notice(text)

    def show_activity(self, text: str, state: str = "") -> None:
        """Show the work or the wait under way, elsewhere than on a terminal every 5 s or in another `state`."""
        if self.redraws:
            self._paint(text)
        elif state != self._last_state or time.monotonic() - self._printed_at_s >= PLAIN_EVERY_S:
            self._last_state, self._printed_at_s = state, time.monotonic()
            if text != self._last:
                printing.print_notice(text)
            self._last = text

    def close(self) -> None:
        """Take the bar away."""
        if self.redraws and self._last:
            printing.write_to_stderr("", begin="\r\x1b[K")
            self._last = ""

    def _paint(self, text: str) -> None:
        text = fmt.plain(text, (printing.terminal_width(sys.stderr) or printing.USUAL_COLUMNS) - 1)
        if text != self._last:
            self._last = text
            printing.write_to_stderr(text, begin="\r", end="\x1b[K")


def status_line(snapshot: RunSnapshot, *, with_bar: bool = False) -> str:
    """Return state, step n of N, throughput, step time, loss, peak memory and time left.

    `with_bar` adds a bar of the steps that are done.
    """
    parts = [_state_words(snapshot)]
    if snapshot.tried:
        parts.append(warm_words(snapshot.run_file.role if snapshot.run_file else None, batch_sizes(snapshot.tried)))
        return "  ".join(parts)
    total = planned_steps(snapshot)
    if snapshot.steps:
        steps_done = snapshot.steps[-1].step
        bar = f" {printing.progress_bar(steps_done / total)}" if with_bar and total else ""
        parts[0] += f" {steps_done:,}/{total:,}{bar}" if total else f" step {steps_done:,}"
        parts += _figures(snapshot)
    elif snapshot.phase and snapshot.stop_deadline_ns is None:
        parts.append(start_words(snapshot.phase, snapshot.detail))
    return "  ".join(part for part in parts if part)


def live_record(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return a live run's figures so far for `--json`; absent readings are null."""
    run, last = snapshot.run_file, snapshot.steps[-1] if snapshot.steps else None
    figures = run_figures(snapshot)
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
    is_unsupervised = not snapshot.supervised and snapshot.state != "starting"
    host = other_host(snapshot.run_file)
    words = state_text(snapshot.state) + (f" on host {host}" if host else " (unsupervised)" if is_unsupervised else "")
    if snapshot.stop_deadline_ns is not None:
        left_s = max(0.0, (snapshot.stop_deadline_ns - time.monotonic_ns()) / 1e9)
        words += f", SIGKILL in {left_s:.0f} s"
    return words


def _figures(snapshot: RunSnapshot) -> list[str]:
    figures = run_figures(snapshot)
    parts = []
    if figures.warming_up:
        parts.append(figures.basis)
    elif figures.samples_per_s is not None:
        parts += [fmt.per_second(figures.samples_per_s, "samples"), fmt.milliseconds(figures.step_ms)]
    loss = next((step.loss for step in reversed(snapshot.steps) if step.loss is not None), None)
    if loss is not None:
        parts.append(f"loss {number(loss)}")
    if snapshot.peak_allocated_bytes is not None:
        parts.append(f"peak {fmt.size(snapshot.peak_allocated_bytes)}")
    left_s = None if figures.warming_up else seconds_left(snapshot)
    if left_s is not None:
        parts.append(f"{fmt.duration(left_s)} left")
    return parts


def print_result(result: Result, as_json: bool) -> int:
    """Print a result for a person or a program and return its exit code."""
    if as_json:
        printing.print_json(result)
    else:
        printing.print_lines(summary_lines(result))
    return exit_code_of(result.state)


def summary_lines(result: Result) -> list[str]:
    """Return the whole summary in lines of text."""
    return [*figure_lines(result), *oom_lines(result)]


def figure_lines(result: Result) -> list[str]:
    """Return the verdict, the figures, notes and bottlenecks in lines of text."""
    lines = [
        headline(result),
        *fmt.pair_lines(figure_rows(result)),
        *(f"note: {note}" for note in result_notes(result)),
    ]
    for index, diagnosis in enumerate(result.diagnosis):
        lines += [f"{'also' if index else 'bottleneck'}: {diagnosis.line}", f"  try: {diagnosis.advice}"]
    return lines


def oom_lines(result: Result) -> list[str]:
    """Return the explanation of an out-of-memory error and the changes that would fit; empty for another end."""
    explained = result.oom
    if explained is None or result.state != "oom":
        return []
    lines = list(memory_words.oom_sentences(explained))
    if explained.changes:
        lines.append(f"to make it fit, {memory_words.changes_title(explained.changes)}")
        lines += fmt.pair_lines(
            (f"  {memory_words.change_options(change)}", memory_words.effect_words(change))
            for change in explained.changes
        )
    return lines
