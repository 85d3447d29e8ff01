"""The JSON that a run gave to DeepSpeed: on its own, and beside TrainingArguments, which give its numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.export.export_text import ExportText
from trainfast_runner.export.trainer_arguments import settings_to_express
from trainfast_runner.records.json_lines import DAMAGE
from trainfast_runner.records.regular_files import read_regular
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.strategy_of_run import strategy_of

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
