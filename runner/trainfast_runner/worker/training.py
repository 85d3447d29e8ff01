"""One rank's training, put together in the right order: what is not counted as its memory, the model, the steps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from .allocator import KEPT, Allocator, begin_loader
from .available_memory import available_memory
from .build import attention_of, attention_reason, build_model, check_attention, import_model_code
from .clock import make_clock
from .compilation import CompileWatch, unwrap
from .data.batches import batches_of, mean_tokens, open_samples
from .data.samples import Batch
from .data.whole_texts import CountedBatches, WholeTexts
from .engines import make_engine
from .flops import flops_per_sample
from .invalid import InvalidInput
from .limit_gauge import make_limit_gauge
from .memory_meter import make_memory_meter
from .model_config import check_seq_len, resolve_config
from .objective import Objective
from .observe import ComputeDtype, actual_fields
from .optimizer import import_optimizer_code
from .probing import Prober, orders_of
from .recorder import StepRecorder
from .sdpa_backend import SdpaBackend
from .spec import RankSpec
from .step_log import StepLog
from .stopped import STEP_LOG_PATIENCE_S, keep_last_step_on_sigterm
from .strategies import make_strategy
from .threads import openmp_libraries, wait_policy
from .worker_log import WorkerLog

NO_THREAD = "can't start new thread"
"""Python's error when the memory limit leaves no room for a thread stack; treated as out of memory."""


