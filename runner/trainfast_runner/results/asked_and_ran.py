"""What was asked beside what the worker's live objects said ran: a difference is an error, not a footnote."""

from __future__ import annotations

from typing import Any

import msgspec

from trainfast_runner.records.run_file import RunFile, WorkerLine
from trainfast_runner.settings.compatibility.pipeline_rules import PIPELINES, STAGES_PER_RANK
from trainfast_runner.settings.compatibility.sharded_rules import mesh_asked
from trainfast_runner.settings.compatibility.zero_rules import STAGE

PARAM_DTYPE = {"fp32": "float32", "tf32": "float32", "fp16": "float32", "bf16": "float32", "bf16-pure": "bfloat16"}
COMPUTE_DTYPE = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "bf16-pure": "bfloat16"}
OPTIMIZER = {
    "adamw": ("AdamW", None),
    "adamw-loop": ("AdamW", "loop"),
    "adamw-foreach": ("AdamW", "foreach"),
    "adamw-fused": ("AdamW", "fused"),
    "adamw-8bit": ("AdamW8bit", None),
    "paged-adamw-8bit": ("PagedAdamW8bit", None),
    "adafactor": ("Adafactor", None),
    "sgd": ("SGD", None),
}
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
"""Absent: `auto`, under which every kernel is what was asked for."""
WRAPPER = {
    "single": "none",
    "dp": "DataParallel",
    "ddp": "DistributedDataParallel",
    "fsdp": "FSDPModule",
    "zero1": "DeepSpeedEngine",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
    "zero2-offload": "DeepSpeedEngine",
    "zero3-offload": "DeepSpeedEngine",
    "tp": "DTensor",
    "naive-mp": "none",
}
SCHEDULE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


def what_ran(worker: dict[int, list[WorkerLine]]) -> WorkerLine | None:
    """The `actual` record of the lowest rank that wrote one, the last where it wrote several, or None."""
    for rank in sorted(worker):
        lines = [line for line in worker[rank] if line.kind == "actual"]
        if lines:
            return lines[-1]
    return None


def first_difference(run: RunFile | None, worker: dict[int, list[WorkerLine]]) -> str | None:
    """The first field in which any rank ran something else than was asked, as a sentence; None when there is none.

    A field that the worker could not read is not compared.
    """
    if run is None:
        return None
    for rank, lines in sorted(worker.items()):
        ran = what_ran({rank: lines})
        if ran is None:
            continue
        for field, asked, found in _pairs(run, ran):
            if asked is not None and found is not None and asked != found:
                return f"{field}: asked for {asked}, but rank {rank} ran {found}"
    return None


def _pairs(run: RunFile, ran: WorkerLine) -> list[tuple[str, Any, Any]]:
    knobs = run.knobs
    precision, strategy = str(knobs.get("precision")), str(knobs.get("strategy"))
    wrapper = _wrapper(strategy)
    pipelines = strategy in PIPELINES
    degree, schedule = int(knobs.get("pp_degree") or 1), str(knobs.get("pp_schedule"))
    if pipelines:
        wrapper = SCHEDULE.get(schedule)
    devices = max(run.world_size, len(run.device_uuids))
    mesh = {"dp": run.world_size // degree, "pp": degree} if pipelines else mesh_asked(knobs, devices)
    name, implementation = OPTIMIZER.get(str(knobs.get("optimizer")), (None, None))
    zero = strategy in STAGE
    # DeepSpeed keeps its fp32 copy of the weights in the optimizer, and has an AdamW of its own for offloaded states.
    param_dtype = (COMPUTE_DTYPE if zero else PARAM_DTYPE).get(precision)
    if zero and ran.optimizer == "DeepSpeedCPUAdam" and strategy.endswith("-offload"):
        name = name if name != "AdamW" else "DeepSpeedCPUAdam"
    found_wrapper = None if ran.wrapper is None else "+".join(sorted(ran.wrapper.split("+")))
    return [
        ("world_size", run.world_size, ran.world_size),
        ("device", run.device, None if ran.device is None else ran.device.partition(":")[0]),
        (f"strategy={strategy} (wrapper)", wrapper, found_wrapper),
        (f"precision={precision} (param_dtype)", param_dtype, ran.param_dtype),
        (f"precision={precision} (compute_dtype)", COMPUTE_DTYPE.get(precision), ran.compute_dtype),
        ("optimizer", name, ran.optimizer),
        (f"optimizer={knobs.get('optimizer')} (implementation)", implementation, ran.optimizer_implementation),
        ("checkpointing", knobs.get("checkpointing"), ran.checkpointing),
        ("engine", knobs.get("engine"), ran.engine),
        (f"attention={knobs.get('attention')}", ATTENTION.get(str(knobs.get("attention"))), ran.attention),
        (f"compile={knobs.get('compile')} (compiled)", knobs.get("compile", "off") != "off", ran.compiled),
        ("pipeline_stages", degree * STAGES_PER_RANK.get(schedule, 1) if pipelines else None, ran.pipeline_stages),
        ("mesh", mesh, ran.mesh),
        (f"strategy={strategy} (zero_stage)", STAGE.get(strategy), ran.zero_stage),
        ("reshard", knobs.get("reshard") if strategy in ("fsdp", "fsdp+tp") else None, ran.reshard),
    ]


def _wrapper(strategy: str) -> str | None:
    """The wrapper's name, parts in alphabetical order; None when it depends on more than the strategy."""
    parts = [WRAPPER.get(part) for part in strategy.split("+")]
    return None if None in parts else "+".join(sorted(part for part in parts if part))


def as_fields(line: WorkerLine, type: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of `line` that `type` has too."""
    return {name: getattr(line, name) for name in type.__struct_fields__}
