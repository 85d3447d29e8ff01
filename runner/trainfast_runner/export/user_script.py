"""The settings of a run of the user's own script: as its command, a preset, or the arguments of its Trainer."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.export.export_text import ExportText, gpu_variables, head_comments, torchrun_comments
from trainfast_runner.export.trainer_command import has_field
from trainfast_runner.export.training_block import TRAINING_ARGS_FILE, block_text
from trainfast_runner.plain_text import comments, file_name, shell_line
from trainfast_runner.records.discovered import FRAMEWORKS
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import read_worker_lines
from trainfast_runner.records.script_in_command import script_index
from trainfast_runner.records.script_run import ScriptAsked
from trainfast_runner.records.worker_lines import ScriptLine, newest_of_first_rank
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.other_tools import trainer_fields
from trainfast_runner.settings.scripts.saving_script import script_preset_text
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.scripts.script_reach import BY_ENVIRONMENT, LAUNCH_KNOBS

VARIABLE_PREFIXES = {"accelerate": "ACCELERATE_", "Lightning": "PL_TRAINER_"}
"""Beginnings of the variables by which a framework takes knobs."""
NO_EXPORT_REASONS = {
    "accelerate": "its launcher is in its command",
    "torchrun": "its launcher is in its command",
    "deepspeed": "its configuration of DeepSpeed is its own",
}
"""The reason that a script's run has no export of that form."""


def user_script_export(run: RunFile, asked: ScriptAsked, directory: Path, to: str) -> ExportText:
    """The run's settings in one of `SCRIPT_FORMS`.

    Raises UserError for another form, and where the script has no Trainer.
    """
    if to not in SCRIPT_FORMS:
        message = f"{run.run_id} ran a script of your own: {NO_EXPORT_REASONS[to]}"
        raise UserError(message, key="--to", allowed=SCRIPT_FORMS)
    return SCRIPT_FORMS[to](
        run, asked, newest_of_first_rank(read_worker_lines(directory), ScriptLine) or ScriptLine(t_ns=0)
    )


def _command(run: RunFile, asked: ScriptAsked, line: ScriptLine) -> ExportText:
    """The command that ran, with the variables that its framework reads and the flags that its Trainer takes."""
    unflagged_knobs, framework = _without_flag(run, asked), line.framework or ""
    command = list(asked.command)
    expressed = BY_ENVIRONMENT.get(framework, ())
    if framework == "HF Trainer":
        fields = trainer_fields(unflagged_knobs)
        if unflagged_knobs.get("compile") == "off":
            fields["torch_compile"] = False
        if fields and (with_flags := _with_trainer_flags(command, fields)) is not None:
            command, expressed = with_flags, tuple(name for name in unflagged_knobs if has_field(name, fields))
    left_out = [name for name in unflagged_knobs if name not in expressed]
    variables = [f"{name}={value}" for name, value in _variables(run, framework).items()]
    start = shell_line(["env", *variables, *command] if variables else command)
    started = f"Started in {run.cwd}. The same run here: {_same_run(run, asked)}"
    # A comment ends with its line.
    head = [*head_comments(run, ("torch",), left_out), *([] if "\n" in started else [started])]
    return ExportText("\n".join([*comments(head), start]), left_out, "run.sh")


def _with_trainer_flags(command: Sequence[str], fields: Mapping[str, object]) -> list[str] | None:
    """The command with these fields as flags after its script, in place of their flags now.

    None for a command without any flag of TrainingArguments, or without a script that could take one.
    """
    index = script_index(command)
    if index is None:
        return None
    start = index + 1
    others: list[str] = []
    given, is_replaced = set(), False
    for word in command[start:]:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            given.add(name)
            is_replaced = name in fields
        if not is_replaced:
            others.append(word)
        # The word after a flag without `=` is its value.
        is_replaced = is_replaced and word.startswith("--") and "=" not in word
    if not given & {*fields, "output_dir"}:
        return None
    # A switch that is off by default needs no flag.
    changed = {name: value for name, value in fields.items() if value is not False or name in given}
    return [*command[:start], *(word for name, value in changed.items() for word in (f"--{name}", str(value))), *others]


