"""A run's settings for a script of the Trainer: `TrainingArguments(...)`, accelerate's file, DeepSpeed's."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

import yaml

from trainfast_runner.errors import UserError
from trainfast_runner.export import export_text
from trainfast_runner.records.json_lines import read_cached
from trainfast_runner.records.run_directory import read_worker_lines
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.worker_lines import ActualLine, newest_of_first_rank
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, compile_mode, not_at_default, trainer_fields
from trainfast_runner.settings.precisions import ACCELERATE_NAMES, TRAINER_PRECISIONS
from trainfast_runner.settings.spec import strategy_of
from trainfast_runner.units import comments, shell_line
from trainfast_runner.worker import catalog

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
    left_out = [name for name in settings_to_express(knobs) if not _has_trainer_words(name, knobs)]
    left_out += [] if catalog.OPTIMIZERS[str(knobs["optimizer"])].trainer_name else ["optimizer"]
    # Before 5.23 the fields cannot name a part of the layers.
    ran = catalog.levers_of_fields(named_by_version(run, fields).get)["checkpointing"]
    left_out += ["checkpointing"] if ran != knobs["checkpointing"] and "checkpointing" not in left_out else []
    return fields, left_out


def named_by_version(run: RunFile, fields: Mapping[str, object]) -> dict[str, object]:
    """The fields by their names in the run's transformers; in the newest if the run had none."""
    version = tuple(map(int, re.findall(r"\d+", run.versions.get("transformers") or "")[:2]))
    return catalog.named_fields(fields, lambda name: not version or version >= catalog.FIRST_VERSIONS.get(name, ()))


def _has_trainer_words(name: str, knobs: KnobValues) -> bool:
    """True if the fields of TrainingArguments, or what stands beside them, have the knob's value."""
    value = catalog.LEVERS[name][knobs[name]] if name in catalog.LEVERS else None
    is_lever_without = value is not None and value.trainer_fields is None and not value.allocator_setting
    return bool(KNOBS_BY_NAME[name].same_as.training_args) and not is_lever_without


def refuse_unsupported_by_trainer(run: RunFile, knobs: KnobValues) -> None:
    """Raise UserError where fields of TrainingArguments would start another run.

    Such a run has another strategy or precision than the Trainer, or another transformers.
    """
    strategy = strategy_of(knobs)
    unsupported = [] if strategy.runs_in_trainer else ["strategy"]
    unsupported += [] if knobs["precision"] in TRAINER_PRECISIONS else ["precision"]
    if unsupported:
        names = " and ".join(f"{name}={knobs[name]}" for name in unsupported)
        accelerate = "--to accelerate, or " if unsupported == ["strategy"] and strategy.accelerate_type else ""
        message = f"the Trainer has no flag for {names}: a script started like this would be another run"
        raise UserError(message, key=unsupported[0], advice=accelerate + export_text.SAME_RUN_HERE)
    transformers = run.versions.get("transformers")
    if transformers and transformers.partition(".")[0] not in TRANSFORMERS_MAJORS:
        message = f"{run.run_id} ran with transformers {transformers}; these fields are those of 4 and 5"
        raise UserError(message, key="transformers", advice=export_text.SAME_RUN_HERE)


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


def deepspeed_json(run: RunFile, knobs: KnobValues, directory: Path) -> export_text.ExportText:
    """The JSON for a script that calls DeepSpeed itself, all in numbers. Raises UserError for a run that gave none.

    Any other JSON would be another run: DeepSpeed shards what single, ddp and fsdp keep whole or shard otherwise.
    """
    strategy = strategy_of(knobs)
    if not strategy.is_zero:
        message = f"{run.run_id} ran strategy={strategy.name}, and under DeepSpeed it would be another run"
        raise UserError(message, key="strategy", advice="--to training-args, or a run with strategy=zero2")
    if knobs["precision"] == "tf32":
        message = f"DeepSpeed's JSON has no precision=tf32: a script with it would be another run than {run.run_id}"
        raise UserError(message, key="precision", advice="--to training-args")
    config = read_recorded_config(run, directory)
    left_out = [
        name
        for name in settings_to_express(knobs)
        if all(_table_with(config, key) is None for key in KNOBS_BY_NAME[name].same_as.deepspeed.split(" / "))
        and (name != "devices" or run.world_size > 1)
    ]
    return export_text.ExportText(json.dumps(config, indent=2), left_out, DEEPSPEED_FILE)


