"""A run's settings as a `TrainingArguments(...)` call, for a script of the Trainer."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from pprint import pformat

from trainfast_runner.errors import UserError
from trainfast_runner.export.accelerate_yaml import ACCELERATE_FILE, accelerate_yaml
from trainfast_runner.export.export_text import (
    ExportText,
    file_comment,
    gpu_variables,
    head_comments,
    malloc_comments,
    malloc_variables,
    torchrun_comments,
    torchrun_words,
)
from trainfast_runner.export.trainer_arguments import (
    DEEPSPEED_FILE,
    config_for_trainer,
    settings_to_express,
    trainer_arguments,
)
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import strategy_of
from trainfast_runner.units import comments, shell_line
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


SCRIPT_PLACEHOLDER = "train.py"
LAUNCHER_KNOBS = ("strategy", "devices", "p2p")
"""Knobs that the launcher and the environment express."""
PLACEHOLDER_NOTE = (
    f"{SCRIPT_PLACEHOLDER} is a placeholder: a script that takes transformers' TrainingArguments as flags."
)
OUTPUT_FLAG = ("--output_dir", "out")
"""The flag with the folder that the Trainer of transformers 4 asks for."""


def torchrun_command(run: RunFile, knobs: KnobValues, directory: Path) -> ExportText:
    """The command that starts a script of the Trainer like this run. Raises UserError where it would be another."""
    command, left_out = trainer_command(run, knobs)
    other_files = {}
    head = head_comments(run, ("transformers", "torch"), left_out)
    if strategy_of(knobs).is_zero:
        other_files = {DEEPSPEED_FILE: json.dumps(config_for_trainer(run, directory), indent=2)}
        head.append(file_comment(run, DEEPSPEED_FILE, "torchrun"))
    return ExportText("\n".join([*comments([*head, PLACEHOLDER_NOTE]), command]), left_out, "train.sh", other_files)


def trainer_command(run: RunFile, knobs: KnobValues) -> tuple[str, list[str]]:
    """The command for a script of the Trainer, and the knobs not at their defaults without a flag.

    Raises UserError where the flags would start another run.
    """
    arguments, left_out = trainer_arguments(run, knobs)
    if strategy_of(knobs).is_zero:
        arguments["deepspeed"] = DEEPSPEED_FILE
    flags = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    words = [*_environment_words(run, knobs), *_launcher(run), SCRIPT_PLACEHOLDER, *OUTPUT_FLAG, *flags]
    unexpressed_knobs = [
        name for name in settings_to_express(knobs) if name not in LAUNCHER_KNOBS and not has_field(name, arguments)
    ]
    return shell_line(words), list(dict.fromkeys([*left_out, *unexpressed_knobs]))


def trainer_comments(run: RunFile, knobs: KnobValues, directory: Path) -> list[str]:
    """Comments: the command that starts a script like this run, or the reason there is none."""
    try:
        command, left_out = trainer_command(run, knobs)
    except UserError as error:
        return [f"For a script of your own: {error.message}."]
    lines = [f"For a script of your own. {PLACEHOLDER_NOTE}", command]
    if left_out:
        lines.append(f"Cannot be expressed by these flags: {', '.join(left_out)}.")
    if strategy_of(knobs).is_zero:
        lines.append(file_comment(run, DEEPSPEED_FILE, "torchrun"))
    try:
        accelerate_yaml(run, knobs, directory)
    except UserError:
        return lines
    with_accelerate = f"trainfast-tui export {run.run_id} --to accelerate -o DIR"
    return [
        *lines,
        f"With accelerate, in {SCRIPT_PLACEHOLDER} as on its command line: {with_accelerate}",
        f"accelerate launch --config_file {ACCELERATE_FILE} {SCRIPT_PLACEHOLDER}",
    ]


def has_field(name: str, arguments: Mapping[str, object]) -> bool:
    """True if one of these fields of TrainingArguments expresses the knob."""
    return any(field in arguments for field in KNOBS_BY_NAME[name].same_as.trainer_fields)


def _launcher(run: RunFile) -> list[str]:
    """torchrun for several processes. One process is plain Python: torchrun would wrap its model in DDP."""
    if run.world_size < 2:
        return ["python"]
    return torchrun_words(run.world_size)


def _environment_words(run: RunFile, knobs: KnobValues) -> list[str]:
    """Return the words that set variables: the run's GPUs (the Trainer takes all visible ones), p2p=off, malloc."""
    words = [f"{name}={value}" for name, value in gpu_variables(run).items()] if run.device_uuids else []
    words += ["NCCL_P2P_DISABLE=1"] if knobs["p2p"] == "off" else []
    words += [f"{name}={value}" for name, value in malloc_variables(run).items()]
    return ["env", *words] if words else []
