"""Puts a training together in the right order, runs it, and writes down what it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .allocator import KEPT, Allocator, begin_loader
from .build import attention_of, attention_reason, build_model, check_attention, import_model_code
from .clock import make_clock
from .compilation import CompileWatch, bare
from .data.batches import Samples, batches_of, mean_tokens, open_samples
from .data.samples import Batch
from .data.whole_texts import CountedBatches, WholeTexts
from .engines import Engine, make_engine
from .flops import flops_per_sample
from .invalid import InvalidInput
from .loop import Rig
from .low_memory import memory_left
from .memory import Memory, make_memory
from .model_config import check_seq_len, resolve_config, tokens_per_sample
from .objective import Objective
from .observe import ComputeDtype, actual_fields
from .optimizer import import_optimizer_code
from .precision import Precision
from .probing import make_gauge, orders_of, probe_on_demand, say_ready
from .records import Journal
from .sdpa_backend import SdpaBackend
from .spec import RunSpec
from .step_log import StepLog
from .stopped import STEP_LOG_PATIENCE_S, keep_last_step_on_sigterm
from .strategies import Strategy, make_strategy
from .threads import openmp_libraries, wait_policy

NO_THREAD = "can't start new thread"
"""What Python says where the stack of a thread cannot be had, which under a limit of the data is a lack of memory."""


@dataclass(frozen=True)
class Ground:
    """What stands before the first byte of the training is counted."""

    spec: RunSpec
    config: Any
    device: torch.device
    precision: Precision
    strategy: Strategy
    engine: Engine
    samples: Samples
    batches: Iterator[Batch]
    memory: Memory


def train_once(run_dir: Path, spec: RunSpec, journal: Journal, allocator: Allocator) -> None:
    """Train as `spec` says. Raises InvalidInput for what cannot work, and whatever the training raises."""
    ground = prepare(spec, journal, allocator)
    journal.enter("model", f"building {ground.config.model_type} with random weights")
    ground.memory.start()
    try:
        (probe_on if spec.role == "probe" else train_on)(ground, run_dir, journal)
    except Exception as error:
        journal.left = memory_left(ground.strategy.devices, spec.memory_limit_bytes)
        ground.memory.release()
        # If memory ran out, only this process knows how much it had by then.
        journal.held_bytes = ground.memory.held()
        if spec.device == "cpu" and spec.memory_limit_bytes is not None and NO_THREAD in str(error):
            raise MemoryError(f"{error}: memory_limit leaves no room for its stack") from error
        raise
    ground.memory.release()
    ground.strategy.stop()


def prepare(spec: RunSpec, journal: Journal, allocator: Allocator) -> Ground:
    """Data, loader processes and process group: everything that is not the training's own memory."""
    knobs = spec.knobs
    device = pick_device(spec.device)
    if device.type == "cpu":
        _record_cpu(spec, journal, allocator)
    journal.enter("data", f"opening {spec.data.kind} data")
    config = resolve_config(spec.model)
    check_seq_len(config, spec.data.objective, knobs.seq_len)
    check_attention(knobs, device)
    import_model_code(config, spec.data.objective)
    import_optimizer_code(knobs.optimizer)
    strategy = make_strategy(knobs, device)
    if strategy.slices > 1:
        # One process loads for all of its devices.
        knobs = replace(knobs, batch_size=knobs.batch_size * strategy.slices)
        spec = replace(spec, knobs=knobs)
    precision = strategy.make_precision()
    engine = make_engine(knobs, strategy, device, precision)
    samples = open_samples(spec, config, journal)
    # Probes open loaders of their own, one for each size.
    begin = begin_loader if device.type == "cpu" else None
    batches = iter(()) if spec.role == "probe" else batches_of(samples, knobs, strategy.rank, strategy.ranks, begin)
    strategy.start()
    memory = make_memory(strategy.devices, spec.memory_limit_bytes, allocator, spec.strict_steps)
    return Ground(spec, config, device, precision, strategy, engine, samples, batches, memory)


def _record_cpu(spec: RunSpec, journal: Journal, allocator: Allocator) -> None:
    """Write the `cpu` record: allocator, thresholds and threads that this CPU run's figures come from.

    Raises InvalidInput for a batch search under an allocator whose thresholds are the user's own.
    """
    if spec.role == "probe" and allocator.kept_because is not None:
        raise InvalidInput(
            f"a batch search measures memory by malloc's thresholds, and {allocator.kept_because}", "LD_PRELOAD"
        )
    strict = {None: "strict", 0: "ordinary"}.get(spec.strict_steps, "strict in warm-up")
    journal.write(
        "cpu",
        allocator=allocator.name,
        thresholds=KEPT if allocator.kept_because else strict,
        kept_because=allocator.kept_because,
        openmp=openmp_libraries(),
        threads=torch.get_num_threads(),
        wait_policy=wait_policy(os.environ),
    )


