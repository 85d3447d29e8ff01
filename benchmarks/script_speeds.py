"""Six scripts as people write them, bare and under `run --`, unchanged: as many steps, as long, and as fast.

    python benchmarks/script_speeds.py [--pairs 6] [--only plain_torch ...] [--lightning PYTHON]

The scripts of `benchmarks/scripts` keep a clock of their own. The recorded steps are compared with that clock over the
same steps: medians within 2 %. The speed under `run --` is at least 0.98 of the bare script's, by the same clock: both
sides of a pair take turns of a few seconds (`turns.py`). A process trains with one thread: two that share busy cores
run ten times slower, at random.
"""

import argparse
import json
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

if __name__ == "__main__":
    # As a script, Python looks for modules beside this file only.
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import as_installed
from benchmarks.budget import Row, print_table
from benchmarks.turns import SIDE, Turn, median_with_error, signal_all, speed_ratios

SCRIPTS = Path(__file__).with_name("scripts")
ARGUMENTS = {
    "hf_argument_parser": "--per_device_train_batch_size=4 --num_train_epochs=1 --use_cpu=true --report_to=none "
    "--save_strategy=no --disable_tqdm=true",
    "hard_coded_trainer": "",
    "with_accelerate": "",
    "with_lightning": "",
    "plain_torch": "--batch-size=128",
    "nanogpt_ddp": "",
}
"""The command line of each script."""
BARE, RUN = "bare", "run"
TURN_S, MIN_STEPS = 3.0, 5
SKIPPED = 5
CLOCKS_PERCENT, SLOWEST = 2.0, 0.98


def row(name: str, python: str, pairs: int) -> Row:
    """The steps, both clocks and the speed of one script."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [_pair(command(name, python), Path(folder)) for _ in range(pairs)]
    counts = {(len(pair.bare), len(pair.own), len(pair.recorded)) for pair in runs}
    clock = statistics.median(100 * (_median_s(pair.recorded) / _median_s(pair.own) - 1) for pair in runs)
    speeds = [ratio for pair in runs for ratio in pair.speeds()]
    speed, error = median_with_error(speeds)
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
        """Speed under `run --` as a share of the bare speed."""
        turns = [
            Turn(side, _step_s(self.bare if side == BARE else self.own, begin, end)) for side, begin, end in self.turns
        ]
        return speed_ratios(turns, RUN)


def command(name: str, python: str) -> list[str]:
    """The words that start a script."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name == "nanogpt_ddp" else []
    return [python, *launcher, str(SCRIPTS / f"{name}.py"), *ARGUMENTS[name].split()]


def _pair(script: list[str], folder: Path) -> Pair:
    """Run a script bare and under `run --`, in turns."""
    home, pair = folder / "home", Pair()
    sides = {
        BARE: _start(script, folder, BARE),
        RUN: _start([*as_installed.app(), "run", "--json", "--", *script], folder, RUN, TRAINFAST_HOME=str(home)),
    }
    outputs = {side: Path(folder, f"{side}.out") for side in sides}
    while all(process.poll() is None for process in sides.values()):
        for side, other in ((BARE, RUN), (RUN, BARE)):
            signal_all(other, signal.SIGSTOP)
            signal_all(side, signal.SIGCONT)
            begin = time.monotonic()
            time.sleep(TURN_S)
            pair.turns.append((side, begin, time.monotonic()))
    for side, process in sides.items():
        signal_all(side, signal.SIGCONT)
        if process.wait():
            sys.exit(f"{process.args!r} ended with exit code {process.returncode}\n{outputs[side].read_text()}")
    pair.bare = _ends(outputs[BARE].read_text())
    result = json.loads(outputs[RUN].read_text().splitlines()[-1])
    directory = home / "runs" / result["run_id"]
    records = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    pair.own = _ends((directory / "output.log").read_text())
    pair.recorded = [record["t_ns"] / 1e9 for record in records]
    return pair


def _start(words: list[str], folder: Path, side: str, **more: str) -> subprocess.Popen[str]:
    """Start a command of this side; a script's Trainer leaves its folder below `folder`."""
    with open(folder / f"{side}.out", "w") as output:
        return subprocess.Popen(
            words,
            env={**os.environ, **more, SIDE: side, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=output,
            stderr=None if side == RUN else output,
            text=True,
        )


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


def main() -> int:
    """Measure, print, and return 1 unless all budgets held."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/script_speeds.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=ARGUMENTS, default=list(ARGUMENTS))
    parser.add_argument("--lightning", metavar="PYTHON", help="the interpreter of an environment with Lightning")
    asked = parser.parse_args()
    pythons = dict.fromkeys(asked.only, sys.executable)
    if "with_lightning" in pythons:
        if asked.lightning is None and find_spec("lightning") is None:
            print("with_lightning is left out: Lightning is not installed here, and no --lightning PYTHON was given")
            del pythons["with_lightning"]
        else:
            pythons["with_lightning"] = asked.lightning or sys.executable
    return print_table([row(name, python, asked.pairs) for name, python in pythons.items()])


if __name__ == "__main__":
    sys.exit(main())
