"""The settings of a run put into the user's own script or shell file, as a unified diff."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.export import onto_defaults, onto_python, onto_shell
from trainfast_runner.export.call_fields import CallFields, trainer_call
from trainfast_runner.export.export_text import torchrun_words
from trainfast_runner.export.onto_defaults import flags_by_knob
from trainfast_runner.export.trainer_arguments import refuse_unsupported_by_trainer
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.other_tools.from_knobs import loader_arguments
from trainfast_runner.settings.precisions import ACCELERATE_NAMES
from trainfast_runner.settings.scripts.script_preset import FlagWords, ScriptPreset
from trainfast_runner.settings.scripts.script_reach import LAUNCH_KNOBS
from trainfast_runner.settings.spec import spec_of_record
from trainfast_runner.units import mebibytes

LONGEST_SCRIPT_BYTES = 1 << 20
"""The largest file that counts as a script."""


@dataclass(frozen=True)
class OntoFile:
    """The diff, empty if the file has these settings; `notes` are sentences on changes that the user has to make."""

    run_id: str
    file: str
    diff: str
    notes: tuple[str, ...]


def onto(run: RunFile, file: Path) -> OntoFile:
    """The diff that puts the run's settings into `file`, a Python script or the shell file that starts one.

    Raises UserError for a file that cannot be read, one without a place for them, and settings that the Trainer lacks.
    """
    knobs = _knobs_to_write(run)
    flag_words = {} if run.script is None else run.script.flag_words
    before, name = _read(file), _diff_name(file)
    if file.suffix == ".py":
        after, notes = _in_python(before, name, knobs, flag_words)
    else:
        after, notes = _in_shell(before, name, knobs, flag_words)
    lines = difflib.unified_diff(_lines(before), _lines(after), name, name)
    diff = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return OntoFile(run.run_id, name, diff, (*notes, *_launch_notes(run)))


def _in_python(text: str, file: str, knobs: KnobValues, flag_words: Mapping[str, FlagWords]) -> tuple[str, list[str]]:
    """The script with settings as defaults of its own flags and the others in its calls; and the notes."""
    flags = flags_by_knob(flag_words, knobs)
    text, notes, declared_flags = onto_defaults.edit_defaults(text, file, dict(flags.values()))
    undeclared_knobs = {
        name: value for name, value in knobs.items() if name not in flags or flags[name][0] not in declared_flags
    }
    if declared_flags and not undeclared_knobs:
        return text, notes
    try:
        text, call_notes = onto_python.edit_calls(text, file, _calls(undeclared_knobs))
    except UserError as error:
        if not declared_flags:
            raise
        call_notes = [f"{', '.join(undeclared_knobs)}: {error.message}"]
    return text, [*notes, *call_notes]


def _in_shell(text: str, file: str, knobs: KnobValues, flag_words: Mapping[str, FlagWords]) -> tuple[str, list[str]]:
    """The shell file with the settings as flags of its command; and the notes."""
    flagged_knobs = {name: value for name, value in knobs.items() if name in flag_words}
    unflagged_knobs = {name: value for name, value in knobs.items() if name not in flag_words}
    preset = ScriptPreset(flag_words=dict(flag_words))
    applied = partial(preset.applied, knobs=flagged_knobs) if flagged_knobs else None
    return onto_shell.edit_command(text, file, trainer_call(unflagged_knobs), applied)


def _diff_name(file: Path) -> str:
    """The path as given. An absolute one below this folder is made relative to it: `git apply` takes no other."""
    below = file.is_absolute() and file.is_relative_to(Path.cwd())
    return str(file.relative_to(Path.cwd()) if below else file)


def _knobs_to_write(run: RunFile) -> KnobValues:
    """The knobs to put into the file: all that a script was run with, of a preset those of speed and memory.

    A preset's rate, schedule, seed and steps belong to its own training, not to the user's. Its optimizer is written:
    kernels of one optimizer train alike, and another one is chosen for its memory.
    """
    if run.script is not None:
        return {name: value for name, value in run.knobs.items() if name in KNOBS_BY_NAME and name not in LAUNCH_KNOBS}
    knobs = spec_of_record(run).knobs
    refuse_unsupported_by_trainer(run, knobs)
    return {name: value for name, value in knobs.items() if KNOBS_BY_NAME[name].has_equivalent_values}


def _calls(knobs: KnobValues) -> list[CallFields]:
    """The calls that may take the settings: the Trainer's, accelerate's, and a plain loop's."""
    accelerator: dict[str, object] = {}
    if "grad_accum" in knobs:
        accelerator["gradient_accumulation_steps"] = knobs["grad_accum"]
    precision = str(knobs.get("precision"))
    if precision in ACCELERATE_NAMES:
        accelerator["mixed_precision"] = ACCELERATE_NAMES[precision]
    return [
        trainer_call(knobs),
        CallFields(("Accelerator",), accelerator, {"gradient_accumulation_steps": 1, "mixed_precision": "no"}),
        CallFields(
            ("DataLoader",),
            loader_arguments(knobs),
            {"num_workers": 0, "pin_memory": False, "prefetch_factor": None},
            order=(
                "dataset",
                "batch_size",
                "shuffle",
                "sampler",
                "batch_sampler",
                "num_workers",
                "collate_fn",
                "pin_memory",
            ),
            displaced={"batch_size": "batch_sampler"},
        ),
    ]


def _launch_notes(run: RunFile) -> list[str]:
    """Notes on the number of processes, which no argument of a script sets."""
    if run.world_size < 2:
        return []
    start = " ".join(torchrun_words(run.world_size))
    return [f"the run had {run.world_size} processes: start the script with {start}"]


def _lines(text: str) -> list[str]:
    """The lines with their ends, cut at line feeds alone as `patch` does: a form feed ends none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}", key="--onto") from None
    if len(content) > LONGEST_SCRIPT_BYTES:
        raise UserError(f"{file} is longer than {mebibytes(LONGEST_SCRIPT_BYTES)}: not a script", key="--onto")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not text in UTF-8: {error.reason}", key="--onto") from None
