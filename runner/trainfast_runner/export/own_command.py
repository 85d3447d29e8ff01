"""A run's settings for trainfast-tui: as a command, and as a whole preset."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tomlkit

from trainfast_runner.errors import UserError
from trainfast_runner.export import export_text, trainer_script
from trainfast_runner.records.run_directory import read_worker_lines
from trainfast_runner.records.run_file import FRAMEWORKS, RunFile, ScriptAsked, script_index
from trainfast_runner.records.worker_lines import ScriptLine, newest_of_first_rank
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, not_at_default, trainer_fields
from trainfast_runner.settings.saving import preset_text, script_preset_text
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import BY_ENVIRONMENT, LAUNCH_KNOBS
from trainfast_runner.settings.spec import RunSpec, from_preset, read_toml_value, strategy_of
from trainfast_runner.units import comments, file_name, shell_line

MAX_WORD_BYTES = (128 << 10) - 1
"""Longest word of a command, without its closing null byte (MAX_ARG_STRLEN in Linux's binfmts.h)."""


def run_command(run: RunFile, knobs: KnobValues, _directory: Path) -> export_text.ExportText:
    """The command that starts the same run again, and as a comment the one that tells how to start a script like it."""
    own_script = f"For a script of your own: trainfast-tui export {run.run_id} --to torchrun"
    return export_text.ExportText("\n".join([_trainfast_command(run, knobs), *comments([own_script])]), [], "run.sh")


def whole_preset(run: RunFile, knobs: KnobValues, _directory: Path) -> export_text.ExportText:
    """A whole preset with the knobs that are not at their defaults."""
    alone = strategy_of(knobs).one_device and "devices" not in run.overrides
    changed_knobs = {
        name: value
        for name, value in not_at_default(knobs).items()
        if KNOBS_BY_NAME[name].applies(knobs) and not (name == "devices" and alone)
    }
    text = preset_text(run.title or run.preset, run.model, run.data, changed_knobs).strip()
    if hosts := export_text.hosts_words(run):
        text = "\n".join([*comments([f"For as many nodes: trainfast-tui run FILE {shell_line(hosts)}"]), text])
    return export_text.ExportText(text, [], file_name(run.preset, ".toml"))


def _trainfast_command(run: RunFile, knobs: KnobValues) -> str:
    """The command that starts the same run again; a preset without a name is spelled out field by field."""
    reference, spec = _named_preset(run)
    # Naming the model's source again drops every field of the preset's model.
    source = next((key for key in presets.MODEL_SOURCES if key in run.model), None)
    if source is None:
        raise UserError(f"{run.run_id} has no model in its run.json", key="model")
    names_source = spec.model.get(source) != run.model[source] or not spec.model.keys() <= run.model.keys()
    model = dict(sorted(run.model.items(), key=lambda field: field[0] != source)) if names_source else run.model
    words = ["trainfast-tui", "run", reference, *export_text.hosts_words(run)]
    sections = (("model.", model, {} if names_source else spec.model), ("data.", run.data, spec.data))
    for section, fields, preset_fields in sections:
        for name, value in fields.items():
            # Recorded paths are expanded, so they differ from the preset's even where --set did not change them.
            is_same_kind = fields.get("kind") == preset_fields.get("kind")
            is_expanded = name == "paths" and "data.paths" not in run.overrides and is_same_kind
            if value != preset_fields.get(name) and not is_expanded:
                is_plain = isinstance(value, str) and read_toml_value(value) == value
                text = _joined_paths(value) if name == "paths" else value if is_plain else _on_one_line(value)
                words += ["--set", f"{section}{name}={text}"]
    for name, value in knobs.items():
        is_of_machine = name == "watch" or (name == "devices" and not run.nodes)
        if value != spec.knobs[name] and not (is_of_machine and name not in run.overrides):
            words += ["--set", f"{name}={KNOBS_BY_NAME[name].text_of(value)}"]
    return shell_line(words)


def _named_preset(run: RunFile) -> tuple[str, RunSpec]:
    """The preset a command can start from: the run's own where it is known by that name, else a shipped one."""
    try:
        spec = from_preset(*presets.load(run.name))
    except UserError:
        # The preset was a file, named by its path.
        spec = None
    # Such a file may have the name of another preset, whose data a command cannot take back.
    if spec is not None and spec.data.keys() <= run.data.keys():
        return run.name, spec
    return presets.PLAIN_PRESET, from_preset(*presets.load(presets.PLAIN_PRESET))


def _joined_paths(paths: Sequence[object]) -> str:
    """The text that `data.paths` reads as these paths. Raises UserError if no command can hold them."""
    text, message = "+".join(map(str, paths)), None
    if text.split("+") != list(map(str, paths)):
        message = "a path in data.paths contains +, which separates paths"
    elif len(os.fsencode(f"data.paths={text}")) > MAX_WORD_BYTES:
        message = f"data.paths names {len(paths):,} files, too many for a command"
    if message is not None:
        raise UserError(message, key="data.paths", advice="--to preset")
    return text


def _on_one_line(value: object) -> str:
    """A TOML value without line breaks; tomlkit writes a table as lines of their own."""
    if isinstance(value, dict):
        pairs = (f"{tomlkit.item(key).as_string()} = {_on_one_line(entry)}" for key, entry in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_on_one_line, value)) + "]"
    return str(tomlkit.item(value).as_string())


