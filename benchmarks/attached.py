"""The slowdown of a training by an attached app: slices with and without the app, in turn, beside one live run.

    python -m benchmarks.attached [--pairs 30] [--window 3] [--set KNOB=VALUE ...]

On a GPU the app must cost next to nothing; on a CPU it takes its share of the machine, and little more than that.

One app is attached all the time; without it means that it is suspended, as by Ctrl+Z, which costs nothing and is over
at once. A pair is four slices a few seconds long, without, with, with, without the app, and the other way round in
every second pair: so a machine that grows slower or faster all the time does so for both. The time of all steps in a
slice is compared, not their median: the app works a few milliseconds at a time, and most steps do not notice. The
budget is held where the whole interval is within it, on a machine that others left alone.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.budget import Row, print_table
from benchmarks.in_terminal import Program, started
from benchmarks.live_run import live_run
from benchmarks.sampler_cost import stand_in

from trainfast_runner.machine.process_tree import ProcessTree
from trainfast_runner.machine.telemetry.host import read_cores

GPU_PERCENT = 0.3
CPU_PERCENT_BEYOND_SHARE = 1.0
PAIRS = 30
WINDOW_S = 3.0
"""Whole seconds, or a slice would have more of the app's ticks than another."""
SETTLE_S = 1.0
"""After the app was suspended or went on: its first repaint is of the whole screen."""
FIRST_SETTLE_S = 8.0
"""After its start."""
ORDER = (False, True, True, False)
"""True for slices with the app, in every second pair; the others are the other way round."""
RESAMPLES = 2000
QUIET_PERCENT = 5.0
"""If others take more of the machine than this, the pairs measure the others rather than the app."""
APP = (sys.executable, "-m", "trainfast_tui.cli")
SETTINGS = ("steps=10000000", "batch_size=1", "seq_len=32", "watch=0")


@dataclass(frozen=True)
class Slice:
    """A few seconds of the training."""

    attached: bool
    steps_ms: tuple[float, ...]
    """From the end of one step to that of the next."""
    app_percent: float
    """CPU of the app, of the whole machine."""
    others_percent: float
    """CPU of all that is neither the app nor the run, of the whole machine."""


@dataclass(frozen=True)
class Slowdown:
    """Percent by which the mean step is longer: the median of pairs; `low` and `high` hold 95 % of its resamples."""

    pairs: int
    percent: float
    low: float
    high: float
    median_step_percent: float
    """The same of the median step."""
    share_percent: float
    """The app's own part of the machine's CPU time while it is attached."""
    others_percent: tuple[float, float]
    """The share of the machine that others took, without the app and with it."""
    device: str

    @property
    def is_quiet(self) -> bool:
        """True if others left the machine alone."""
        return max(self.others_percent) <= QUIET_PERCENT

    @property
    def allowed_percent(self) -> float:
        """The budget."""
        return GPU_PERCENT if self.device != "cpu" else CPU_PERCENT_BEYOND_SHARE + self.share_percent


def rows(slowdown: Slowdown | None = None) -> list[Row]:
    """The budget: what, measured, budget, held."""
    slowdown = slowdown or measure()
    allowed = slowdown.allowed_percent
    shown = "within" if slowdown.high <= allowed else "beyond" if slowdown.low > allowed else "on both sides of"
    words = (
        f"{slowdown.percent:+.2f} % (95 %: {slowdown.low:+.2f} to {slowdown.high:+.2f}, {shown} the bound; "
        f"median step {slowdown.median_step_percent:+.2f} %; the app's share {slowdown.share_percent:.2f} %; "
        f"others' {slowdown.others_percent[0]:.1f} % without and {slowdown.others_percent[1]:.1f} % with it"
        f"{'' if slowdown.is_quiet else ': too much to tell'})"
    )
    beyond = "" if slowdown.device != "cpu" else f", {CPU_PERCENT_BEYOND_SHARE:g} % beyond its share"
    what = f"a training on the {slowdown.device} slowed by the app, {slowdown.pairs} pairs"
    return [(what, words, f"<= {allowed:.2f} %{beyond}", slowdown.high <= allowed and slowdown.is_quiet)]