class Training:
    """A training as its spec asks for it."""

    def __init__(self, run_dir: Path, spec: RankSpec, log: WorkerLog, allocator: Allocator) -> None:
        """Prepare everything that is not the training's own memory: data, loader processes, process group.

        Raises InvalidInput for a spec that cannot work.
        """
        self.run_dir, self.log = run_dir, log
        self.device = pick_device(spec.device)
        if self.device.type == "cpu":
            _record_cpu(spec, log, allocator)
        log.enter("data", f"opening {spec.data.kind} data")
        self.config = resolve_config(spec.model)
        check_seq_len(self.config, spec.data.objective, spec.knobs.seq_len)
        check_attention(spec.knobs, self.device)
        import_model_code(self.config, spec.data.objective)
        import_optimizer_code(spec.knobs.optimizer)
        self.strategy = make_strategy(spec.knobs, self.device)
        # One process loads for all of its devices.
        self.knobs = replace(spec.knobs, batch_size=spec.knobs.batch_size * self.strategy.slices)
        self.spec = spec = replace(spec, knobs=self.knobs)
        self.engine = make_engine(self.knobs, self.strategy, Objective(spec.data.objective))
        self.samples = open_samples(spec, self.config, log)
        self.batches: Iterator[Batch] = iter(())
        if spec.role != "probe":  # a probe opens its own loader, for its own batch size
            begin = begin_loader if self.device.type == "cpu" else None
            self.batches = batches_of(self.samples, self.knobs, self.strategy.rank, self.strategy.ranks, begin)
            if isinstance(self.samples, WholeTexts):
                self.batches = CountedBatches(self.batches)
        self.strategy.start()
        self.memory = make_memory_meter(self.strategy.devices, spec.memory_limit_bytes, allocator, spec.strict_steps)

    def run(self) -> None:
        """Build the model and train, or probe. Raises whatever the training raises."""
        self.log.enter("model", f"building {self.config.model_type} with random weights")
        self.memory.start()
        try:
            if self.spec.role == "probe":
                self._probe()
            else:
                self._train()
        except Exception as error:
            self.log.available = available_memory(self.strategy.devices, self.spec.memory_limit_bytes)
            self.memory.release()
            # If memory ran out, only this process knows how much it had by then.
            self.log.held_bytes = self.memory.held()
            if self.device.type == "cpu" and self.spec.memory_limit_bytes is not None and NO_THREAD in str(error):
                raise MemoryError(f"{error}: memory_limit leaves no room for its stack") from error
            raise
        self.memory.release()
        self.strategy.stop()

    def build(self) -> StepLog:
        """Build the model, wrap it with its optimizer, and open the step log."""
        objective = self.spec.data.objective
        # Padding is no progress: only the tokens of the texts count.
        tokens = round(mean_tokens(self.samples, self.config, self.spec))
        self.model = build_model(self.config, objective, self.knobs, self.device)
        # Counted before the strategy cuts the model into pieces; shapes are enough, there are no weights yet.
        self.flops = flops_per_sample(self.model, objective, tokens, self.knobs.checkpointing)
        self.engine.prepare(self.model)
        if self.log.rank == 0:
            for name, document in self.strategy.documents().items():
                (self.run_dir / name).write_text(json.dumps(document, indent=2) + "\n")
        # Weights are the same on every rank; dropout is not.
        torch.manual_seed(self.knobs.seed + self.strategy.dropout_rank)
        module, _ = self.engine.live()
        is_compiled = module is not unwrap(module)
        self.compute_dtype = ComputeDtype(module, is_compiled)
        self.sdpa = SdpaBackend(attention_of(self.model) == "sdpa" and not is_compiled)
        samples = self.knobs.batch_size * self.knobs.grad_accum
        return StepLog(
            self.run_dir,
            self.log,
            samples,
            self.batches.take_tokens if isinstance(self.batches, CountedBatches) else samples * tokens,
            self.knobs.timing_warmup,
            CompileWatch() if is_compiled else None,
            self.strategy.precision.initial_scale(),
        )

    def write_actual(self) -> None:
        """Record what really runs, read from the live objects."""
        self.log.write(
            "actual",
            engine=self.engine.name,
            sdpa_backend=self.sdpa.name,
            attention_reason=attention_reason(self.model, self.knobs),
            **actual_fields(
                self.model, *self.engine.live(), self.strategy, self.device, self.compute_dtype.name, self.flops
            ),
        )

    def _train(self) -> None:
        """Take the steps. Every step that ended is on record, however the training ends."""
        step_log = self.build()
        keep_last_step_on_sigterm(step_log, self.log, self.device)
        self.write_actual()
        recorder = StepRecorder(make_clock(self.device), self.memory, step_log, self.log, self.write_actual)
        self.log.enter("train")
        began = time.monotonic()
        try:
            self.engine.train(self.knobs, self.batches, recorder)
            step_log.flush()
        except BaseException:
            step_log.flush(patience_s=STEP_LOG_PATIENCE_S)
            raise
        self.log.write(
            "finished",
            steps=self.knobs.steps,
            seconds=time.monotonic() - began,
            scaler=self.strategy.precision.state(),
        )

    def _probe(self) -> None:
        """Try the batch sizes that the parent orders, all on one model."""
        gauge = make_limit_gauge(self.device, self.spec.memory_limit_bytes)
        step_log = self.build()
        keep_last_step_on_sigterm(step_log, self.log, self.device)
        self.write_actual()
        self.log.enter("train", "trying batch sizes")
        # From here on the parent may order.
        self.log.write("probing", room_bytes=gauge.available_bytes())
        Prober(
            self.knobs, self.strategy, self.engine.train, self.samples, gauge, self.memory, self.log, self.write_actual
        ).run(orders_of(self.run_dir, self.spec.search_id or ""))
        self.log.write("finished", steps=0)


def _record_cpu(spec: RankSpec, log: WorkerLog, allocator: Allocator) -> None:
    """Write the `cpu` record: allocator, thresholds and threads that this CPU run's figures come from.

    Raises InvalidInput for a batch search under an allocator whose thresholds are the user's own.
    """
    if spec.role == "probe" and allocator.kept_because is not None:
        raise InvalidInput(
            f"a batch search measures memory by malloc's thresholds, and {allocator.kept_because}", "LD_PRELOAD"
        )
    strict = {None: "strict", 0: "ordinary"}.get(spec.strict_steps, "strict in warm-up")
    log.write(
        "cpu",
        allocator=allocator.name,
        thresholds=KEPT if allocator.kept_because else strict,
        kept_because=allocator.kept_because,
        openmp=openmp_libraries(),
        threads=torch.get_num_threads(),
        wait_policy=wait_policy(os.environ),
    )


def pick_device(name: str) -> torch.device:
    """This rank's device: the CPU, or the GPU at its place in CUDA_VISIBLE_DEVICES.

    Raises InvalidInput when torch sees no GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidInput(
            f"device is {name}, and torch {torch.__version__} sees no CUDA device", "devices", ["cpu"], "cpu"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
