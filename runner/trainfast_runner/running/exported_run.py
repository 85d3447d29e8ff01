"""The plan of a run that takes its settings from an export, and starts as the exported text starts it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.export.accelerate_yaml import ACCELERATE_FILE
from trainfast_runner.export.deepspeed_json import DEEPSPEED_FILE
from trainfast_runner.export.export_text import malloc_variables
from trainfast_runner.export.formats import Exported
from trainfast_runner.export.imported import spec_of_command
from trainfast_runner.export.trainer_command import OUTPUT_FLAG, SCRIPT_PLACEHOLDER
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.script_run import ScriptAsked
from trainfast_runner.running.planning import RunPlan, plan_run
from trainfast_runner.running.scripts.command import ScriptCommand, read_command
from trainfast_runner.running.scripts.script_plan import plan_script
from trainfast_runner.settings.scripts import script_preset
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.spec import resolve

STARTS_ALONE = ("command", "preset")
"""Forms that start a run by themselves."""
EXAMPLE = "--prove -- python train.py"


def plan_exported(run: RunFile, exported: Exported, typed: Sequence[str], folder: Path) -> RunPlan:
    """Plan a run of the export whose files are in `folder`, of as many steps as the exported run was asked for.

    `typed` is the command line of the user's own script; a command and a preset start a run without one. Raises
    UserError.
    """
    if exported.to not in STARTS_ALONE:
        return _plan_typed(run, exported, typed, folder)
    if typed:
        raise UserError(f"--to {exported.to} starts the run by itself: no command after --", key="--")
    if run.script is not None:
        return _plan_user_script(run, run.script, exported, folder)
    spec = spec_of_command(exported.text) if exported.to == "command" else resolve(str(_first_file(exported, folder)))
    assert spec is not None, exported.text
    return plan_run(spec, run.python)


def _plan_user_script(run: RunFile, asked: ScriptAsked, exported: Exported, folder: Path) -> RunPlan:
    """Plan the script that ran before, by the exported command or preset."""
    variables: dict[str, str] = {}
    if exported.to == "preset":
        preset = script_preset.load(_first_file(exported, folder))
    else:
        variables, words = _variables_and_words(exported.text)
        preset = ScriptPreset(tuple(words), name=run.preset, cwd=run.cwd)
    return plan_script(
        (),
        [f"timing_warmup={asked.timing_warmup}"],
        preset=preset,
        steps=asked.steps,
        samples_per_step=asked.samples_per_step,
        steps_from_log=asked.steps_from_log,
        variables=variables,
    )


def _plan_typed(run: RunFile, exported: Exported, typed: Sequence[str], folder: Path) -> RunPlan:
    """Plan the user's script, started by the launcher and with the flags of the export."""
    if not typed:
        raise UserError(f"--to {exported.to} is for a script: which one?", key="--prove", advice=EXAMPLE)
    command = read_command(typed)
    variables, words = _exported_command(exported, command, folder)
    settings = ["devices=cpu"] if run.device == "cpu" else []
    if "timing_warmup" in run.knobs:
        settings.append(f"timing_warmup={run.knobs['timing_warmup']}")
    plan = plan_script(words, settings, steps=run.knobs.get("steps"), python=command.interpreter, variables=variables)
    # Threads that spin between their turns take much of a busy machine's speed: both runs wait alike.
    threads = {name: value for name, value in run.env.items() if name.startswith(("OMP_", "KMP_"))}
    return replace(plan, env={**threads, **malloc_variables(run), **plan.env})


def _exported_command(exported: Exported, command: ScriptCommand, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Variables, and the command that starts the user's script with the export.

    A block of Python and a DeepSpeed json are for the script to read: its command stays as typed.
    """
    if exported.to not in ("torchrun", "accelerate"):
        return {}, list(command.typed)
    if not command.script:
        raise UserError(f"there is no script in {shlex.join(command.typed)}", key="--", advice=EXAMPLE)
    if exported.to == "accelerate":
        return {}, ["accelerate", "launch", "--config_file", str(folder / ACCELERATE_FILE), *command.script]
    variables, words = _variables_and_words(exported.text)
    index = words.index(SCRIPT_PLACEHOLDER)
    flags = [str(folder / word) if word == DEEPSPEED_FILE else word for word in words[index + 1 :]]
    if any(word.partition("=")[0] == OUTPUT_FLAG[0] for word in command.script):
        flags = flags[len(OUTPUT_FLAG) :]
    return variables, [*words[:index], *command.script, *flags]


def _variables_and_words(text: str) -> tuple[dict[str, str], list[str]]:
    """The variables before the only command of a shell text, and the command's words."""
    words = shlex.split(text, comments=True)
    if words[0] != "env":
        return {}, words
    end = next(index for index, word in enumerate(words) if index and "=" not in word)
    return {name: value for name, _, value in (word.partition("=") for word in words[1:end])}, words[end:]


def _first_file(exported: Exported, folder: Path) -> Path:
    return folder / next(iter(exported.files))
