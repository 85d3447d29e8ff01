"""Records of the hooks in a user's own script: its figures for the result, and the reason that no step was seen."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainfast_runner.records.json_lines import Tail, remaining_records
from trainfast_runner.records.run_directory import RunRecords
from trainfast_runner.records.run_file import FIRST_TORCH, HookLine, Overridden, RunFile, ScriptFigures
from trainfast_runner.records.worker_lines import ScriptLine, newest_of_first_rank
from trainfast_runner.settings.knobs import compile_mode
from trainfast_runner.settings.script_reach import LAUNCH_KNOBS

HOOKS_FILE = "door.jsonl"
WAYS_TO_SEE_STEPS = (
    "steps are seen in three ways: an optimizer of torch.optim (the HF Trainer, Lightning and DeepSpeed have one),"
    " `import trainfast_door; trainfast_door.step()` after each step, or --steps-from-log REGEX"
)
"""The ways to make a script's steps seen."""


def script_figures(directory: Path, records: RunRecords) -> ScriptFigures | None:
    """`script` of the result; None for a preset's run."""
    run = records.run
    if run is None or run.script is None:
        return None
    line = newest_of_first_rank(records.worker_lines, ScriptLine)
    codes = [event.exit_code for event in records.events if event.kind == "exited"]
    figures = ScriptFigures(
        command=run.script.command,
        cwd=run.cwd or None,
        exit_code=codes[-1] if codes else None,
        overridden=_overridden(run, line),
    )
    names = ("framework", "hooks", "samples_from", "unknown", "suppressed", "evaluation_seconds")
    seen = {name: value for name in names if (value := getattr(line, name, None)) is not None}
    return msgspec.structs.replace(figures, **seen)


def read_hook_troubles(directory: Path) -> list[str]:
    """Errors of the hooks themselves, in sentences."""
    return [f"the hooks in the script: {line.detail}" for line in _hook_lines(directory) if line.kind == "trouble"]


def no_step_reason(directory: Path, run: RunFile) -> str:
    """The reason that a script's hooks have reported no step."""
    if run.script is not None and run.script.hooks_blocked is not None:
        return f"{run.script.hooks_blocked}; {WAYS_TO_SEE_STEPS}"
    opened_lines = [line for line in _hook_lines(directory) if line.kind == "opened"]
    if opened_lines:
        return f"torch was imported, but none of its optimizers took a step; {WAYS_TO_SEE_STEPS}"
    unseen = f"no process of the script imported torch {FIRST_TORCH} or newer with trainfast's folder on its path"
    return f"{unseen}; {WAYS_TO_SEE_STEPS}"


def _overridden(run: RunFile, line: ScriptLine | None) -> list[Overridden]:
    """The knobs asked for that the live objects hold otherwise, or that nothing in the script shows."""
    ran, framework = (line.ran or {}, line.framework) if line is not None else ({}, None)
    flagged_knobs = run.script.flagged if run.script is not None else []
    # With accumulation a mode of CUDA graphs is another.
    modes = {"compile": compile_mode(run.knobs)} if "compile" in run.knobs else {}
    return [
        Overridden(knob=name, asked=value, ran=ran.get(name), by=framework or "the script")
        for name, value in run.knobs.items()
        if name not in LAUNCH_KNOBS and ran.get(name) not in (value, modes.get(name, value))
        # A flag of the script's own is believed where nothing shows its value.
        if name in ran or name not in flagged_knobs
    ]


def _hook_lines(directory: Path) -> list[HookLine]:
    try:
        return list(remaining_records(Tail(directory / HOOKS_FILE, HookLine)))
    except OSError:
        return []
