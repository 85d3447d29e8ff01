"""The settings of a run for a script of one's own: for the Trainer, accelerate, DeepSpeed, as a command or a preset.

A setting without an equivalent there is named in a comment, never silently dropped; a form in which the settings would
start another run is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.export.export_text import ExportText
from trainfast_runner.export.own_command import run_command, user_script_export, whole_preset
from trainfast_runner.export.trainer_script import accelerate_yaml, deepspeed_json, torchrun_command, training_block
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.spec import knobs_of_record, spec_of_record
from trainfast_runner.units import comments

FORMS: dict[str, Callable[[RunFile, KnobValues, Path], ExportText]] = {
    "training-args": training_block,
    "accelerate": accelerate_yaml,
    "deepspeed": deepspeed_json,
    "torchrun": torchrun_command,
    "command": run_command,
    "preset": whole_preset,
}
"""Values of `--to`."""


@dataclass(frozen=True)
class Exported:
    """The text in the form asked for.

    The text of a run that ran out of memory begins with `read_oom_warning` as a comment; a JSON text cannot.
    """

    run_id: str
    to: str
    text: str
    left_out: tuple[str, ...]
    """Knobs not at their defaults that this form cannot express."""
    files: dict[str, str]
    """The texts that `-o` writes, by file name."""


def export_run(run: RunFile, directory: Path, to: str) -> Exported:
    """The run's settings in one of `FORMS`.

    Raises UserError for another, for a setting unknown to this version, and where they would start another run.
    """
    if to not in FORMS:
        raise UserError(f"there is no form {to!r} to export to", key="--to", allowed=FORMS, nearest=nearest(to, FORMS))
    if run.script is not None:
        written = user_script_export(replace(run, knobs=knobs_of_record(run)), run.script, directory, to)
    else:
        spec = spec_of_record(run)
        written = FORMS[to](replace(run, model=spec.model, data=spec.data), spec.knobs, directory)
    text = written.text
    if not written.file.endswith(".json") and (warning := read_oom_warning(run, directory)) is not None:
        text = "\n".join([*comments([f"Warning: {warning}"]), text])
    files = {name: content + "\n" for name, content in {written.file: text, **written.other_files}.items()}
    return Exported(run.run_id, to, text, tuple(written.left_out), files)


def read_oom_warning(run: RunFile, directory: Path) -> str | None:
    """The warning about the settings of a run that ran out of memory; None for any other run."""
    result = read_result(directory)
    if result is None or result.state != "oom":
        return None
    return f"{run.run_id} ran out of memory with these settings: see trainfast-tui runs show {run.run_id}"
