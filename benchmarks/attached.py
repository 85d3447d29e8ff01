"""How much an attached app slows a training down: windows with and without it, in turn, beside one live run.

    python -m benchmarks.attached [--pairs 30] [--window 6] [--set KNOB=VALUE ...]

On a GPU the app must cost next to nothing; on a CPU it takes its share of the machine, and no more than that.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.budget import Row, print_table
from benchmarks.pty_meter import measure as measure_in_terminal
from benchmarks.sampler_cost import stand_in

GPU_PERCENT = 0.3
CPU_PERCENT_BEYOND_SHARE = 1.0
PAIRS = 30
WINDOW_S = 6.0
SETTLE_S = 2.0
RESAMPLES = 2000
APP = (sys.executable, "-m", "trainfast_tui.cli")
SETTINGS = ("steps=10000000", "batch_size=1", "seq_len=32", "watch=0")

Pair = tuple[float, float, float]
"""Median step in ms without and with the app, and the app's CPU in percent of a core."""


@dataclass(frozen=True)
class Slowdown:
    """Of the median step, in percent; `low` and `high` bound the middle 95 % of resampled medians of the pairs."""

    pairs: int
    percent: float
    low: float
    high: float
    share_percent: float
    """The app's own part of the machine's CPU time meanwhile."""
    device: str


def rows(found: Slowdown | None = None) -> list[Row]:
    """The budget: what, measured, budget, held."""
    one = found or measure()
    on_gpu = one.device != "cpu"
    budget = GPU_PERCENT if on_gpu else CPU_PERCENT_BEYOND_SHARE + one.share_percent
    words = f"{one.percent:+.2f} % (95 %: {one.low:+.2f} to {one.high:+.2f}; the app's share {one.share_percent:.2f} %)"
    allowed = f"<= {budget:.2f} %" + ("" if on_gpu else f", {CPU_PERCENT_BEYOND_SHARE:g} % beyond its share")
    return [
        (f"a training on the {one.device} slowed by the app, {one.pairs} pairs", words, allowed, one.percent <= budget)
    ]


def measure(pairs: int = PAIRS, window_s: float = WINDOW_S, settings: Sequence[str] = SETTINGS) -> Slowdown:
    """One run that trains on and on; the app attached to it in one window of each pair, which one first alternating."""
    with tempfile.TemporaryDirectory() as folder:
        real_gpu = _has_gpu()
        variables = dict(os.environ) if real_gpu else stand_in(Path(folder))
        variables["TRAINFAST_HOME"] = str(Path(folder) / "home")
        wanted = [
            word
            for setting in settings
            if not (real_gpu and setting.startswith("watch"))
            for word in ("--set", setting)
        ]
        started = subprocess.run(
            [*APP, "run", "tiny-llama", *wanted, "--detach", "--json"],
            env=variables, capture_output=True, text=True, check=True,
        )  # fmt: skip
        run_id = json.loads(started.stdout.splitlines()[-1])["run_id"]
        directory = Path(variables["TRAINFAST_HOME"]) / "runs" / run_id
        try:
            steps = Steps(directory)
            steps.wait(20)
            found = [_pair(steps, variables, window_s, app_first=bool(number % 2)) for number in range(pairs)]
        finally:
            subprocess.run([*APP, "stop", run_id, "--now"], env=variables, capture_output=True, check=False)
    changes = [100 * (attached / alone - 1) for alone, attached, _ in found]
    low, high = _interval(changes)
    return Slowdown(
        pairs=pairs,
        percent=statistics.median(changes),
        low=low,
        high=high,
        share_percent=statistics.median(cpu for _, _, cpu in found) / (os.cpu_count() or 1),
        device="GPU" if real_gpu else "cpu",
    )


class Steps:
    """The step times of a live run."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "steps.jsonl"
        self._result = directory / "result.json"

    def wait(self, count: int) -> None:
        """Until so many steps are taken."""
        deadline = time.monotonic() + 180
        while not self._path.exists() or self._path.read_bytes().count(b"\n") < count:
            if time.monotonic() > deadline or self._result.exists():
                raise RuntimeError(f"the run takes no steps: see {self._path.parent}")
            time.sleep(0.2)

    def median_ms(self, begin_ns: int, end_ns: int) -> float:
        """The median of the steps that ended between two moments of CLOCK_MONOTONIC."""
        lines = self._path.read_bytes().split(b"\n")[:-1]
        recent = (json.loads(line) for line in reversed(lines))
        found: list[float] = []
        for step in recent:
            if step["t_ns"] < begin_ns:
                break
            if step["t_ns"] < end_ns:
                found.append(step["step_ms"])
        return statistics.median(found)


def _pair(steps: Steps, variables: Mapping[str, str], window_s: float, *, app_first: bool) -> Pair:
    """One window of each kind, in the order asked for."""
    alone = None if app_first else _alone(steps, window_s)
    seen = measure_in_terminal(
        [*APP], columns=160, rows=48, seconds=window_s, settle=SETTLE_S, until=None, env=dict(variables)
    )
    end_ns = time.monotonic_ns()
    attached = steps.median_ms(end_ns - int(seen.seconds * 1e9), end_ns)
    if alone is None:
        time.sleep(SETTLE_S)
        alone = _alone(steps, window_s)
    return alone, attached, seen.cpu_percent


def _alone(steps: Steps, window_s: float) -> float:
    begin_ns = time.monotonic_ns()
    time.sleep(window_s)
    return steps.median_ms(begin_ns, time.monotonic_ns())


def _interval(changes: Sequence[float]) -> tuple[float, float]:
    """The percentile bootstrap of the median (Efron 1979), with a fixed seed."""
    draw = random.Random(1).choices
    medians = sorted(statistics.median(draw(changes, k=len(changes))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="How much the attached app slows a training down.")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds of each half of a pair")
    parser.add_argument("--set", action="append", dest="settings", metavar="KNOB=VALUE", help="instead of the defaults")
    options = parser.parse_args()
    return print_table(rows(measure(options.pairs, options.window, options.settings or SETTINGS)))


if __name__ == "__main__":
    sys.exit(main())