def read_recorded_config(run: RunFile, directory: Path) -> dict[str, Any]:
    """The configuration that the run recorded. Raises UserError if the run ended before it had one."""
    config = read_cached(directory / DEEPSPEED_FILE, dict[str, Any])
    if config is None:
        message = f"{run.run_id} ended before it gave DeepSpeed a configuration, so there is none to export"
        advice = f"trainfast-tui run {run.name}, and the export of that run"
        raise UserError(message, key=DEEPSPEED_FILE, advice=advice)
    return config


def config_for_trainer(run: RunFile, directory: Path) -> dict[str, Any]:
    """The recorded configuration with "auto" for the values of TrainingArguments: one source for each setting."""
    config = read_recorded_config(run, directory)
    for path in FILLED_BY_THE_TRAINER:
        if (table := _table_with(config, path)) is not None:
            table[path.rpartition(".")[2]] = "auto"
    return config


def _table_with(config: Any, path: str) -> dict[str, Any] | None:
    """The table with a value under the last of the keys that `path` joins by dots; None without that value."""
    *sections, key = path.split(".")
    for section in sections:
        config = config.get(section) if isinstance(config, dict) else None
    return config if isinstance(config, dict) and key in config else None


ACCELERATE_FILE = "accelerate.yaml"


def accelerate_yaml(run: RunFile, knobs: KnobValues, directory: Path) -> export_text.ExportText:
    """The YAML. Raises UserError where a script started with it would be another run."""
    kind = _kind(run, knobs)
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": ACCELERATE_NAMES.get(str(knobs["precision"])),
        "num_machines": max(1, len(run.nodes)),
        "num_processes": run.world_size,
        "use_cpu": run.device == "cpu",
    }
    if run.nodes:
        # The file is node 0's: each other node has its own number in it.
        place = {"machine_rank": 0, "rdzv_backend": "c10d", "main_process_port": export_text.TORCHRUN_PORT}
        config |= {**place, "main_process_ip": export_text.first_host(run)}
    if knobs["precision"] == "fp8":
        # accelerate has other libraries for it too.
        config["fp8_config"] = {"backend": "AO"}
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
        dynamo: dict[str, object] = {"dynamo_backend": "INDUCTOR", "dynamo_mode": compile_mode(knobs)}
        if knobs["compile"] == "blocks":
            dynamo["dynamo_use_regional_compilation"] = True
        config["dynamo_config"] = dynamo
    covered = ["precision", "strategy", "devices", "compile", "allocator", *(["reshard"] if kind == "FSDP" else [])]
    covered += ["checkpointing"] if kind == "FSDP" and knobs["checkpointing"] in ("off", "full") else []
    left_out = [name for name in settings_to_express(knobs) if name not in covered]
    head = export_text.head_comments(run, ("accelerate", "torch", *(("deepspeed",) if other_files else ())), left_out)
    head += export_text.memory_comments(run)
    if other_files:
        head.append(export_text.file_comment(run, DEEPSPEED_FILE, "accelerate"))
    return export_text.ExportText(
        "\n".join([*comments(head), yaml.safe_dump(config, sort_keys=False).strip()]),
        left_out,
        ACCELERATE_FILE,
        other_files,
    )


