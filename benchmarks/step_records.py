"""The cost of the step records to a training: blocks of steps with and without them, in turn, in one process.

    python -m benchmarks.step_records [--pairs 30]

One model is built once; a block with records has the real clock, memory peaks and file, a block without has none of
them. The order within a pair alternates, so that drift of the machine falls on both sides alike.
"""

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.budget import Row, at_most, print_table

from trainfast_runner.machine.worker_programs import WORKER_FOLDER
from trainfast_runner.records.home import cache_directory
from trainfast_runner.settings.spec import resolve

# At import, because processes that the worker starts import this file again and unpickle the worker's classes.
sys.path.insert(0, str(WORKER_FOLDER))
importlib.import_module("bootstrap")

WORKER_MODULES = ("memory.allocator", "spec", "training", "records.worker_log")
BUDGET_PERCENT = 1.0
BLOCK_STEPS = 10


@dataclass(frozen=True)
class Cost:
    """Percent by which records lengthen a step: the median over pairs, and its quartiles."""

    pairs: int
    steps_per_block: int
    step_ms_without: float
    step_ms_with: float
    cost_percent: float
    quartiles_percent: tuple[float, float]


class NoRecorder:
    """Records nothing."""

    def begin_step(self, step: int) -> None:
        """A step begins."""

    def enter(self, phase: str) -> None:
        """A phase begins."""

    def end_step(self, *figures: Any) -> None:
        """A step ends."""


def measure(pairs: int = 30) -> Cost:
    """Train tiny-llama in `pairs` pairs of blocks and compare them pair by pair."""
    with (
        tempfile.TemporaryDirectory() as folder,
        training(Path(folder), (2 * pairs + 2) * BLOCK_STEPS) as (prepared, step_log),
    ):
        recorders = {"with": recorder_of(prepared, step_log), "without": NoRecorder()}

        def train(name: str) -> None:
            prepared.state.engine.train(
                replace(prepared.state.knobs, steps=BLOCK_STEPS), prepared.state.batches, recorders[name]
            )

        for name in recorders:
            train(name)
        ratios, with_ms, without_ms = [], [], []
        for pair in range(pairs):
            seconds = {}
            for name in ("with", "without")[:: 1 if pair % 2 else -1]:
                began = time.perf_counter()
                train(name)
                seconds[name] = time.perf_counter() - began
            ratios.append(100 * (seconds["with"] / seconds["without"] - 1))
            with_ms.append(1e3 * seconds["with"] / BLOCK_STEPS)
            without_ms.append(1e3 * seconds["without"] / BLOCK_STEPS)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Cost(pairs, BLOCK_STEPS, statistics.median(without_ms), statistics.median(with_ms), middle, (low, high))


@contextlib.contextmanager
def training(folder: Path, steps: int, *settings: str) -> Iterator[tuple[Any, Any]]:
    """The worker's training, ready for `steps`, and its step log, both writing into `folder`."""
    worker = {name: importlib.import_module(f"trainfast_worker.{name}") for name in WORKER_MODULES}
    spec = resolve("tiny-llama", [f"steps={steps}", "timing_warmup=0", *settings])
    run = {"run_id": "benchmark", "model": spec.model, "data": spec.data, "knobs": spec.knobs, "device": "cpu"}
    (folder / "run.json").write_text(
        json.dumps(
            {"schema": 1, **run, "world_size": 1, "memory_limit_bytes": None, "cache_dir": str(cache_directory())}
        )
    )
    log = worker["records.worker_log"].WorkerLog(folder, 0)
    worker_spec = worker["spec"].read_spec(folder, 0)
    prepared = worker["training"].Training(folder, worker_spec, log, worker["memory.allocator"].Allocator())
    prepared.memory.start(worker_spec.strict_steps)
    step_log = prepared.build()
    yield prepared, step_log
    step_log.flush()
    prepared.memory.free_reserve()


def recorder_of(prepared: Any, log: Any) -> Any:
    """The worker's own recorder, writing to `log`."""
    recorder, clock = (
        importlib.import_module(f"trainfast_worker.{name}") for name in ("records.recorder", "records.clock")
    )
    return recorder.StepRecorder(clock.make_clock(prepared.device), prepared.memory, log, prepared.log)


def rows(cost: Cost) -> list[Row]:
    """The cost as a row of the table of budgets: what, measured, budget, held."""
    spread = f"{cost.quartiles_percent[0]:+.2f} to {cost.quartiles_percent[1]:+.2f}"
    what = f"step records, {cost.pairs} pairs of {cost.steps_per_block} steps of {cost.step_ms_without:.1f} ms"
    more = f" of a step (quartiles {spread})"
    return [at_most(what, cost.cost_percent, BUDGET_PERCENT, "%", digits=2, more=more)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=30)
    sys.exit(print_table(rows(measure(parser.parse_args().pairs))))
