"""Six scripts as people write them, bare and under `run --`, unchanged: as many steps, as long, and as fast.

    python benchmarks/script_speeds.py [--pairs 6] [--only plain_torch ...] [--lightning PYTHON]

The scripts of `benchmarks/scripts` keep a clock of their own. A pair is one run of each side, the order alternates. The
recorded steps are compared with the script's own clock over the same steps: medians within 2 %. The speed is that of
the script's clock, under `run --` at least 0.98 of the bare script's. The first steps are left out: they allocate.
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
    with tempfile.TemporaryDirectory() as folder:
        both = [_pair(command(name, python), Path(folder), pair) for pair in range(pairs)]
    counts = {(len(bare), len(own), len(ours)) for bare, own, ours in both}
    clocks = [100 * (_median(ours) / _median(own) - 1) for _, own, ours in both]
    speeds = [_median(bare) / _median(own) for bare, own, _ in both]
    clock, speed = statistics.median(clocks), statistics.median(speeds)
    steps = " ".join("=".join(map(str, each)) for each in counts)
    step_ms = 1e3 * statistics.median(_median(bare) for bare, _, _ in both)
    shown = f"{steps} steps of {step_ms:.1f} ms, clocks {clock:+.2f} %, speed {speed:.3f}"
    shown += f" ({min(speeds):.3f} to {max(speeds):.3f})"
    alike = all(len(set(each)) == 1 for each in counts)
    held = alike and abs(clock) <= CLOCKS_PERCENT and speed >= SLOWEST
    return name, shown, f"within {CLOCKS_PERCENT:g} %, >= {SLOWEST:g}", held


def command(name: str, python: str) -> list[str]:
    """The words that start a script."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name == "nanogpt_ddp" else []
    return [python, *launcher, str(SCRIPTS / f"{name}.py"), *ARGUMENTS[name].split()]


def _pair(script: list[str], folder: Path, pair: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each step but the first: of the bare script, by its own clock under `run --`, and as recorded."""
    bare = [] if pair % 2 else _steps(_output(script, folder))
    home = folder / "home"
    run = [*as_installed.app(), "run", "--json", "--", *script]
    result = json.loads(_output(run, folder, TRAINFAST_HOME=str(home)).splitlines()[-1])
    directory = home / "runs" / result["run_id"]
    own = _steps((directory / "output.log").read_text())
    records = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    return bare or _steps(_output(script, folder)), own, [record["step_ms"] / 1e3 for record in records[1:]]


def _output(words: list[str], folder: Path, **more: str) -> str:
    """What a command prints; a script's Trainer leaves its folder below `folder`."""
    done = subprocess.run(words, env={**os.environ, **more}, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def _steps(output: str) -> list[float]:
    """Seconds of each step but the first, of the line that a script prints last."""
    ends = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("[")))
    return [end - begin for begin, end in pairwise(ends)]


def _median(steps: list[float]) -> float:
    return statistics.median(steps[SKIPPED:])


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
