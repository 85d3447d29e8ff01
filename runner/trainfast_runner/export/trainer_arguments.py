"""A run's knobs as fields of transformers' TrainingArguments, and the knobs that have none."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.export.export_text import SAME_RUN_HERE, ExportText
from trainfast_runner.records.json_lines import DAMAGE, read_regular
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, not_at_default
from trainfast_runner.settings.other_tools import trainer_fields
from trainfast_runner.settings.precisions import FP32_WEIGHTS
from trainfast_runner.settings.spec import strategy_of
from trainfast_runner.worker.catalog import OPTIMIZERS

TRANSFORMERS_MAJORS = ("4", "5")
"""Versions of transformers in which the fields have these names: 6 drops gradient_checkpointing."""


def trainer_arguments(run: RunFile, knobs: KnobValues) -> tuple[dict[str, object], list[str]]:
    """Every field that a knob decides, by name, and the knobs not at their defaults without a field.

    Raises UserError as `refuse_unsupported_by_trainer` does.
    """
    refuse_unsupported_by_trainer(run, knobs)
    fields = trainer_fields(knobs)
    if run.device == "cpu":
        fields["use_cpu"] = True
    left_out = [name for name in settings_to_express(knobs) if not KNOBS_BY_NAME[name].same_as.training_args]
    left_out += [] if OPTIMIZERS[str(knobs["optimizer"])].trainer_name else ["optimizer"]
    return fields, left_out


def refuse_unsupported_by_trainer(run: RunFile, knobs: KnobValues) -> None:
    """Raise UserError where fields of TrainingArguments would start another run.

    Such a run has another strategy or precision than the Trainer, or another transformers.
    """
    strategy = strategy_of(knobs)
    unsupported = [] if strategy.runs_in_trainer else ["strategy"]
    unsupported += [] if knobs["precision"] in FP32_WEIGHTS else ["precision"]
    if unsupported:
        names = " and ".join(f"{name}={knobs[name]}" for name in unsupported)
        accelerate = "--to accelerate, or " if unsupported == ["strategy"] and strategy.accelerate_type else ""
        raise UserError(
            f"the Trainer has no flag for {names}: a script started like this would be another run",
            key=unsupported[0],
            advice=accelerate + SAME_RUN_HERE,
        )
    transformers = run.versions.get("transformers")
    if transformers and transformers.partition(".")[0] not in TRANSFORMERS_MAJORS:
        raise UserError(
            f"{run.run_id} ran with transformers {transformers}; these fields are those of 4 and 5",
            key="transformers",
            advice=SAME_RUN_HERE,
        )


def settings_to_express(knobs: KnobValues) -> list[str]:
    """Knobs not at their defaults that another tool should express, without the knobs of our own run and its timing."""
    own = ("timing_warmup", "watch", "engine")
    return [name for name in not_at_default(knobs) if name not in own and KNOBS_BY_NAME[name].applies(knobs)]


DEEPSPEED_FILE = "deepspeed.json"
FILLED_BY_THE_TRAINER = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
)
"""Values that transformers fills in from TrainingArguments where the JSON says "auto" (its DeepSpeed guide)."""


def deepspeed_json(run: RunFile, knobs: KnobValues, directory: Path) -> ExportText:
    """The JSON for a script that calls DeepSpeed itself, all in numbers. Raises UserError for a run that gave none.

    Any other JSON would be another run: DeepSpeed shards what single, ddp and fsdp keep whole or shard otherwise.
    """
    strategy = strategy_of(knobs)
    if not strategy.is_zero:
        raise UserError(
            f"{run.run_id} ran strategy={strategy.name}, and under DeepSpeed it would be another run",
            key="strategy",
            advice="--to training-args, or a run with strategy=zero2",
        )
    if knobs["precision"] == "tf32":
        raise UserError(
            f"DeepSpeed's JSON has no precision=tf32: a script with it would be another run than {run.run_id}",
            key="precision",
            advice="--to training-args",
        )
    config = read_recorded_config(run, directory)
    left_out = [
        name
        for name in settings_to_express(knobs)
        if not any(_has_value(config, key) for key in KNOBS_BY_NAME[name].same_as.deepspeed_keys)
        and (name != "devices" or run.world_size > 1)
    ]
    return ExportText(json.dumps(config, indent=2), left_out, DEEPSPEED_FILE)


def read_recorded_config(run: RunFile, directory: Path) -> dict[str, Any]:
    """The configuration that the run recorded. Raises UserError if the run ended before it had one."""
    try:
        config = msgspec.json.decode(read_regular(directory / DEEPSPEED_FILE))
    except (OSError, *DAMAGE):
        config = None
    if not isinstance(config, dict):
        raise UserError(
            f"{run.run_id} ended before it gave DeepSpeed a configuration, so there is none to export",
            key=DEEPSPEED_FILE,
            advice=f"trainfast-tui run {run.name}, and the export of that run",
        )
    return config


def config_for_trainer(run: RunFile, directory: Path) -> dict[str, Any]:
    """The recorded configuration with "auto" for the values of TrainingArguments: one source for each setting."""
    config = copy.deepcopy(read_recorded_config(run, directory))
    for path in FILLED_BY_THE_TRAINER:
        *sections, key = path.split(".")
        table: Any = config
        for section in sections:
            table = table.get(section, {})
        if key in table:
            table[key] = "auto"
    return config


def _has_value(config: object, path: str) -> bool:
    """True if there is a value under the keys that `path` joins by dots."""
    for key in path.split("."):
        if not isinstance(config, dict) or key not in config:
            return False
        config = config[key]
    return True
