"""Two sides that live at once and take turns on the same cores, as the speed of a machine changes within seconds.

All processes of the side that waits are stopped. Each turn is compared with the two of the other side around it.
"""

import math
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

SIDE = "BENCHMARK_SIDE"
"""The variable that marks the processes of a side; a supervisor leaves the tree of the command that started it."""


@dataclass(frozen=True)
class Turn:
    """`step_s` is the time of a step in this turn of a side; None without enough steps."""

    side: str
    step_s: float | None


def signal_all(side: str, number: signal.Signals) -> None:
    """Send a signal to every process of a side."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(SIDE) == side:
                process.send_signal(number)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def speed_ratios(turns: Sequence[Turn], of: str) -> list[float]:
    """The speed of this side as a share of the other's: a ratio for each turn between two of the other side."""
    ratios = []
    for before, during, after in zip(turns, turns[1:], turns[2:], strict=False):
        if before.step_s and during.step_s and after.step_s:
            ratio = math.sqrt(before.step_s * after.step_s) / during.step_s
            ratios.append(ratio if during.side == of else 1 / ratio)
    return ratios


def median_with_error(ratios: Sequence[float]) -> tuple[float, float]:
    """The median, and twice its standard error (1.25 that of the mean, for a normal distribution)."""
    return statistics.median(ratios), 2 * 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios))
