"""Six scripts as people write them, bare and under `run --`, unchanged: as many steps, as long, and as fast.

    python -m benchmarks.script_speeds [--pairs 6] [--only plain_torch ...]

The scripts of `benchmarks/scripts` keep a clock of their own. The recorded steps are compared with that clock over the
same steps: medians within 2 %. The speed under `run --` is at least 0.98 of the bare script's, by the same clock. Both
sides of a pair live at once and take turns of a few seconds, as the speed of a machine changes within seconds: the side
that waits is stopped, and each turn is compared with the two of the other side around it. A process trains with one
thread: two that share busy cores run ten times slower, at random.
"""

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil
from benchmarks.meter import Row, app, options, print_table

SCRIPTS = Path(__file__).with_name("scripts")
NAMES = ("hf_argument_parser", "hard_coded_trainer", "with_accelerate", "with_lightning", "plain_torch", "nanogpt_ddp")
ARGUMENTS = {
    "hf_argument_parser": "--per_device_train_batch_size=4 --num_train_epochs=1 --use_cpu=true --report_to=none "
    "--save_strategy=no --disable_tqdm=true"
}
SIDE = "BENCHMARK_SIDE"
"""The variable that marks the processes of a side; a supervisor leaves the tree of the command that started it."""
BARE, RUN = "bare", "run"
TURN_S, MIN_STEPS = 3.0, 5
SKIPPED = 5
CLOCKS_PERCENT, SLOWEST = 2.0, 0.98


def row(name: str, pairs: int) -> Row:
    """The steps, both clocks and the speed of one script."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [_pair(command(name), Path(folder)) for _ in range(pairs)]
    counts = {(len(pair.bare), len(pair.own), len(pair.recorded)) for pair in runs}
    clock = statistics.median(100 * (_median_s(pair.recorded) / _median_s(pair.own) - 1) for pair in runs)
    speeds = [ratio for pair in runs for ratio in pair.speeds()]
    # Twice the standard error of a median, 1.25 that of a mean for a normal distribution.
    speed, error = statistics.median(speeds), 2 * 1.25 * statistics.stdev(speeds) / math.sqrt(len(speeds))
    steps = " ".join("=".join(map(str, each)) for each in counts)
    step_ms = 1e3 * statistics.median(_median_s(pair.bare) for pair in runs)
    measured = f"{steps} steps of {step_ms:.1f} ms, clocks {clock:+.2f} %"
    measured += f", speed {speed:.3f} +-{error:.3f} ({len(speeds)} turns)"
    alike = all(len(set(each)) == 1 for each in counts)
    held = alike and abs(clock) <= CLOCKS_PERCENT and speed >= SLOWEST
    return name, measured, f"within {CLOCKS_PERCENT:g} %, >= {SLOWEST:g}", held


@dataclass
class Pair:
    """A script's bare run beside one under `run --`; ends of steps and of turns are seconds of the monotonic clock."""

    bare: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    """Under `run --`, by the script's own clock."""
    recorded: list[float] = field(default_factory=list)
    turns: list[tuple[str, float, float]] = field(default_factory=list)
    """The side, the begin and the end of each turn."""

    def speeds(self) -> list[float]:
        """Speed under `run --` as a share of the bare speed: a ratio for each turn between two of the other side."""
        turns = [(side, _step_s(self.bare if side == BARE else self.own, *span)) for side, *span in self.turns]
        ratios = []
        for (_, before), (side, during), (_, after) in zip(turns, turns[1:], turns[2:], strict=False):
            if before and during and after:
                ratio = math.sqrt(before * after) / during
                ratios.append(ratio if side == RUN else 1 / ratio)
        return ratios


def command(name: str) -> list[str]:
    """The words that start a script."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name == "nanogpt_ddp" else []
    return [sys.executable, *launcher, str(SCRIPTS / f"{name}.py"), *ARGUMENTS.get(name, "").split()]


def _pair(script: list[str], folder: Path) -> Pair:
    """Run a script bare and under `run --`, in turns."""
    home, pair = folder / "home", Pair()
    sides = {
        BARE: _start(script, folder, BARE),
        RUN: _start([*app(), "run", "--json", "--", *script], folder, RUN, TRAINFAST_HOME=str(home)),
    }
    outputs = {side: Path(folder, f"{side}.out") for side in sides}
    while all(process.poll() is None for process in sides.values()):
        for side, other in ((BARE, RUN), (RUN, BARE)):
            _signal_all(other, signal.SIGSTOP)
            _signal_all(side, signal.SIGCONT)
            begin = time.monotonic()
            time.sleep(TURN_S)
            pair.turns.append((side, begin, time.monotonic()))
    for side, process in sides.items():
        _signal_all(side, signal.SIGCONT)
        if process.wait():
            sys.exit(f"{process.args!r} ended with exit code {process.returncode}\n{outputs[side].read_text()}")
    pair.bare = _ends(outputs[BARE].read_text())
    directory = home / "runs" / json.loads(outputs[RUN].read_text().splitlines()[-1])["run_id"]
    pair.own = _ends((directory / "output.log").read_text())
    records = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    pair.recorded = [record["t_ns"] / 1e9 for record in records]
    return pair


def _signal_all(side: str, number: signal.Signals) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(SIDE) == side:
                process.send_signal(number)


def _start(words: list[str], folder: Path, side: str, **more: str) -> subprocess.Popen[str]:
    """Start a command of this side; a script's Trainer leaves its folder below `folder`."""
    variables = {**os.environ, **more, SIDE: side, "OMP_NUM_THREADS": "1"}
    with open(folder / f"{side}.out", "w") as output:
        errors = None if side == RUN else output
        return subprocess.Popen(words, env=variables, cwd=folder, stdout=output, stderr=errors, text=True)


def _ends(output: str) -> list[float]:
    """The end of each step, of the line that a script prints last."""
    ends: list[float] = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("[")))
    return ends


def _median_s(ends: list[float]) -> float:
    """The median step; the first steps allocate."""
    return statistics.median(after - before for before, after in pairwise(ends[SKIPPED:]))


def _step_s(ends: Sequence[float], begin: float, end: float) -> float | None:
    """The mean step of those that lie within a turn; None with fewer than `MIN_STEPS`."""
    during = [each for each in ends[SKIPPED:] if begin <= each <= end][1:]
    return (during[-1] - during[0]) / (len(during) - 1) if len(during) > MIN_STEPS else None


if __name__ == "__main__":
    asked = options(__doc__, pairs=6, only=[]).parse_args()
    chosen = asked.only or [*NAMES]
    if "with_lightning" in chosen and find_spec("lightning") is None:
        print("with_lightning is left out: Lightning is not installed here")
        chosen.remove("with_lightning")
    sys.exit(print_table([row(name, asked.pairs) for name in chosen]))
