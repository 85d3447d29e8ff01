"""The slowdown of a training by an attached app: slices with and without the app, in turn, beside one live run.

    python -m benchmarks.attached [--pairs 30] [--window 3] [--set KNOB=VALUE ...]

On a GPU the app must cost next to nothing; on a CPU it takes its share of the machine, and little more than that.

One app is attached all the time; without it means that it is suspended, as by Ctrl+Z, which costs nothing and is over
at once. A pair is four slices a few seconds long, without, with, with, without the app, and the other way round in
every second pair: so a machine that grows slower or faster all the time does so for both. The time of all steps in a
slice is compared, not their median: the app works a few milliseconds at a time, and most steps do not notice. The
budget is held where the whole interval is within it, on a machine that others left alone.
"""

import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.meter import Program, Row, app, live_run, options, print_table
from benchmarks.sampler_cost import stand_in

from trainfast_runner.machine.telemetry.host import ProcessTree, busy_and_idle_s

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
SETTINGS = ("steps=10000000", "batch_size=1", "seq_len=32", "watch=0")


@dataclass(frozen=True)
class Slice:
    """A few seconds of the training."""

    attached: bool
    begin_ns: int
    end_ns: int
    app_percent: float
    """CPU of the app, of the whole machine."""
    others_percent: float
    """CPU of all that is neither the app nor the run, of the whole machine."""


def rows(pairs: int = PAIRS, window_s: float = WINDOW_S, settings: Sequence[str] = SETTINGS) -> list[Row]:
    """The budget, of one run that trains on and on and one app that is attached to it half of the time."""
    with tempfile.TemporaryDirectory() as folder:
        real_gpu = Path("/dev/nvidiactl").exists()
        variables = dict(os.environ) if real_gpu else stand_in(Path(folder))
        variables["TRAINFAST_HOME"] = str(Path(folder) / "home")
        wanted = [setting for setting in settings if not (real_gpu and setting.startswith("watch"))]
        with live_run(variables, wanted, steps=20) as directory, Program(app(), env=variables) as attached:
            attached.read(time.monotonic() + FIRST_SETTLE_S)
            events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
            run = ProcessTree(next(event["pid"] for event in events if event["kind"] == "supervisor"))
            measured = [_pair(attached, run, window_s, app_first=bool(number % 2)) for number in range(pairs)]
            ends_ns = [json.loads(line)["t_ns"] for line in (directory / "steps.jsonl").read_bytes().split(b"\n")[:-1]]
    return [_slowdown(measured, ends_ns, on_gpu=real_gpu)]


def _slowdown(pairs: Sequence[Sequence[Slice]], ends_ns: Sequence[int], *, on_gpu: bool) -> Row:
    """Percent by which the mean step is longer, the median of pairs, with 95 % of its resamples, beside its budget."""
    changes, of_medians = (
        [_change(pair, ends_ns, middle) for pair in pairs] for middle in (statistics.mean, statistics.median)
    )
    draw = random.Random(1).choices
    # The percentile bootstrap of the median (Efron 1979).
    medians = sorted(statistics.median(draw(changes, k=len(changes))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    slices = [part for pair in pairs for part in pair]
    without, beside = (
        statistics.mean(part.others_percent for part in slices if part.attached is wanted) for wanted in (False, True)
    )
    share = statistics.mean(part.app_percent for part in slices if part.attached)
    quiet = max(without, beside) <= QUIET_PERCENT
    allowed = GPU_PERCENT if on_gpu else CPU_PERCENT_BEYOND_SHARE + share
    shown = "within" if high <= allowed else "beyond" if low > allowed else "on both sides of"
    words = (
        f"{statistics.median(changes):+.2f} % (95 %: {low:+.2f} to {high:+.2f}, {shown} the bound; "
        f"median step {statistics.median(of_medians):+.2f} %; "
        f"the app's share {share:.2f} %; others' {without:.1f} % without and {beside:.1f} % with it"
        f"{'' if quiet else ': too much to tell'})"
    )
    what = f"a training on the {'GPU' if on_gpu else 'cpu'} slowed by the app, {len(pairs)} pairs"
    beyond = "" if on_gpu else f", {CPU_PERCENT_BEYOND_SHARE:g} % beyond its share"
    return what, words, f"<= {allowed:.2f} %{beyond}", high <= allowed and quiet


def _pair(app: Program, run: ProcessTree, window_s: float, *, app_first: bool) -> list[Slice]:
    """Four slices, in the order asked for."""
    slices = []
    # One suspension for slices in a row: stopped while it is still coming back, Textual ends the app.
    for attached, alike in itertools.groupby(first != app_first for first in ORDER):
        if not attached:
            app.signal(signal.SIGTSTP)
        for _ in alike:
            app.read(time.monotonic() + SETTLE_S)
            slices.append(_slice(app, run, window_s, attached=attached))
        app.signal(signal.SIGCONT)
    return slices


def _slice(app: Program, run: ProcessTree, window_s: float, *, attached: bool) -> Slice:
    run.read()
    cores, app_s, begin_ns = psutil.cpu_times(percpu=True), app.cpu_s, time.monotonic_ns()
    app.read(time.monotonic() + window_s)
    now, used_s, end_ns, reading = psutil.cpu_times(percpu=True), app.cpu_s - app_s, time.monotonic_ns(), run.read()
    before, after = ([sum(seconds) for seconds in zip(*map(busy_and_idle_s, one), strict=True)] for one in (cores, now))
    busy, idle = (late - early for early, late in zip(before, after, strict=True))
    run_percent = (reading.cpu_percent or 0.0) / len(now) if reading else 0.0
    app_percent = 100 * used_s / ((end_ns - begin_ns) * 1e-9) / len(now)
    others_percent = 100 * busy / max(0.01, busy + idle) - run_percent - app_percent
    return Slice(attached, begin_ns, end_ns, app_percent, others_percent)


def _change(pair: Sequence[Slice], ends_ns: Sequence[int], middle: Callable[[Sequence[float]], float]) -> float:
    """The share by which a step of this pair is longer with the app, in percent."""
    steps: dict[bool, list[float]] = {True: [], False: []}
    for part in pair:
        ends = [t_ns for t_ns in ends_ns if part.begin_ns <= t_ns < part.end_ns]
        steps[part.attached] += [after - before for before, after in itertools.pairwise(ends)]
    return 100 * (middle(steps[True]) / middle(steps[False]) - 1)


if __name__ == "__main__":
    asked = options(__doc__, pairs=PAIRS, window=WINDOW_S, set=[]).parse_args()
    sys.exit(print_table(rows(asked.pairs, asked.window, asked.set or SETTINGS)))
