"""The settings of a run for a script of one's own: for the Trainer, accelerate, DeepSpeed, as a command or a preset.

A setting without an equivalent there is named in a comment, never silently dropped; a form in which the settings would
start another run is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.export.accelerate_yaml import accelerate_yaml
from trainfast_runner.export.deepspeed_json import deepspeed_json
from trainfast_runner.export.own_command import command, preset
from trainfast_runner.export.own_script import own_script
from trainfast_runner.export.script_command import torchrun
from trainfast_runner.export.training_block import training_block
from trainfast_runner.export.written import Written
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.spec import spec_of_record

FORMS: dict[str, Callable[[RunFile, KnobValues, Path], Written]] = {
    "training-args": training_block,
    "accelerate": accelerate_yaml,
    "deepspeed": deepspeed_json,
    "torchrun": torchrun,
    "command": command,
    "preset": preset,
}
"""Values of `--to`."""


@dataclass(frozen=True)
class Exported:
    """The text in the form asked for, and the overridden knobs that this form cannot express.

    `files` are the texts that `-o` writes, by file name.
    """

    run_id: str
    to: str
    text: str
    left_out: tuple[str, ...]
    files: dict[str, str]


def export(run: RunFile, directory: Path, to: str) -> Exported:
    """The run's settings in one of `FORMS`. Raises UserError for another, and where they would start another run."""
    if to not in FORMS:
        raise UserError(f"there is no form {to!r} to export to", key="--to", allowed=FORMS, nearest=nearest(to, FORMS))
    if run.script is not None:
        written = own_script(run, run.script, directory, to)
    else:
        written = FORMS[to](run, spec_of_record(run).knobs, directory)
    files = {name: text + "\n" for name, text in {written.file: written.text, **written.beside}.items()}
    return Exported(run.run_id, to, written.text, tuple(written.left_out), files)
