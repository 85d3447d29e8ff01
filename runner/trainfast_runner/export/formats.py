"""The settings of a run for a script of one's own: for the Trainer, accelerate, DeepSpeed, as a command or a preset.

A setting without an equivalent there is named in a comment, never silently dropped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.export.script_command import EXPORT_DEEPSPEED, PLACEHOLDER, script_command, script_comments
from trainfast_runner.export.trainer_arguments import overrides, trainer_arguments
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import BY_NAME
from trainfast_runner.settings.spec import RunSpec, from_preset, spec_of_record
from trainfast_runner.settings.world import strategy_of
from trainfast_runner.worker.catalog_entries import StrategyEntry

PLAIN_PRESET = "tiny-llama"
RECORDED_DEEPSPEED = "deepspeed.json"


@dataclass(frozen=True)
class Exported:
    """The text in the form asked for, and the overridden knobs that this form cannot express."""

    run_id: str
    to: str
    text: str
    left_out: tuple[str, ...]


def export(run: RunFile, directory: Path, to: str) -> Exported:
    """The run's settings in one of `FORMS`. Raises UserError for another."""
    if to not in FORMS:
        raise UserError(f"there is no form {to!r} to export to", key="--to", allowed=FORMS, nearest=nearest(to, FORMS))
    if run.script is not None:
        raise UserError(
            f"{run.run_id} ran a script of your own, whose settings are in its command",
            key=run.run_id,
            advice=f"trainfast-tui run -- {shlex.join(run.script.command)}",
        )
    text, left_out = FORMS[to](run, spec_of_record(run).knobs, directory)
    return Exported(run.run_id, to, text, tuple(left_out))


def _training_args(run: RunFile, knobs: KnobValues, _directory: Path) -> tuple[str, list[str]]:
    """A `TrainingArguments(...)` call; the Trainer's other defaults for clipping and rate are overruled."""
    arguments, left_out = trainer_arguments(run, knobs)
    elsewhere = [
        f"# {name}={BY_NAME[name].show(knobs[name])}: {BY_NAME[name].same_as.training_args}"
        for name in overrides(knobs)
        if name not in (*left_out, "strategy")
        and not set(BY_NAME[name].same_as.training_args.split(" / ")) & set(arguments)
        and (name != "devices" or (name in run.overrides and run.device == "cuda"))
    ]
    if "strategy" not in left_out:
        elsewhere += _process_comments(run, strategy_of(knobs))
    head = [*_heading(run, left_out), *elsewhere]
    lines = ["from transformers import TrainingArguments", "", *head, "args = TrainingArguments("]
    lines += [f"    {name}={value!r}," for name, value in {"output_dir": "out", **arguments}.items()]
    return "\n".join([*lines, ")"]), left_out


def _process_comments(run: RunFile, strategy: StrategyEntry) -> list[str]:
    """Comment lines: how a script of the Trainer gets as many processes."""
    if strategy.one_process and not strategy.one_device:
        return [f"# strategy={strategy.name}: one process that sees {max(2, len(run.device_uuids))} GPUs"]
    if run.world_size < 2:
        return []
    lines = [f"# strategy={strategy.name}: torchrun --standalone --nproc-per-node {run.world_size} SCRIPT"]
    return lines + ([f"# deepspeed.json: {EXPORT_DEEPSPEED.format(run.run_id)}"] if strategy.zero else [])


def _accelerate(run: RunFile, knobs: KnobValues, _directory: Path) -> tuple[str, list[str]]:
    """A file for `accelerate launch --config_file`."""
    strategy, precision = strategy_of(knobs), str(knobs["precision"])
    kind = strategy.accelerate_type or ("NO" if strategy.one_process else "MULTI_GPU")
    on_cpu = run.device == "cpu" and kind in ("NO", "MULTI_GPU")
    if on_cpu and kind == "MULTI_GPU":
        kind = "MULTI_CPU"
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": precision if precision in ("fp16", "bf16") else "no",
        "num_machines": 1,
        "num_processes": run.world_size,
        "use_cpu": on_cpu,
    }
    if kind == "DEEPSPEED":
        # accelerate refuses a precision that deepspeed.json gives too.
        del config["mixed_precision"]
        config["deepspeed_config"] = {"deepspeed_config_file": "deepspeed.json"}
    if kind == "FSDP":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": knobs["reshard"] == "on",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": knobs["checkpointing"] == "full",
        }
    if knobs["compile"] != "off":
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_mode": knobs["compile"]}
    covered = ("precision", "strategy", "devices", "compile", *(("reshard", "checkpointing") if kind == "FSDP" else ()))
    left_out = [name for name in overrides(knobs) if name not in covered]
    left_out += [] if strategy.accelerate_type else ["strategy"]
    left_out += ["precision"] if precision in ("tf32", "bf16-pure") else []
    return "\n".join([*_heading(run, left_out), *_launch_comments(run, kind), *_yaml(config)]), left_out


def _launch_comments(run: RunFile, kind: str) -> list[str]:
    """Comment lines: how accelerate's launcher is to be started."""
    if kind == "MULTI_CPU":
        # Its own launcher starts one process there, whatever num_processes says.
        return [
            f"# Start it with: ACCELERATE_USE_CPU=true torchrun --standalone --nproc-per-node {run.world_size} SCRIPT"
        ]
    lines = [f"# deepspeed.json: {EXPORT_DEEPSPEED.format(run.run_id)}"] if kind == "DEEPSPEED" else []
    if run.device == "cpu" and kind in ("DEEPSPEED", "FSDP"):
        lines.append(f"# For GPUs: on a CPU, where this run was, accelerate does not know {kind}.")
    return lines


