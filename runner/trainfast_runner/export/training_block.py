"""A run's settings as a `TrainingArguments(...)` call, for a script of the Trainer."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from pprint import pformat

from trainfast_runner.export.deepspeed_json import config_for_trainer
from trainfast_runner.export.export_text import ExportText, head_comments, malloc_comments, torchrun_comments
from trainfast_runner.export.trainer_arguments import settings_to_express, trainer_arguments
from trainfast_runner.export.trainer_command import has_field
from trainfast_runner.plain_text import comments
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.strategy_of_run import strategy_of
from trainfast_runner.worker.catalog import StrategyEntry

TRAINING_ARGS_FILE = "training_args.py"
INDENT = "    "


def training_block(run: RunFile, knobs: KnobValues, directory: Path) -> ExportText:
    """The call; the Trainer's other defaults for clipping and rate are overruled.

    Raises UserError where a script with it would be another run.
    """
    arguments, left_out = trainer_arguments(run, knobs)
    elsewhere = [
        f"{name}={KNOBS_BY_NAME[name].text_of(knobs[name])}: {KNOBS_BY_NAME[name].same_as.training_args}"
        for name in settings_to_express(knobs)
        if name not in (*left_out, "strategy")
        and not has_field(name, arguments)
        and (name != "devices" or (name in run.overrides and run.device == "cuda"))
    ]
    packages = ["transformers", "torch"]
    if strategy_of(knobs).is_zero:
        arguments["deepspeed"] = config_for_trainer(run, directory)
        packages.append("deepspeed")
    launch = [*_process_comments(run, strategy_of(knobs)), *malloc_comments(run)]
    head = [*head_comments(run, packages, left_out), *elsewhere, *launch]
    return ExportText(block_text(head, arguments), left_out, TRAINING_ARGS_FILE)


def block_text(head: Sequence[str], arguments: Mapping[str, object]) -> str:
    """The call with these comments above it; each argument on lines of its own."""
    lines = ["from transformers import TrainingArguments", "", *comments(head), "args = TrainingArguments("]
    lines += [_argument(name, value) for name, value in {"output_dir": "out", **arguments}.items()]
    return "\n".join([*lines, ")"])


def _argument(name: str, value: object) -> str:
    text = pformat(value, width=100, sort_dicts=False) if isinstance(value, dict) else repr(value)
    return textwrap.indent(f"{name}={text},", INDENT)


def _process_comments(run: RunFile, strategy: StrategyEntry) -> list[str]:
    """Comments: the command that gives a script of the Trainer as many processes."""
    if strategy.one_process and not strategy.one_device:
        return [f"strategy={strategy.name}: one process that sees {max(2, len(run.device_uuids))} GPUs"]
    return torchrun_comments(f"strategy={strategy.name}", run.world_size)
