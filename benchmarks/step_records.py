"""The cost of the step records to a training: blocks of steps with and without them, in turn, in one process.

    python -m benchmarks.step_records [--pairs 30]

One model is built once; a block with records has the real clock, memory peaks and file, a block without has none of
them. The order within a pair alternates, so that drift of the machine falls on both sides alike.
"""

import importlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.meter import Row, at_most, options, print_table

from trainfast_runner.machine.training_python import WORKER_FOLDER
from trainfast_runner.records.home import cache_directory
from trainfast_runner.settings.spec import resolve

# At import, because processes that the worker starts import this file again and unpickle the worker's classes.
sys.path.insert(0, str(WORKER_FOLDER))
importlib.import_module("bootstrap")

BUDGET_PERCENT = 1.0
BLOCK_STEPS = 10


def rows(pairs: int = 30) -> list[Row]:
    """The share by which records lengthen a step of tiny-llama: what, measured, budget, held."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = _training(Path(folder), (2 * pairs + 2) * BLOCK_STEPS)
        prepared.memory.start(prepared.spec.strict_steps)
        recorder = prepared.build()
        nothing = SimpleNamespace(begin_step=_nothing, enter=_nothing, end_step=_nothing)
        recorders = {"with": recorder, "without": nothing}

        def seconds(name: str) -> float:
            knobs, began_s = replace(prepared.state.knobs, steps=BLOCK_STEPS), time.perf_counter()
            prepared.state.engine.train(knobs, prepared.state.batches, recorders[name])
            return time.perf_counter() - began_s

        for name in recorders:
            seconds(name)
        blocks = [
            {name: seconds(name) for name in ("with", "without")[:: 1 if pair % 2 else -1]} for pair in range(pairs)
        ]
        recorder.flush()
        prepared.memory.free_reserve()
    ratios = [100 * (block["with"] / block["without"] - 1) for block in blocks]
    low, middle, high = statistics.quantiles(ratios, n=4)
    step_ms = 1e3 * statistics.median(block["without"] for block in blocks) / BLOCK_STEPS
    what = f"step records, {pairs} pairs of {BLOCK_STEPS} steps of {step_ms:.1f} ms"
    more = f" of a step (quartiles {low:+.2f} to {high:+.2f})"
    return [at_most(what, middle, BUDGET_PERCENT, "%", digits=2, more=more)]


def _nothing(*_: object) -> None: ...


def _training(folder: Path, steps: int) -> Any:
    """The worker's training of so many steps, which writes into `folder`."""
    log, spec, training, allocator = (
        importlib.import_module(f"trainfast_worker.{name}")
        for name in ("records.record_file", "spec", "training", "memory.allocator")
    )
    asked = resolve("tiny-llama", [f"steps={steps}", "timing_warmup=0"])
    run = {"schema": 1, "run_id": "benchmark", "model": asked.model, "data": asked.data, "knobs": asked.knobs}
    run |= {"device": "cpu", "world_size": 1, "memory_limit_bytes": None, "cache_dir": str(cache_directory())}
    (folder / "run.json").write_text(json.dumps(run))
    return training.Training(folder, spec.read_spec(folder, 0), log.WorkerLog(folder, 0), allocator.Allocator())


if __name__ == "__main__":
    sys.exit(print_table(rows(options(__doc__, pairs=30).parse_args().pairs)))
