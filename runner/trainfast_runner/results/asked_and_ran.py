"""The settings a run was asked for beside those its live objects had: a difference is an error, not a footnote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainfast_runner.records.json_lines import newest
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.worker_lines import ActualLine, WorkerLine
from trainfast_runner.settings.device_counts import expected_mesh, model_degree
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.worker.catalog import OPTIMIZERS, SCHEDULES, STRATEGIES, OptimizerEntry, StrategyEntry
from trainfast_runner.worker.shared.words import TRIAL

ATTENTION_KERNELS = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
"""Attention kernels by knob value; `auto` is absent, because it allows every kernel."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field whose value as a rank ran it differs from the value asked for."""

    field: str
    asked: Any
    rank: int
    ran: Any


def mismatches(run: RunFile | None, worker_lines: dict[int, list[WorkerLine]]) -> Iterator[Mismatch]:
    """Yield every mismatch, rank by rank. A field that the worker could not read is not compared.

    Yields none for a process that tried settings, whose `run` has only the first, and for a user's own script, which
    may override a knob: its result names those.
    """
    if run is None or run.role == TRIAL or run.script is not None:
        return
    for rank, lines in sorted(worker_lines.items()):
        ran = newest(lines, ActualLine)
        if ran is None:
            continue
        for field, expected, actual in _pairs(run, ran):
            if expected is not None and actual is not None and expected != actual:
                yield Mismatch(field, expected, rank, actual)


def first_difference(run: RunFile | None, worker_lines: dict[int, list[WorkerLine]]) -> str | None:
    """The first difference as a sentence; None when there is none."""
    for mismatch in mismatches(run, worker_lines):
        return f"{mismatch.field}: asked for {mismatch.asked}, but rank {mismatch.rank} ran {mismatch.ran}"
    return None


def _pairs(run: RunFile, ran: ActualLine) -> list[tuple[str, Any, Any]]:
    """Every field's name, its value as asked and as it ran; a strategy or optimizer of a newer version has none."""
    knobs = run.knobs
    strategy = STRATEGIES.get(str(knobs.get("strategy")))
    optimizer = OPTIMIZERS.get(str(knobs.get("optimizer")))
    precision = str(knobs.get("precision"))
    formats = PRECISIONS.get(precision)
    param_dtype = compute_dtype = None
    if formats is not None:
        compute_dtype = formats.compute_dtype
        # DeepSpeed keeps its fp32 copy of the weights in the optimizer.
        param_dtype = compute_dtype if strategy is not None and strategy.is_zero else formats.param_dtype
    return [
        ("world_size", run.world_size, ran.world_size),
        ("device", run.device, None if ran.device is None else ran.device.partition(":")[0]),
        *(_strategy_pairs(strategy, run, ran) if strategy is not None else ()),
        (f"precision={precision} (param_dtype)", param_dtype, ran.param_dtype),
        (f"precision={precision} (compute_dtype)", compute_dtype, ran.compute_dtype),
        *(_optimizer_pairs(optimizer, strategy, ran) if optimizer is not None else ()),
        ("checkpointing", knobs.get("checkpointing"), ran.checkpointing),
        ("engine", knobs.get("engine"), ran.engine),
        (f"attention={knobs.get('attention')}", ATTENTION_KERNELS.get(str(knobs.get("attention"))), ran.attention),
        (f"compile={knobs.get('compile')} (compiled)", knobs.get("compile", "off") != "off", ran.compiled),
    ]


def _strategy_pairs(strategy: StrategyEntry, run: RunFile, ran: ActualLine) -> list[tuple[str, Any, Any]]:
    knobs, name = run.knobs, f"strategy={strategy.name}"
    wrapper, stages = strategy.wrapper, None
    schedule = SCHEDULES.get(str(knobs.get("pp_schedule")))
    if strategy.is_pipeline and schedule is not None:
        wrapper = schedule.wrapper
        stages = model_degree(knobs) * schedule.stages_per_rank
    wrapper_ran = None if ran.wrapper is None else "+".join(sorted(ran.wrapper.split("+")))
    return [
        (f"{name} (wrapper)", wrapper, wrapper_ran),
        ("pipeline_stages", stages, ran.pipeline_stages),
        ("mesh", expected_mesh(knobs, run.devices_used), ran.mesh),
        (f"{name} (zero_stage)", strategy.zero_stage, ran.zero_stage),
        ("reshard", knobs.get("reshard") if "reshard" in strategy.knobs else None, ran.reshard),
    ]


def _optimizer_pairs(
    optimizer: OptimizerEntry, strategy: StrategyEntry | None, ran: ActualLine
) -> list[tuple[str, Any, Any]]:
    expected_class = optimizer.class_name
    # DeepSpeed has an AdamW of its own for offloaded states.
    if expected_class == "AdamW" and strategy is not None and strategy.offloads and ran.optimizer == "DeepSpeedCPUAdam":
        expected_class = ran.optimizer
    return [
        ("optimizer", expected_class, ran.optimizer),
        (f"optimizer={optimizer.name} (implementation)", optimizer.implementation, ran.optimizer_implementation),
    ]