def _kind(run: RunFile, knobs: KnobValues) -> str:
    """accelerate's distributed_type. Raises UserError where it has none for this run."""
    strategy, precision = strategy_of(knobs), str(knobs["precision"])
    kind = strategy.accelerate_type
    if kind is None:
        advice = "--to training-args" if strategy.runs_in_trainer else export_text.SAME_RUN_HERE
        message = f"accelerate has no strategy={strategy.name}: a script started with its file would be another run"
        raise UserError(message, key="strategy", advice=advice)
    if precision == "tf32" or (precision not in ACCELERATE_NAMES and kind != "DEEPSPEED"):
        advice = "--to training-args" if precision == "tf32" else export_text.SAME_RUN_HERE
        message = f"accelerate's file has no precision={precision}: a script started with it would be another run"
        raise UserError(message, key="precision", advice=advice)
    advice = "--to torchrun" if strategy.runs_in_trainer else export_text.SAME_RUN_HERE
    if run.device == "cpu" and run.world_size > 1:
        one_process = "accelerate starts one process on a CPU whatever its file asks"
        raise UserError(f"{one_process}, and {run.run_id} had {run.world_size}", key="devices", advice=advice)
    if run.device == "cpu" and kind != "NO":
        message = f"accelerate runs no {kind} on a CPU, and {run.run_id} is strategy={strategy.name}"
        raise UserError(message, key="strategy", advice=advice)
    return kind


TRAINING_ARGS_FILE = "training_args.py"
INDENT = "    "


def training_block(run: RunFile, knobs: KnobValues, directory: Path) -> export_text.ExportText:
    """The call; the Trainer's other defaults for clipping and rate are overruled.

    Raises UserError where a script with it would be another run.
    """
    arguments, left_out = trainer_arguments(run, knobs)
    has_adapters = knobs["method"] in catalog.WITH_ADAPTERS
    left_out = [name for name in left_out if not (has_adapters and name in ("method", *catalog.ADAPTER_KNOBS))]
    elsewhere = [
        f"{name}={KNOBS_BY_NAME[name].text_of(knobs[name])}: {KNOBS_BY_NAME[name].same_as.training_args}"
        for name in settings_to_express(knobs)
        if name not in (*left_out, "strategy", "method", *catalog.ADAPTER_KNOBS)
        and not has_field(name, arguments)
        and (name != "devices" or (name in run.overrides and run.device == "cuda"))
    ]
    packages = ["transformers", "torch"]
    if strategy_of(knobs).is_zero:
        arguments["deepspeed"] = config_for_trainer(run, directory)
        packages.append("deepspeed")
    launch = [*_process_comments(run, strategy_of(knobs)), *export_text.memory_comments(run)]
    head = [*export_text.head_comments(run, packages, left_out), *elsewhere, *launch]
    text = block_text(head, named_by_version(run, arguments))
    if has_adapters:
        text += "\n\n" + _adapter_block(run, knobs, directory)
    return export_text.ExportText(text, left_out, TRAINING_ARGS_FILE)