VARIABLE_PREFIXES = {"accelerate": "ACCELERATE_", "Lightning": "PL_TRAINER_"}
"""Beginnings of the variables by which a framework takes knobs."""
NO_EXPORT_REASONS = {
    "accelerate": "its launcher is in its command",
    "torchrun": "its launcher is in its command",
    "deepspeed": "its configuration of DeepSpeed is its own",
}
"""The reason that a script's run has no export of that form."""


def user_script_export(run: RunFile, asked: ScriptAsked, directory: Path, to: str) -> export_text.ExportText:
    """The run's settings in one of `SCRIPT_FORMS`.

    Raises UserError for another form, and where the script has no Trainer.
    """
    if to not in SCRIPT_FORMS:
        message = f"{run.run_id} ran a script of your own: {NO_EXPORT_REASONS[to]}"
        raise UserError(message, key="--to", allowed=SCRIPT_FORMS)
    line = newest_of_first_rank(read_worker_lines(directory), ScriptLine) or ScriptLine(t_ns=0)
    return SCRIPT_FORMS[to](run, asked, line)


def _command(run: RunFile, asked: ScriptAsked, line: ScriptLine) -> export_text.ExportText:
    """The command that ran, with the variables that its framework reads and the flags that its Trainer takes."""
    unflagged_knobs, framework = _without_flag(run, asked), line.framework or ""
    command = list(asked.command)
    expressed = BY_ENVIRONMENT.get(framework, ())
    if framework == "HF Trainer":
        fields = trainer_fields(unflagged_knobs)
        if unflagged_knobs.get("compile") == "off":
            fields["torch_compile"] = False
        named = trainer_script.named_by_version(run, fields)
        if fields and (with_flags := _with_trainer_flags(command, named)) is not None:
            by_field = [name for name in unflagged_knobs if trainer_script.has_field(name, fields)]
            command, expressed = with_flags, (*by_field, *expressed)
    left_out = [name for name in unflagged_knobs if name not in expressed]
    variables = [f"{name}={value}" for name, value in _variables(run, framework).items()]
    start = shell_line(["env", *variables, *command] if variables else command)
    started = f"Started in {run.cwd}. The same run here: {_same_run(run, asked)}"
    # A comment ends with its line.
    head = [*export_text.head_comments(run, ("torch",), left_out), *([] if "\n" in started else [started])]
    return export_text.ExportText("\n".join([*comments(head), start]), left_out, "run.sh")


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
    flags = [word for name, value in changed.items() for word in (f"--{name}", trainer_script.flag_text(value))]
    return [*command[:start], *flags, *others]


def _variables(run: RunFile, framework: str) -> dict[str, str]:
    """Environment variables by which the run chose its devices and the framework took knobs."""
    prefix = VARIABLE_PREFIXES.get(framework)
    variables = {name: value for name, value in run.env.items() if prefix and name.startswith(prefix)}
    variables |= export_text.memory_variables(run)
    if "devices" in run.knobs and "CUDA_VISIBLE_DEVICES" in run.env:
        variables |= export_text.gpu_variables(run)
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


def _preset(run: RunFile, asked: ScriptAsked, line: ScriptLine) -> export_text.ExportText:
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
    return export_text.ExportText(text, left_out, file_name(name, ".toml"))


def _training_block(run: RunFile, asked: ScriptAsked, line: ScriptLine) -> export_text.ExportText:
    """The fields that the script's Trainer had, read from its live TrainingArguments."""
    if line.framework != "HF Trainer":
        message = f"{run.run_id} ran a script of your own, whose steps no Trainer took: it has no TrainingArguments"
        raise UserError(message, key="--to", advice="--to command")
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
    launch = export_text.torchrun_comments(f"{run.world_size} processes", run)
    head = [*export_text.head_comments(run, ("transformers", "torch"), ()), *unknown, *launch]
    text = trainer_script.block_text(head, trainer_script.named_by_version(run, fields))
    return export_text.ExportText(text, [], trainer_script.TRAINING_ARGS_FILE)


SCRIPT_FORMS: dict[str, Callable[[RunFile, ScriptAsked, ScriptLine], export_text.ExportText]] = {
    "training-args": _training_block,
    "command": _command,
    "preset": _preset,
}
"""Values of `--to` for a run of the user's own script."""


def _asked_knobs(run: RunFile) -> list[str]:
    """The knobs that the run was asked for; the memory limit is a trial's alone."""
    knobs, warmup = run.knobs, KNOBS_BY_NAME["timing_warmup"]
    unasked = {"memory_limit": knobs.get("memory_limit"), warmup.name: warmup.default}
    return [name for name, value in knobs.items() if name not in unasked or value != unasked[name]]


def _without_flag(run: RunFile, asked: ScriptAsked) -> KnobValues:
    """The knobs that reached the script without a flag of its own."""
    names = [name for name in _asked_knobs(run) if name not in (*asked.flagged, *LAUNCH_KNOBS)]
    return {name: run.knobs[name] for name in names}


def _options(asked: ScriptAsked) -> dict[str, str]:
    """The options of `run` that the hooks need for this script, with their values."""
    options = {"--samples-per-step": asked.samples_per_step, "--steps-from-log": asked.steps_from_log}
    return {name: str(value) for name, value in options.items() if value is not None}
