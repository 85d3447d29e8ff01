"""Commands that start a script of the user's own as a run was started: plain Python, torchrun or accelerate."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from trainfast_runner.errors import UserError
from trainfast_runner.export.trainer_arguments import overrides, trainer_arguments
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import BY_NAME
from trainfast_runner.settings.world import strategy_of

SCRIPT = "train.py"
LAUNCHED = ("strategy", "devices", "p2p")
"""Knobs that the launcher and the environment express."""
PLACEHOLDER = f"{SCRIPT} is a placeholder: a script that takes transformers' TrainingArguments as flags."
EXPORT_DEEPSPEED = "trainfast-tui export {} --to deepspeed > deepspeed.json"
EXPORT_ACCELERATE = "trainfast-tui export {} --to accelerate > accelerate.yaml"


def script_command(run: RunFile, knobs: KnobValues) -> tuple[str, list[str]]:
    """The command for a script of the Trainer, and the overridden knobs without a flag.

    Raises UserError where the flags would start another run: another strategy, or another precision.
    """
    arguments, left_out = trainer_arguments(run, knobs)
    changing = [name for name in ("strategy", "precision") if name in left_out]
    if changing:
        names = " and ".join(f"{name}={knobs[name]}" for name in changing)
        strategy = strategy_of(knobs)
        accelerate = "--to accelerate, or " if changing == ["strategy"] and strategy.accelerate_type else ""
        raise UserError(
            f"the Trainer has no flag for {names}: a script started like this would be another run",
            key=changing[0],
            advice=f"{accelerate}--to command, which starts the same run here",
        )
    flags = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    words = [*_environment(run, knobs), *_launcher(run), SCRIPT, "--output_dir", "out", *flags]
    without = [name for name in overrides(knobs) if name not in LAUNCHED and not _has_flag(name, arguments)]
    return shlex.join(words), list(dict.fromkeys([*left_out, *without]))


def script_comments(run: RunFile, knobs: KnobValues) -> list[str]:
    """Comment lines: the command that starts a script like this run, or the reason why there is none."""
    try:
        command, left_out = script_command(run, knobs)
    except UserError as error:
        return [f"# For a script of your own: {error.message}."]
    lines = [f"# For a script of your own. {PLACEHOLDER}", f"# {command}"]
    if left_out:
        lines.append(f"# Cannot be expressed by these flags: {', '.join(left_out)}.")
    if strategy_of(knobs).zero:
        lines.append(f"# deepspeed.json: {EXPORT_DEEPSPEED.format(run.run_id)}")
    if run.device == "cuda" or run.world_size == 1:
        lines += [
            f"# With accelerate, in {SCRIPT} as on its command line: {EXPORT_ACCELERATE.format(run.run_id)}",
            f"# accelerate launch --config_file accelerate.yaml {SCRIPT}",
        ]
    return lines


def _launcher(run: RunFile) -> list[str]:
    """torchrun for several processes. One process is plain Python: torchrun would wrap its model in DDP."""
    if run.world_size < 2:
        return ["python"]
    return ["torchrun", "--standalone", "--nproc-per-node", str(run.world_size)]


def _environment(run: RunFile, knobs: KnobValues) -> list[str]:
    """Variables in front of the command: the run's own GPUs, of which the Trainer takes all it sees, and p2p=off."""
    words = [f"CUDA_VISIBLE_DEVICES={','.join(run.device_uuids)}"] if run.device_uuids else []
    words += ["NCCL_P2P_DISABLE=1"] if knobs["p2p"] == "off" else []
    return ["env", *words] if words else []


def _has_flag(name: str, arguments: Mapping[str, object]) -> bool:
    return bool(set(BY_NAME[name].same_as.training_args.split(" / ")) & set(arguments))