def train_on(ground: Ground, run_dir: Path, journal: Journal) -> None:
    """Build the model and take the steps; every step that ended is on record, however the training ends."""
    rig, log = assemble(ground, run_dir, journal)
    journal.enter("train")
    began = time.monotonic()
    try:
        ground.engine.train(rig)
        log.flush()
    except BaseException:
        log.flush(patience_s=STEP_LOG_PATIENCE_S)
        raise
    journal.write(
        "finished",
        steps=rig.knobs.steps,
        seconds=time.monotonic() - began,
        scaler=ground.precision.state(),
    )


def probe_on(ground: Ground, run_dir: Path, journal: Journal) -> None:
    """Build the model once and try the batch sizes that the parent asks for."""
    gauge = make_gauge(ground.device, ground.spec.memory_limit_bytes)
    rig, _ = assemble(ground, run_dir, journal)
    journal.enter("train", "trying batch sizes")
    say_ready(journal, gauge)
    probe_on_demand(rig, ground.samples, gauge, orders_of(run_dir, ground.spec.search_id or ""), ground.engine.train)
    journal.write("finished", steps=0)


def assemble(ground: Ground, run_dir: Path, journal: Journal) -> tuple[Rig, StepLog]:
    """Build the model and all that a step touches, and the step log apart, which must be flushed at the end."""
    knobs, objective = ground.spec.knobs, ground.spec.data.objective
    model = build_model(ground.config, objective, knobs, ground.device)
    counted = CountedBatches(ground.batches) if isinstance(ground.samples, WholeTexts) else None
    # Counted before the strategy cuts the model into pieces; shapes are enough, there are no weights yet.
    flops = flops_per_sample(model, objective, _length_that_counts(ground), knobs.checkpointing)
    module, optimizer = ground.engine.prepare(model)
    if journal.rank == 0:
        for name, document in ground.strategy.documents().items():
            (run_dir / name).write_text(json.dumps(document, indent=2) + "\n")
    # Weights are the same on every rank; dropout is not.
    torch.manual_seed(knobs.seed + ground.strategy.rank)
    compiled = module is not bare(module)
    dtype = ComputeDtype(module, compiled)
    sdpa = SdpaBackend(attention_of(model) == "sdpa" and not compiled)

    def write_actual() -> None:
        journal.write(
            "actual",
            engine=ground.engine.name,
            sdpa_backend=sdpa.name,
            attention_reason=attention_reason(model, knobs),
            **actual_fields(model, *ground.engine.live(), ground.strategy, ground.device, dtype.name, flops),
        )

    log = _step_log(ground, run_dir, journal, counted, CompileWatch() if compiled else None)
    keep_last_step_on_sigterm(log, journal, ground.device)
    write_actual()
    rig = Rig(
        knobs=knobs,
        device=ground.device,
        module=module,
        optimizer=optimizer,
        objective=Objective(objective),
        precision=ground.precision,
        strategy=ground.strategy,
        batches=counted or ground.batches,
        clock=make_clock(ground.device),
        memory=ground.memory,
        log=log,
        journal=journal,
        after_first_step=write_actual,
    )
    return rig, log


def _step_log(
    ground: Ground, run_dir: Path, journal: Journal, counted: CountedBatches | None, watch: CompileWatch | None
) -> StepLog:
    knobs = ground.spec.knobs
    samples = knobs.batch_size * knobs.grad_accum
    each = tokens_per_sample(ground.config, ground.spec.data.objective, knobs.seq_len)
    tokens = counted.take_tokens if counted else samples * each
    return StepLog(run_dir, journal, samples, tokens, knobs.timing_warmup, watch, ground.precision.initial_scale())


def _length_that_counts(ground: Ground) -> int:
    """Tokens of a sample. Padding is no progress: of whole texts it is the mean length."""
    if isinstance(ground.samples, WholeTexts):
        return round(mean_tokens(ground.samples, ground.config, ground.spec))
    return ground.spec.knobs.seq_len


def pick_device(name: str) -> torch.device:
    """This rank's device: the CPU, or the GPU at its place in CUDA_VISIBLE_DEVICES."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidInput(
            f"device is {name}, and torch {torch.__version__} sees no CUDA device", "devices", ["cpu"], "cpu"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
