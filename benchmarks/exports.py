"""Speed of each form of export, run as exported in a script, beside runs of the same engine: A B B A, A the run.

    python benchmarks/exports.py [--rounds 2] [--forms training-args accelerate]

The scripts are those of the tests, on the model of the run.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, Python looks for modules beside this file only.
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import as_installed
from benchmarks.budget import Row, print_table

SCRIPTS = Path(__file__).parents[1] / "tests" / "own_scripts" / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
RUN = ["tiny-llama", "--set", "steps=40", "--set", "data.kind=random", "--set", "seq_len=64"]
ENGINES = {
    "training-args": ["engine=trainer"],
    "torchrun": ["engine=trainer"],
    "accelerate": ["engine=accelerate"],
    "command": [],
    "preset": [],
    "deepspeed": ["strategy=zero2", "devices=cpu:2"],
}
"""Settings of the run that each form exports."""
BUDGET = (0.9, 1.1)


class Bench:
    """The command line with a home in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "TRAINFAST_HOME": str(folder / "home"), "DS_ACCELERATOR": "cpu"}

    def json(self, *words: str) -> Any:
        """The last line that a command prints; its stderr is ours."""
        place = words.index("--") if "--" in words else len(words)
        command = [*as_installed.app(), *words[:place], "--json", *words[place:]]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])

    def trained(self, settings: list[str]) -> tuple[str, float]:
        """A run's id and samples/s; scripts that start after it find its model in their environment."""
        result = self.json("run", *RUN, *(word for setting in settings for word in ("--set", setting)))
        run = json.loads((self.folder / "home" / "runs" / result["run_id"] / "run.json").read_text())
        model = {name: value for name, value in run["model"].items() if name != "family"}
        knobs = run["knobs"]
        self.environment |= {
            "MODEL": json.dumps(model),
            "SEQ_LEN": str(knobs["seq_len"]),
            "BATCH_SIZE": str(knobs["batch_size"]),
        }
        return result["run_id"], result["throughput"]["samples_per_s"]["median"]

    def proved(self, run_id: str, form: str) -> float:
        """Samples/s of the export as exported."""
        proof = self.json("export", run_id, "--to", form, "--prove", *self._script(run_id, form))["proof"]
        print(f"{form}: {proof}", file=sys.stderr, flush=True)
        shown = self.json("runs", "show", "last")
        return float(shown["throughput"]["samples_per_s"]["median"])

    def _script(self, run_id: str, form: str) -> list[str]:
        """The words behind the options: the script that takes the form, none for one that starts a run by itself."""
        if form in ("command", "preset"):
            return []
        out = Path(tempfile.mkdtemp(dir=self.folder))
        if form == "deepspeed":
            self.json("export", run_id, "--to", form, "-o", str(out))
            return ["--", *TORCHRUN, str(SCRIPTS / "exported_deepspeed.py"), f"--deepspeed={out / 'deepspeed.json'}"]
        if form == "training-args":
            self.json("export", run_id, "--to", form, "-o", str(out))
            script = shutil.copy(SCRIPTS / "exported_trainer.py", out)
            return ["--", sys.executable, str(script)]
        if form == "torchrun":
            return ["--", sys.executable, str(SCRIPTS / "exported_trainer.py"), f"--output_dir={out}"]
        return ["--", sys.executable, str(SCRIPTS / "exported_accelerate.py")]


def row(bench: Bench, form: str, rounds: int) -> Row:
    """The export's speed as a share of the run's, medians of `rounds` times A B B A."""
    runs, exports = [], []
    for _ in range(rounds):
        run_id, speed = bench.trained(ENGINES[form])
        exports += [bench.proved(run_id, form), bench.proved(run_id, form)]
        runs += [speed, bench.trained(ENGINES[form])[1]]
    ratio = statistics.median(exports) / statistics.median(runs)
    a, b = (", ".join(f"{rate:.1f}" for rate in each) for each in (runs, exports))
    shown = f"{ratio:.3f} (samples/s as exported {b}; the run {a})"
    return form, shown, f"{BUDGET[0]:g} to {BUDGET[1]:g}", BUDGET[0] <= ratio <= BUDGET[1]


def main() -> int:
    """Measure, print, and return 1 unless every form ran as fast as its run."""
    forms = [form for form in ENGINES if form != "deepspeed" or find_spec("deepspeed") is not None]
    parser = argparse.ArgumentParser(
        prog="python benchmarks/exports.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--forms", nargs="+", choices=forms, default=forms)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        return print_table([row(bench, form, arguments.rounds) for form in arguments.forms])


if __name__ == "__main__":
    sys.exit(main())