def _yaml(config: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in config.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_yaml(value, indent + "  ")]
        else:
            # A JSON scalar is a YAML scalar; `no` is quoted, which YAML 1.1 would read as false.
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return lines


def _deepspeed(run: RunFile, knobs: KnobValues, directory: Path) -> tuple[str, list[str]]:
    """The JSON that the run itself gave to DeepSpeed. Raises UserError for a run that gave none.

    Any other JSON would be another run: DeepSpeed shards what single, ddp and fsdp keep whole or shard otherwise.
    """
    strategy = strategy_of(knobs)
    if not strategy.zero:
        raise UserError(
            f"{run.run_id} ran strategy={strategy.name}, and under DeepSpeed it would be another run",
            key="strategy",
            allowed=[form for form in FORMS if form != "deepspeed"],
            advice="--to training-args, or a run with strategy=zero2",
        )
    config = _recorded(directory / RECORDED_DEEPSPEED)
    if config is None:
        raise UserError(
            f"{run.run_id} ended before it gave DeepSpeed a configuration, so there is none to export",
            key=RECORDED_DEEPSPEED,
            advice=f"trainfast-tui run {run.name}, and the export of that run",
        )
    left_out = [
        name
        for name in overrides(knobs)
        if not any(_has_value(config, path) for path in BY_NAME[name].same_as.deepspeed.split(" / "))
        and (name != "devices" or run.world_size > 1)
    ]
    return json.dumps(config, indent=2), left_out


def _recorded(path: Path) -> dict[str, Any] | None:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _has_value(config: object, path: str) -> bool:
    """True if there is a value under the keys that `path` joins by dots."""
    for key in path.split("."):
        if not isinstance(config, dict) or key not in config:
            return False
        config = config[key]
    return True


def _command(run: RunFile, knobs: KnobValues, _directory: Path) -> tuple[str, list[str]]:
    """The command that starts the same run again, and as comments those that start a script like it."""
    return "\n".join([_own_command(run, knobs), *script_comments(run, knobs)]), []


def _own_command(run: RunFile, knobs: KnobValues) -> str:
    """The command that starts the same run again; a preset without a name is spelled out field by field."""
    reference, spec = _named_preset(run)
    # Naming the model's source anew drops every field of the preset's model.
    source = next((key for key in presets.MODEL_SOURCES if key in run.model), None)
    if source is None:
        raise UserError(f"{run.run_id} has no model in its run.json", key="model")
    anew = spec.model.get(source) != run.model[source] or not spec.model.keys() <= run.model.keys()
    model = dict(sorted(run.model.items(), key=lambda field: field[0] != source)) if anew else run.model
    words = ["trainfast-tui", "run", reference]
    for section, now, before in (("model.", model, {} if anew else spec.model), ("data.", run.data, spec.data)):
        for name, value in now.items():
            if value != before.get(name) and not (name == "paths" and now.get("kind") == before.get("kind")):
                text = "+".join(map(str, value)) if name == "paths" else _toml_text(value)
                words += ["--set", f"{section}{name}={text}"]
    for name, value in knobs.items():
        if value != spec.knobs[name] and not (name in ("devices", "watch") and name not in run.overrides):
            words += ["--set", f"{name}={BY_NAME[name].show(value)}"]
    return shlex.join(words)


def _torchrun(run: RunFile, knobs: KnobValues, _directory: Path) -> tuple[str, list[str]]:
    """The command that starts a script of the Trainer like this run."""
    command, left_out = script_command(run, knobs)
    return "\n".join([*_heading(run, left_out), f"# {PLACEHOLDER}", command]), left_out


def _named_preset(run: RunFile) -> tuple[str, RunSpec]:
    """The preset a command can start from: the run's own where it is known by that name, else a shipped one."""
    try:
        spec = from_preset(*presets.load(run.name))
    except UserError:
        # It was a file by its path.
        spec = None
    # A file by its path may have the name of another preset, whose data a command cannot take back.
    if spec is not None and spec.data.keys() <= run.data.keys():
        return run.name, spec
    return PLAIN_PRESET, from_preset(*presets.load(PLAIN_PRESET))


def _toml_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _preset(run: RunFile, knobs: KnobValues, _directory: Path) -> tuple[str, list[str]]:
    """A preset of its own, whole, with the knobs that are not at their defaults."""
    document = tomlkit.document()
    document["schema"] = presets.SCHEMA
    document["title"] = run.title or run.preset
    document["model"] = run.model
    document["data"] = run.data
    alone = strategy_of(knobs).one_device and "devices" not in run.overrides
    kept = {name: knobs[name] for name in overrides(knobs) if name != "devices" or not alone}
    document["knobs"] = {name: value for name, value in kept.items() if value is not None}
    return tomlkit.dumps(document).strip(), []


def _heading(run: RunFile, left_out: list[str]) -> list[str]:
    lines = [f"# The settings of {run.run_id} ({run.preset})."]
    return [*lines, f"# Cannot be expressed in this format: {', '.join(left_out)}."] if left_out else lines


FORMS: dict[str, Callable[[RunFile, KnobValues, Path], tuple[str, list[str]]]] = {
    "training-args": _training_args,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "torchrun": _torchrun,
    "command": _command,
    "preset": _preset,
}
"""Values of `--to`."""