def _variables(run: RunFile, framework: str) -> dict[str, str]:
    """Environment variables by which the run chose its devices and the framework took knobs."""
    prefix = VARIABLE_PREFIXES.get(framework)
    variables = {name: value for name, value in run.env.items() if prefix and name.startswith(prefix)}
    if "devices" in run.overrides and "CUDA_VISIBLE_DEVICES" in run.env:
        variables |= gpu_variables(run)
    return variables


def _same_run(run: RunFile, asked: ScriptAsked) -> str:
    """The command line of this program that starts the script with the same settings again."""
    settings = [
        f"{name}={KNOBS_BY_NAME[name].text_of(run.knobs[name])}"
        for name in _asked_knobs(run)
        if name not in asked.flagged
    ]
    options = [("--set", setting) for setting in settings] + list(_options(asked).items())
    return shell_line(["trainfast-tui", "run", *(word for pair in options for word in pair), "--", *asked.command])


def _preset(run: RunFile, asked: ScriptAsked, line: ScriptLine) -> ExportText:
    """A preset of the script: its command as it ran, the flags of its knobs, and the knobs."""
    name, framework = run.preset.removesuffix(".py"), line.framework or ""
    # A known framework refuses a knob that has no flag and that it does not take itself.
    takes_all = framework == "HF Trainer" or _without_flag(run, asked).keys() <= set(BY_ENVIRONMENT.get(framework, ()))
    script = ScriptPreset(
        command=tuple(asked.command),
        flag_words=asked.flag_words,
        knobs={knob_name: run.knobs[knob_name] for knob_name in _asked_knobs(run)},
        title=shlex.join(asked.command),
        cwd=run.cwd,
        framework=framework if framework in FRAMEWORKS and takes_all else "",
    )
    left_out = list(_options(asked))
    head = [f"Cannot be expressed in this format: {', '.join(left_out)}."] if left_out else []
    text = "\n".join([*comments(head), script_preset_text(script, {}).strip()])
    return ExportText(text, left_out, file_name(name, ".toml"))


def _training_block(run: RunFile, asked: ScriptAsked, line: ScriptLine) -> ExportText:
    """The fields that the script's Trainer had, read from its live TrainingArguments."""
    if line.framework != "HF Trainer":
        raise UserError(
            f"{run.run_id} ran a script of your own, whose steps no Trainer took: it has no TrainingArguments",
            key="--to",
            advice="--to command",
        )
    knobs: KnobValues = {}
    unknown: list[str] = []
    for name, value in (line.ran or {}).items():
        if value is None or name not in KNOBS_BY_NAME:
            continue
        try:
            knobs[name] = KNOBS_BY_NAME[name].read(value)
        except UserError as error:
            unknown.append(f"Not understood: {name}={value}: {error.message}.")
    fields = trainer_fields(knobs)
    if run.device == "cpu":
        fields["use_cpu"] = True
    if asked.steps is not None:
        fields["max_steps"] = asked.steps
    launch = torchrun_comments(f"{run.world_size} processes", run.world_size)
    head = [*head_comments(run, ("transformers", "torch"), ()), *unknown, *launch]
    return ExportText(block_text(head, fields), [], TRAINING_ARGS_FILE)


SCRIPT_FORMS: dict[str, Callable[[RunFile, ScriptAsked, ScriptLine], ExportText]] = {
    "training-args": _training_block,
    "command": _command,
    "preset": _preset,
}
"""Values of `--to` for a run of the user's own script."""


def _asked_knobs(run: RunFile) -> list[str]:
    """The knobs that the run was asked for; the memory limit is a trial's alone."""
    return [name for name in run.overrides if name in run.knobs and name != "memory_limit"]


def _without_flag(run: RunFile, asked: ScriptAsked) -> KnobValues:
    """The knobs that reached the script without a flag of its own."""
    names = [name for name in _asked_knobs(run) if name not in (*asked.flagged, *LAUNCH_KNOBS)]
    return {name: run.knobs[name] for name in names}


def _options(asked: ScriptAsked) -> dict[str, str]:
    """The options of `run` that the hooks need for this script, with their values."""
    options = {"--samples-per-step": asked.samples_per_step, "--steps-from-log": asked.steps_from_log}
    return {name: str(value) for name, value in options.items() if value is not None}
