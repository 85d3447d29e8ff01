"""Six scripts as people write them, bare and under `run --`, unchanged: as many steps, as long, and as fast.

    python benchmarks/script_speeds.py [--pairs 6] [--only plain_torch ...] [--lightning PYTHON]

The scripts of `benchmarks/scripts` keep a clock of their own. The recorded steps are compared with that clock over the
same steps: medians within 2 %. The speed under `run --` is at least 0.98 of the bare script's, by the same clock. The
speed of a machine may change within seconds, so both sides of a pair run at once, each with all its processes on a core
of its own, and change cores from pair to pair; steps count while both train.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":
    # As a script, Python looks for modules beside this file only.
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import as_installed
from benchmarks.budget import Row, print_table

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
SKIPPED = 5
CLOCKS_PERCENT, SLOWEST = 2.0, 0.98


def row(name: str, python: str, pairs: int) -> Row:
    """The steps, both clocks and the speed of one script."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as folder:
        both = [_pair(command(name, python), Path(folder), cores[:: (-1) ** pair]) for pair in range(pairs)]
    counts = {(len(bare), len(own), len(ours)) for bare, own, ours in both}
    clocks = [100 * (_median_s(ours) / _median_s(own) - 1) for _, own, ours in both]
    speeds = [_speed(own, bare) for bare, own, _ in both]
    clock, speed = statistics.median(clocks), statistics.median(speeds)
    steps = " ".join("=".join(map(str, each)) for each in counts)
    step_ms = 1e3 * statistics.median(_median_s(bare) for bare, _, _ in both)
    shown = f"{steps} steps of {step_ms:.1f} ms, clocks {clock:+.2f} %, speed {speed:.3f}"
    shown += f" ({min(speeds):.3f} to {max(speeds):.3f})"
    alike = all(len(set(each)) == 1 for each in counts)
    held = alike and abs(clock) <= CLOCKS_PERCENT and speed >= SLOWEST
    return name, shown, f"within {CLOCKS_PERCENT:g} %, >= {SLOWEST:g}", held


def command(name: str, python: str) -> list[str]:
    """The words that start a script."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name == "nanogpt_ddp" else []
    return [python, *launcher, str(SCRIPTS / f"{name}.py"), *ARGUMENTS[name].split()]


def _pair(script: list[str], folder: Path, cores: list[int]) -> tuple[list[float], list[float], list[float]]:
    """Ends of the steps in seconds: of the bare script, under `run --` by the script's own clock, and as recorded."""
    home = folder / "home"
    bare = _start(script, folder, cores[0])
    run = _start([*as_installed.app(), "run", "--json", "--", *script], folder, cores[1], TRAINFAST_HOME=str(home))
    bare_ends = _ends(_output(bare))
    result = json.loads(_output(run).splitlines()[-1])
    directory = home / "runs" / result["run_id"]
    records = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    return bare_ends, _ends((directory / "output.log").read_text()), [record["t_ns"] / 1e9 for record in records]


def _start(words: list[str], folder: Path, core: int, **more: str) -> subprocess.Popen[str]:
    """Start a command on this core; a script's Trainer leaves its folder below `folder`."""
    return subprocess.Popen(
        ["taskset", "--cpu-list", str(core), *words],
        env={**os.environ, **more},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    if process.returncode:
        sys.exit(f"{process.args!r} ended with exit code {process.returncode}\n{err}")
    return out


def _ends(output: str) -> list[float]:
    """The end of each step, of the line that a script prints last."""
    ends: list[float] = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("[")))
    return ends


def _median_s(ends: list[float]) -> float:
    """The median step; the first steps allocate."""
    return statistics.median(after - before for before, after in pairwise(ends[SKIPPED:]))


def _speed(own: list[float], bare: list[float]) -> float:
    """Steps a second of one side as a share of the other's, while both train."""
    begin, end = max(own[SKIPPED], bare[SKIPPED]), min(own[-1], bare[-1])
    during = [[each for each in side if begin <= each <= end] for side in (own, bare)]
    own_rate, bare_rate = ((len(side) - 1) / (side[-1] - side[0]) for side in during)
    return own_rate / bare_rate


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
