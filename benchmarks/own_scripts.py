"""What `run -- COMMAND` costs a script: the hooks of a step, `import torch`, and whole runs beside the bare script.

    python -m benchmarks.own_scripts [--pairs 7]

The sides alternate, so that drift of the machine falls on both alike. `WORK` measures its own steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import as_installed
from benchmarks.budget import Row, at_most, print_table

from trainfast_runner.records.home import Home
from trainfast_runner.running.scripts.script_plan import DOOR

HOOKS_US = 15.0
IMPORT_MS = 20.0
SLOWEST = 0.98
EMPTY_STEPS = 20_000
WORK_STEPS = 60
EMPTY = f"""
import time, torch
from torch.utils.data import DataLoader, TensorDataset

class Still(torch.optim.SGD):
    def step(self, closure=None):
        pass

torch.set_num_threads(1)
model = torch.nn.Linear(1, 1)
optimizer = Still(model.parameters(), lr=1.0)
batches = iter(DataLoader(TensorDataset(torch.ones({EMPTY_STEPS} + 10, 1)), batch_size=1))
for step in range({EMPTY_STEPS}):
    if step == 10:
        begun = time.process_time()
    model(*next(batches))
    optimizer.step()
print((time.process_time() - begun) / ({EMPTY_STEPS} - 10))
"""
"""Prints the CPU seconds of a step that has a batch, a forward pass and an optimizer that does nothing."""
IMPORT = """
import time
begun = time.process_time()
import torch
print(time.process_time() - begun)
"""
WORK = f"""
import statistics, time, torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
ends = []
for (batch,) in DataLoader(TensorDataset(torch.randn(128 * {WORK_STEPS}, 512)), batch_size=128):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    ends.append(time.perf_counter())
print(statistics.median(after - before for before, after in zip(ends[5:], ends[6:])))
"""
"""Prints the median seconds of its steps, about 20 ms each."""


def rows(pairs: int) -> list[Row]:
    """The three budgets: what, measured, budget, held."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        hooks, imports, speeds = [], [], []
        for pair in range(pairs):
            hooks.append(_difference(base, EMPTY, pair) * 1e6)
            imports.append(_difference(base, IMPORT, pair) * 1e3)
            speeds.append(_speed(base, pair))
    speed = statistics.median(speeds)
    spread = f" (pairs {min(speeds):.3f} to {max(speeds):.3f})"
    return [
        at_most("hooks of a step", statistics.median(hooks), HOOKS_US, "us", digits=1),
        at_most("import torch, longer by", statistics.median(imports), IMPORT_MS, "ms", digits=1),
        ("speed under run --, of the bare script's", f"{speed:.3f}{spread}", f">= {SLOWEST}", speed >= SLOWEST),
    ]


def _difference(base: Path, script: str, pair: int) -> float:
    """Seconds that the script prints with the hooks, less those without."""
    directory = base / f"run-{pair}-{len(script)}"
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps({"script": {"timing_warmup": 3}}))
    hooked = {**os.environ, "PYTHONPATH": str(DOOR), "TRAINFAST_RUN": str(directory)}
    order = [(hooked, 1), (dict(os.environ), -1)]
    return sum(sign * _printed(script, environment) for environment, sign in (order if pair % 2 else order[::-1]))


def _printed(script: str, environment: dict[str, str]) -> float:
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _speed(base: Path, pair: int) -> float:
    """Speed of the steps under `run --` as a share of the bare script's."""
    script = base / "work.py"
    script.write_text(WORK)
    bare = 0.0 if pair % 2 else _printed(WORK, dict(os.environ))
    home = Home(base / "home")
    command = [*as_installed.app(), "run", "--json", "--", sys.executable, str(script)]
    environment = {**os.environ, "TRAINFAST_HOME": str(home.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    supervised = float((home.directory(result["run_id"]) / "output.log").read_text())
    bare = bare or _printed(WORK, dict(os.environ))
    return bare / supervised


def main() -> int:
    """Measure, print, and return 1 unless all budgets held."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.own_scripts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=7)
    return print_table(rows(parser.parse_args().pairs))


if __name__ == "__main__":
    sys.exit(main())