def measure(pairs: int = PAIRS, window_s: float = WINDOW_S, settings: Sequence[str] = SETTINGS) -> Slowdown:
    """One run that trains on and on, and one app that is attached to it half of the time."""
    with tempfile.TemporaryDirectory() as folder:
        real_gpu = _has_gpu()
        variables = dict(os.environ) if real_gpu else stand_in(Path(folder))
        variables["TRAINFAST_HOME"] = str(Path(folder) / "home")
        wanted = [setting for setting in settings if not (real_gpu and setting.startswith("watch"))]
        with live_run(APP, variables, wanted, steps=20) as directory, started(APP, env=variables) as app:
            app.read(time.monotonic() + FIRST_SETTLE_S)
            run = _Run(directory)
            pairs_of_slices = [_pair(app, run, window_s, app_first=bool(number % 2)) for number in range(pairs)]
    return _slowdown(pairs_of_slices, "GPU" if real_gpu else "cpu")


class _Run:
    """The steps of a live run, and the processor time that they take."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "steps.jsonl"
        events = (json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines())
        self._tree = ProcessTree(next(event["pid"] for event in events if event["kind"] == "supervisor"))

    def steps_ms(self, begin_ns: int, end_ns: int) -> tuple[float, ...]:
        """From the end of each step to that of the next, of those between two moments of CLOCK_MONOTONIC."""
        ends: list[int] = []
        for line in reversed(self._path.read_bytes().split(b"\n")[:-1]):
            t_ns = json.loads(line)["t_ns"]
            if t_ns < begin_ns:
                break
            if t_ns < end_ns:
                ends.append(t_ns)
        ends.reverse()
        return tuple((after - before) * 1e-6 for before, after in itertools.pairwise(ends))

    def cpu_percent(self) -> float:
        """The share of one core since the last call, all processes of the run together."""
        reading = self._tree.read()
        return 0.0 if reading is None else reading.cpu_percent or 0.0


def _pair(app: Program, run: _Run, window_s: float, *, app_first: bool) -> list[Slice]:
    """Four slices, in the order asked for."""
    slices = []
    # One suspension for slices in a row: stopped while it is still coming back, Textual ends the app.
    for attached, alike in itertools.groupby(first != app_first for first in ORDER):
        with contextlib.nullcontext() if attached else _suspended(app):
            for _ in alike:
                app.read(time.monotonic() + SETTLE_S)
                slices.append(_slice(app, run, window_s, attached=attached))
    return slices


@contextlib.contextmanager
def _suspended(app: Program) -> Iterator[None]:
    app.signal(signal.SIGTSTP)
    try:
        yield
    finally:
        app.signal(signal.SIGCONT)


def _slice(app: Program, run: _Run, window_s: float, *, attached: bool) -> Slice:
    run.cpu_percent()
    cores, app_s, begin_ns = read_cores(), app.cpu_s, time.monotonic_ns()
    app.read(time.monotonic() + window_s)
    now, used_s, end_ns = read_cores(), app.cpu_s - app_s, time.monotonic_ns()
    run_percent = run.cpu_percent() / len(now)
    busy, idle = (
        sum(getattr(after, kind) - getattr(before, kind) for before, after in zip(cores, now, strict=True))
        for kind in ("busy", "idle")
    )
    app_percent = 100 * used_s / ((end_ns - begin_ns) * 1e-9) / len(now)
    return Slice(
        attached=attached,
        steps_ms=run.steps_ms(begin_ns, end_ns),
        app_percent=app_percent,
        others_percent=100 * busy / max(0.01, busy + idle) - run_percent - app_percent,
    )


def _slowdown(pairs: Sequence[Sequence[Slice]], device: str) -> Slowdown:
    changes = [_change(pair, statistics.mean) for pair in pairs]
    low, high = _interval(changes)
    slices = [part for pair in pairs for part in pair]
    without, attached = ([part for part in slices if part.attached is wanted] for wanted in (False, True))
    return Slowdown(
        pairs=len(pairs),
        percent=statistics.median(changes),
        low=low,
        high=high,
        median_step_percent=statistics.median(_change(pair, statistics.median) for pair in pairs),
        share_percent=statistics.mean(part.app_percent for part in attached),
        others_percent=(
            statistics.mean(part.others_percent for part in without),
            statistics.mean(part.others_percent for part in attached),
        ),
        device=device,
    )


def _change(pair: Sequence[Slice], middle: Callable[[Sequence[float]], float]) -> float:
    """The share by which a step of this pair is longer with the app, in percent."""
    without, attached = (
        middle([ms for part in pair if part.attached is wanted for ms in part.steps_ms]) for wanted in (False, True)
    )
    return 100 * (attached / without - 1)


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
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds of each of the four slices of a pair")
    parser.add_argument("--set", action="append", dest="settings", metavar="KNOB=VALUE", help="instead of the defaults")
    options = parser.parse_args()
    return print_table(rows(measure(options.pairs, options.window, options.settings or SETTINGS)))


if __name__ == "__main__":
    sys.exit(main())
