"""The question of a best-fit search: what it is, the knobs that it varies or leaves alone, and its expected time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_tui.text import format as fmt
from trainfast_tui.text.tables import pairs

if TYPE_CHECKING:
    from trainfast_runner.search.best.question.estimate import Estimate

ABOUT = (
    "Finds the fastest settings that fit, by short trials of real steps in warm processes; the best and your own"
    " settings are then confirmed in fresh ones."
)
ABOUT_SCRIPT = (
    "Finds the fastest settings of the script that fit: each trial is a process of its own, which ends after a few"
    " steps and whose checkpoints and trackers are off; the best and your own settings are then confirmed."
)
BY_COMMAND = "--set {knob}=VALUE names it"
BY_KEYS = "press Enter on the knob to type a value"
"""Words on how to name a script's present value: on the command line, and in the app."""


def varied_line(vary: Mapping[str, list[Any]], global_batch: int | None) -> str:
    """Return the knobs that a search varies, with their values."""
    varied = "; ".join(f"{name} {', '.join(map(KNOBS_BY_NAME[name].text_of, values))}" for name, values in vary.items())
    at = f" at a global batch of {global_batch:,}" if global_batch is not None else ""
    return f"varying {varied or 'nothing'}{at}"


def left_alone_lines(left_alone: Mapping[str, str], *, to_name: str = BY_COMMAND) -> list[str]:
    """Return the knobs that a search leaves alone, those with the same reason in one line.

    `to_name` says how the missing present value of a `{knob}` is named.
    """
    from trainfast_runner.search.journal.best import UNNAMED

    by_reason: dict[str, list[str]] = {}
    for name, reason in left_alone.items():
        words = f"{reason}; {to_name.format(knob=name)}" if reason == UNNAMED else reason
        by_reason.setdefault(words, []).append(name)
    return [_left_alone(", ".join(names), reason) for reason, names in by_reason.items()]


def question_lines(
    vary: Mapping[str, list[Any]],
    left_alone: Mapping[str, str],
    global_batch: int | None,
    *,
    to_name: str = BY_COMMAND,
) -> list[str]:
    """Return the knobs that a search varies, and then those that it leaves alone."""
    return [varied_line(vary, global_batch), *left_alone_lines(left_alone, to_name=to_name)]


def _left_alone(names: str, reason: str) -> str:
    """Return the names with the reason, which a refusal begins with the name already."""
    return f"left alone: {reason}" if reason.startswith(f"{names} ") else f"left alone: {names}: {reason}"


def estimate_lines(estimate: Estimate) -> list[str]:
    """Return the number of candidates, the processes and the expected time of a search."""
    dropped = f", {estimate.dropped:,} with another global batch left out" if estimate.dropped else ""
    legal = f"{estimate.candidates:,}, {estimate.legal:,} of them can run here{dropped}; the baseline is one"
    start = f"{fmt.duration(estimate.start_s)} a process, {estimate.basis}"
    rows = [
        ("candidates", legal),
        ("processes", f"{estimate.processes} for trials and about {estimate.cold_runs} cold runs; {start}"),
        (
            "takes",
            f"about {fmt.duration(estimate.seconds)}; each candidate by itself: {fmt.duration(estimate.grid_s)}",
        ),
    ]
    return pairs(rows)
