"""The status of a live run: as one line for a person, as a record for `--json`."""

from __future__ import annotations

import time
from typing import Any

from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.records.run_states import state_text
from trainfast_runner.records.warm_process import batch_sizes
from trainfast_runner.running.follower import RunSnapshot
from trainfast_runner.running.present_state import other_host
from trainfast_tui.cli.printing.output import progress_bar
from trainfast_tui.live.figures import planned_steps, run_figures, seconds_left
from trainfast_tui.text.format import duration, milliseconds, number, per_second, size
from trainfast_tui.text.search.warm_process import warm_words
from trainfast_tui.text.wait_words import start_words


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
        bar = f" {progress_bar(steps_done / total)}" if with_bar and total else ""
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
        parts += [per_second(figures.samples_per_s, "samples"), milliseconds(figures.step_ms)]
    loss = next((step.loss for step in reversed(snapshot.steps) if step.loss is not None), None)
    if loss is not None:
        parts.append(f"loss {number(loss)}")
    if snapshot.peak_allocated_bytes is not None:
        parts.append(f"peak {size(snapshot.peak_allocated_bytes)}")
    left_s = None if figures.warming_up else seconds_left(snapshot)
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    return parts
