"""Puts a training together in the right order, runs it, and writes down what it was."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from .build import build_model, check_attention
from .clock import make_clock
from .data import open_stream
from .invalid import InvalidInput
from .loop import Rig, train
from .memory import make_memory
from .model_config import check_seq_len, resolve_config
from .objective import Objective
from .observe import ComputeDtype, actual_fields
from .optimizer import build_optimizer
from .precision import Precision
from .records import Journal
from .spec import RunSpec
from .step_log import StepLog
from .strategies import make_strategy


def train_once(run_dir: Path, spec: RunSpec, journal: Journal) -> None:
    """Train as `spec` says. Raises InvalidInput for what cannot work, and whatever the training raises.

    Data, process group and thread pools come before the memory baseline, the model and all that follows after it.
    """
    knobs = spec.knobs
    device = pick_device(spec.device)
    precision = Precision(knobs.precision, device)
    journal.enter("data", f"opening {spec.data.kind} data")
    config = resolve_config(spec.model)
    check_seq_len(config, knobs.seq_len)
    check_attention(knobs)
    strategy = make_strategy(knobs.strategy, device)
    stream = open_stream(spec, config, strategy.rank, strategy.ranks, journal)
    strategy.start()
    memory = make_memory(device, spec.memory_limit_bytes)

    journal.enter("model", f"building {config.model_type} with random weights")
    memory.start()
    model = build_model(config, spec.data.objective, knobs, device)
    module = strategy.wrap(model)
    optimizer = build_optimizer(module, knobs)
    # Weights are the same on every rank; dropout is not.
    torch.manual_seed(knobs.seed + strategy.rank)
    dtype = ComputeDtype(model)

    def write_actual() -> None:
        facts = actual_fields(model, module, optimizer, strategy, device, dtype.name, knobs.seq_len)
        journal.write("actual", **facts)

    samples = knobs.batch_size * knobs.grad_accum
    log = StepLog(run_dir, journal, samples, samples * stream.tokens_per_sample, knobs.timing_warmup)
    write_actual()
    journal.enter("train")
    began = time.monotonic()
    rig = Rig(
        knobs=knobs,
        device=device,
        module=module,
        optimizer=optimizer,
        objective=Objective(spec.data.objective),
        precision=precision,
        strategy=strategy,
        batches=stream.batches,
        clock=make_clock(device),
        memory=memory,
        log=log,
        journal=journal,
        after_first_step=write_actual,
    )
    try:
        train(rig)
    finally:
        log.flush()
    journal.write(
        "finished",
        steps=knobs.steps,
        seconds=time.monotonic() - began,
        scaler=precision.scaler.state_dict() if precision.scaler is not None else None,
    )
    strategy.stop()


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
