"""A run's settings as a file for `accelerate launch --config_file`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.export.export_text import SAME_RUN_HERE, ExportText, file_comment, head_comments, malloc_comments
from trainfast_runner.export.trainer_arguments import DEEPSPEED_FILE, read_recorded_config, settings_to_express
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.other_tools import compile_mode
from trainfast_runner.settings.precisions import ACCELERATE_NAMES
from trainfast_runner.settings.spec import strategy_of
from trainfast_runner.units import comments

ACCELERATE_FILE = "accelerate.yaml"


def accelerate_yaml(run: RunFile, knobs: KnobValues, directory: Path) -> ExportText:
    """The YAML. Raises UserError where a script started with it would be another run."""
    kind = _kind(run, knobs)
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": ACCELERATE_NAMES.get(str(knobs["precision"])),
        "num_machines": 1,
        "num_processes": run.world_size,
        "use_cpu": run.device == "cpu",
    }
    other_files = {}
    if kind == "DEEPSPEED":
        # accelerate refuses a precision that deepspeed.json gives too.
        del config["mixed_precision"]
        config["deepspeed_config"] = {"deepspeed_config_file": DEEPSPEED_FILE}
        other_files = {DEEPSPEED_FILE: json.dumps(read_recorded_config(run, directory), indent=2)}
    if kind == "FSDP":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": knobs["reshard"] == "on",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": knobs["checkpointing"] == "full",
        }
    if knobs["compile"] != "off":
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_mode": compile_mode(knobs)}
    covered = ("precision", "strategy", "devices", "compile", *(("reshard", "checkpointing") if kind == "FSDP" else ()))
    left_out = [name for name in settings_to_express(knobs) if name not in covered]
    head = head_comments(run, ("accelerate", "torch", *(("deepspeed",) if other_files else ())), left_out)
    head += malloc_comments(run)
    if other_files:
        head.append(file_comment(run, DEEPSPEED_FILE, "accelerate"))
    return ExportText("\n".join([*comments(head), *_yaml(config)]), left_out, ACCELERATE_FILE, other_files)


def _kind(run: RunFile, knobs: KnobValues) -> str:
    """accelerate's distributed_type. Raises UserError where it has none for this run."""
    strategy, precision = strategy_of(knobs), str(knobs["precision"])
    kind = strategy.accelerate_type
    if kind is None:
        raise UserError(
            f"accelerate has no strategy={strategy.name}: a script started with its file would be another run",
            key="strategy",
            advice="--to training-args" if strategy.runs_in_trainer else SAME_RUN_HERE,
        )
    if precision == "tf32" or (precision not in ACCELERATE_NAMES and kind != "DEEPSPEED"):
        raise UserError(
            f"accelerate's file has no precision={precision}: a script started with it would be another run",
            key="precision",
            advice="--to training-args" if precision == "tf32" else SAME_RUN_HERE,
        )
    instead = "--to torchrun" if strategy.runs_in_trainer else SAME_RUN_HERE
    if run.device == "cpu" and run.world_size > 1:
        raise UserError(
            f"accelerate starts one process on a CPU whatever its file asks, and {run.run_id} had {run.world_size}",
            key="devices",
            advice=instead,
        )
    if run.device == "cpu" and kind != "NO":
        raise UserError(
            f"accelerate runs no {kind} on a CPU, and {run.run_id} is strategy={strategy.name}",
            key="strategy",
            advice=instead,
        )
    return kind


def _yaml(config: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in config.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_yaml(value, indent + "  ")]
        else:
            # A JSON scalar is a YAML scalar; `no` is quoted, which YAML 1.1 would read as false.
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return lines
