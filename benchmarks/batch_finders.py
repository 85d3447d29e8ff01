"""One batch-size finder of another library, in a process of its own: `python -m benchmarks.batch_finders WHICH ASKED`.

Takes the very steps of the worker under the very limit, and prints one JSON object:
`{"batch_size", "trials", "ooms"}`. ASKED is a JSON object of a `run.json`, the size to start at and the steps a trial.
Lightning is looked for on sys.path; where it is missing the answer is `{"missing": why}`.
"""

import argparse
import importlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainfast_runner.machine.worker_programs import WORKER_FOLDER

# At import, because processes that the worker starts import this file again and unpickle the worker's classes.
sys.path.insert(0, str(WORKER_FOLDER))
importlib.import_module("bootstrap")


class Prepared:
    """Model, optimizer, samples and limit, as the worker has them before its first step."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        names = (
            "data.batches",
            "records.clock",
            "records.recorder",
            "records.worker_log",
            "spec",
            "training",
            "warm.probing",
        )
        allocator = importlib.import_module("trainfast_worker.memory.allocator").Allocator()
        # As in every run with a memory limit, and before torch is imported.
        allocator.set_strict()
        worker = {name: importlib.import_module(f"trainfast_worker.{name}") for name in names}
        self.worker = worker
        (folder / "run.json").write_text(json.dumps(run))
        log = worker["records.worker_log"].WorkerLog(folder, 0)
        self.spec = worker["spec"].read_spec(folder, 0)
        self.training = worker["training"].Training(folder, self.spec, log, allocator)
        self.training.memory.start(self.spec.strict_steps)
        self.training.build()

    def train(self, batch_size: int, steps: int) -> None:
        """So many optimizer steps at this size, by the worker's own loop."""
        training = self.training
        training.strategy.optimizer.zero_grad(set_to_none=True)
        clock = self.worker["records.clock"].make_clock(training.device)
        probe_steps = self.worker["warm.probing"].ProbeSteps()
        recorder = self.worker["records.recorder"].StepRecorder(clock, training.memory, probe_steps, training.log)
        knobs = replace(training.state.knobs, batch_size=batch_size, steps=steps)
        training.state.engine.train(knobs, self.batches(batch_size, steps), recorder)

    def batches(self, batch_size: int, steps: int) -> Iterator[Any]:
        """Micro-batches for so many steps."""
        knobs = replace(self.training.state.knobs, batch_size=batch_size, steps=steps, workers=0)
        batches: Iterator[Any] = self.worker["data.batches"].batches_of(self.training.samples, knobs, 0, 1)
        return batches


def by_accelerate(prepared: Prepared, start: int, steps: int) -> dict[str, Any]:
    """accelerate's `find_executable_batch_size` around the training."""
    from accelerate.utils import find_executable_batch_size

    tried: list[int] = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        prepared.train(batch_size, steps)
        return batch_size

    size = find_executable_batch_size(train, starting_batch_size=start)()
    return {"batch_size": size, "trials": len(tried), "ooms": len(tried) - 1}


def by_lightning(prepared: Prepared, start: int, steps: int) -> dict[str, Any]:
    """Lightning's BatchSizeFinder, through its Tuner, in its own loop over the same model, loss and optimizer."""
    try:
        import lightning.pytorch as pl
        from lightning.pytorch.tuner import Tuner, batch_size_scaling
    except ImportError as error:
        return {"missing": str(error)}
    strategy, objective = prepared.training.strategy, prepared.training.state.engine.objective
    tried: list[int] = []
    ooms: list[bool] = []
    judge = batch_size_scaling.is_oom_error

    def judged(exception: BaseException) -> bool:
        is_oom = bool(judge(exception))
        ooms.append(is_oom)
        return is_oom

    batch_size_scaling.is_oom_error = judged

    class Loader:
        """As many batches as are asked for, of the size that Lightning has set last."""

        def __init__(self, module: Any) -> None:
            self.module = module

        def __iter__(self) -> Iterator[Any]:
            tried.append(self.module.batch_size)
            return itertools.islice(prepared.batches(self.module.batch_size, 1000), None)

    class Training(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = start
            self.model = strategy.module
            self.automatic_optimization = True

        def training_step(self, batch: Any, number: int) -> Any:
            count = objective.count_targets([batch]).clamp(min=1)
            with strategy.precision.autocast():
                return objective.loss_sum(self.model, batch) / count

        def configure_optimizers(self) -> Any:
            return strategy.optimizer

        def train_dataloader(self) -> Any:
            return Loader(self)

    module = Training()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=prepared.training.state.knobs.grad_accum,
        default_root_dir=tempfile.gettempdir(),
    )
    size = Tuner(trainer).scale_batch_size(
        module, mode="binsearch", init_val=start, steps_per_trial=steps, max_trials=25
    )
    # It opens the loader once more than it trains for every size that it sets.
    trials = len([size for size, _ in itertools.groupby(tried)])
    return {"batch_size": size, "trials": trials, "ooms": sum(ooms)}


FINDERS = {"accelerate": by_accelerate, "lightning": by_lightning}


def main() -> None:
    """Find, print, end without tearing anything down."""
    parser = argparse.ArgumentParser(description="One batch-size finder of another library.")
    parser.add_argument("which", choices=FINDERS)
    parser.add_argument("question", type=json.loads, help="JSON object: run, start, steps")
    options = parser.parse_args()
    which, question = options.which, options.question
    with tempfile.TemporaryDirectory() as folder:
        prepared = Prepared(Path(folder), question["run"])
        answer = FINDERS[which](prepared, question["start"], question["steps"])
        prepared.training.memory.free_reserve()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