def _adapter_block(run: RunFile, knobs: KnobValues, directory: Path) -> str:
    """The lines that give a script's model the adapters of the run; the model's own name is the script's.

    Raises UserError for a run that ended before it had a model, which alone knows the names of its layers.
    """
    actual = newest_of_first_rank(read_worker_lines(directory), ActualLine)
    if actual is None or not actual.adapted_layers:
        message = f"{run.run_id} ended before its model had adapters, so the names of their layers are unknown"
        raise UserError(message, key="lora_targets", advice=f"trainfast-tui run {run.name}, and the export of that run")
    packages = [f"{name} {run.versions[name]}" for name in ("peft", "bitsandbytes") if run.versions.get(name)]
    rank = knobs["lora_rank"]
    config = {"r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "target_modules": actual.adapted_layers}
    versions = f" ({', '.join(packages)})" if packages else ""
    lines = [f"# Before the Trainer gets the model: model = with_adapters(model){versions}"]
    if knobs["method"] == "qlora":
        dtype = "float16" if knobs["precision"] == "fp16" else "bfloat16"
        bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        lines += ["import torch", "from transformers import BitsAndBytesConfig", "", "bits = BitsAndBytesConfig("]
        lines += [*(_argument(*argument) for argument in bits.items())]
        lines += [f"{INDENT}bnb_4bit_compute_dtype=torch.{dtype},", ")"]
        lines += ["# model = AutoModelForCausalLM.from_pretrained(..., quantization_config=bits)", ""]
    preparing = ", prepare_model_for_kbit_training" if knobs["method"] == "qlora" else ""
    lines += [f"from peft import LoraConfig, get_peft_model{preparing}", "", "lora = LoraConfig("]
    lines += [_argument(name, value) for name, value in config.items()]
    # peft would checkpoint every layer, whatever the Trainer was asked for.
    kept = "prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)"
    prepared = kept if preparing else "model"
    return "\n".join(
        [*lines, ")", "", "", "def with_adapters(model):", f"{INDENT}return get_peft_model({prepared}, lora)"]
    )


def block_text(head: Sequence[str], arguments: Mapping[str, object]) -> str:
    """The call with these comments above it; each argument on lines of its own."""
    lines = ["from transformers import TrainingArguments", "", *comments(head), "args = TrainingArguments("]
    lines += [_argument(name, value) for name, value in {"output_dir": "out", **arguments}.items()]
    return "\n".join([*lines, ")"])


def _argument(name: str, value: object) -> str:
    text = pformat(value, width=100, sort_dicts=False) if isinstance(value, dict) else repr(value)
    return textwrap.indent(f"{name}={text},", INDENT)


def _process_comments(run: RunFile, strategy: catalog.StrategyEntry) -> list[str]:
    """Comments: the command that gives a script of the Trainer as many processes."""
    if strategy.one_process and not strategy.one_device:
        return [f"strategy={strategy.name}: one process that sees {max(2, len(run.device_uuids))} GPUs"]
    return export_text.torchrun_comments(f"strategy={strategy.name}", run)


SCRIPT_PLACEHOLDER = "train.py"
LAUNCHER_KNOBS = ("strategy", "devices", "p2p", "allocator")
"""Knobs that the launcher and the environment express."""
PLACEHOLDER_NOTE = (
    f"{SCRIPT_PLACEHOLDER} is a placeholder: a script that takes transformers' TrainingArguments as flags."
)
OUTPUT_FLAG = ("--output_dir", "out")
"""The flag with the folder that the Trainer of transformers 4 asks for."""


def torchrun_command(run: RunFile, knobs: KnobValues, directory: Path) -> export_text.ExportText:
    """The command that starts a script of the Trainer like this run. Raises UserError where it would be another."""
    arguments, without_field = trainer_arguments(run, knobs)
    other_files = {}
    if strategy_of(knobs).is_zero:
        arguments["deepspeed"] = DEEPSPEED_FILE
        other_files = {DEEPSPEED_FILE: json.dumps(config_for_trainer(run, directory), indent=2)}
    named = named_by_version(run, arguments).items()
    flags = [word for name, value in named for word in (f"--{name}", flag_text(value))]
    # One process is plain Python: torchrun would wrap its model in DDP.
    launcher = export_text.torchrun_words(run) if run.world_size > 1 else ["python"]
    words = [*_environment_words(run, knobs), *launcher, SCRIPT_PLACEHOLDER, *OUTPUT_FLAG, *flags]
    unexpressed_knobs = [
        name for name in settings_to_express(knobs) if name not in LAUNCHER_KNOBS and not has_field(name, arguments)
    ]
    left_out = list(dict.fromkeys([*without_field, *unexpressed_knobs]))
    head = [*export_text.head_comments(run, ("transformers", "torch"), left_out), PLACEHOLDER_NOTE]
    head += [export_text.file_comment(run, name, "torchrun") for name in other_files]
    return export_text.ExportText("\n".join([*comments(head), shell_line(words)]), left_out, "train.sh", other_files)


def flag_text(value: object) -> str:
    """A field as its flag takes it: a dictionary in JSON."""
    return json.dumps(value) if isinstance(value, dict) else str(value)


def has_field(name: str, arguments: Mapping[str, object]) -> bool:
    """True if one of these fields of TrainingArguments expresses the knob."""
    return any(field in arguments for field in KNOBS_BY_NAME[name].same_as.trainer_fields)


def _environment_words(run: RunFile, knobs: KnobValues) -> list[str]:
    """Return the words that set variables: the run's GPUs (the Trainer takes all visible ones), p2p=off, malloc."""
    words = [f"{name}={value}" for name, value in export_text.gpu_variables(run).items()] if run.device_uuids else []
    words += ["NCCL_P2P_DISABLE=1"] if knobs["p2p"] == "off" else []
    words += [f"{name}={value}" for name, value in export_text.memory_variables(run).items()]
    return ["env", *words] if words else []
