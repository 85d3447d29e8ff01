"""The plan of a user's own script: its devices, its command as typed, and the environment that loads the hooks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python, warm_python
from trainfast_runner.machine.devices import VISIBLE_DEVICES, Gpus, Machine, detect_machine, visible_gpus
from trainfast_runner.machine.devices_knob import asks_for_cpu
from trainfast_runner.records.run_file import FIRST_TORCH, ScriptAsked
from trainfast_runner.running.command import ScriptCommand, read_command
from trainfast_runner.running.planning import RunPlan, plan_on, plan_run
from trainfast_runner.settings.device_counts import chosen_gpus
from trainfast_runner.settings.knob_values import KnobValues, whole_number
from trainfast_runner.settings.knobs import knob, loader_arguments, setting_of, settings_of, trainer_fields
from trainfast_runner.settings.precisions import ACCELERATE_NAMES, LIGHTNING_NAMES
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import FRAMEWORK_KNOBS, LAUNCH_KNOBS, check_reach
from trainfast_runner.settings.spec import RunSpec


def plan_spec(spec: RunSpec, python: str | None = None) -> RunPlan:
    """Check a spec against this machine, of a preset's model or of a user's own script. Raises UserError."""
    if spec.script is None:
        return plan_run(spec, python)
    return plan_script((), settings_of(spec.knobs, spec.knobs), preset=spec.script, python=python)


def plan_script(
    typed: Sequence[str],
    settings: Iterable[str] = (),
    *,
    preset: ScriptPreset | None = None,
    steps: int | None = None,
    python: str | None = None,
    samples_per_step: int | None = None,
    steps_from_log: str | None = None,
    trial: bool = False,
) -> RunPlan:
    """Check a command of the user's own against this machine; `preset` has the flags of its knobs.

    `typed` is empty for the preset's own command, which is planned in its folder. `trial` limits the memory of the run
    and keeps it from saving anything. Raises UserError.
    """
    preset = preset or ScriptPreset()
    knobs = _knobs(settings, preset, steps, trial)
    flagged_knobs = [name for name in knobs if name in preset.flag_words]
    without_flag = {name: value for name, value in knobs.items() if name not in (*preset.flag_words, *LAUNCH_KNOBS)}
    cwd = "" if typed else preset.cwd
    if cwd and not os.path.isdir(cwd):
        raise UserError(f"script.cwd: there is no folder {cwd}", key="script.cwd", where=preset.file)
    command_words = preset.applied(list(typed or preset.command), knobs)
    command = read_command(command_words, None if python is None else training_python.find_python(python), cwd)
    step_limit = _step_limit(knobs, steps_from_log)
    versions: dict[str, str | None] = {}
    with suppress(UserError):  # an interpreter without an answer
        versions = warm_python.torch_build(command.interpreter) if command.interpreter is not None else {}
    hooks_blocked = _hooks_blocked_reason(command, versions)
    check_reach(without_flag, preset.framework, hooks_blocked)
    machine = detect_machine(versions).used_by(knobs.get("devices"))
    if machine.refusal is not None:
        raise machine.refusal
    gpus = _chosen_gpus(machine, knobs)
    script = ScriptAsked(
        command=command_words,
        argv=command.argv_on(len(gpus)),
        steps=step_limit,
        timing_warmup=whole_number(knobs, "timing_warmup"),
        samples_per_step=samples_per_step,
        steps_from_log=steps_from_log,
        flagged=flagged_knobs,
        flag_words=preset.flag_words,
        # The hooks set them before the `__post_init__` of TrainingArguments.
        trainer_fields=trainer_fields({name: value for name, value in without_flag.items() if name in FRAMEWORK_KNOBS}),
        loader_defaults=loader_defaults(without_flag),
        hooks_blocked=hooks_blocked,
        unconfirmed=[] if preset.framework == "HF Trainer" else list(without_flag),
        trial=trial,
    )
    preset_knobs = {"timing_warmup": knob("timing_warmup").default, **preset.knobs}
    overrides = tuple(name for name, value in knobs.items() if value != preset_knobs.get(name))
    name = command.name if typed else preset.name
    spec = RunSpec(name, None, command.title, model={}, data={}, knobs=knobs, overrides=overrides)
    env = {**_script_variables(knobs, gpus), **framework_environment(without_flag)}
    ranks = command.ranks(len(gpus))
    plan = plan_on(machine, gpus, spec, ranks, command.interpreter or "", versions, env)
    return replace(plan, script=script, cwd=cwd)


def _knobs(settings: Iterable[str], preset: ScriptPreset, steps: int | None, trial: bool) -> KnobValues:
    """The preset's knobs with every `--set` and `--steps`, and a timing_warmup.

    Raises UserError for a knob that no script takes without a flag, for a `memory_limit` that is not a trial's, and for
    contradictory numbers of steps.
    """
    typed_knobs = dict(setting_of(setting) for setting in settings)
    knobs: KnobValues = {**preset.knobs, **typed_knobs}
    takes = dict.fromkeys((*LAUNCH_KNOBS, *FRAMEWORK_KNOBS, *preset.flag_words))
    for name in knobs:
        if name not in takes:
            raise UserError(
                f"{name} has no place in a script: name its flag in [script.knobs]", key=name, allowed=takes
            )
    if "memory_limit" in knobs and not trial:
        raise UserError(
            "memory_limit is for the trials of a search: a run of a script changes only the settings asked for",
            key="memory_limit",
            advice="trainfast-tui search max-batch",
        )
    if steps is not None:
        if typed_knobs.get("steps", steps) != steps:
            raise UserError(f"--steps {steps} and --set steps={typed_knobs['steps']} differ", key="--steps")
        knobs["steps"] = steps
    knobs.setdefault("timing_warmup", knob("timing_warmup").default)
    return knobs


def _step_limit(knobs: KnobValues, steps_from_log: str | None) -> int | None:
    """Return the steps after which the script is ended; None for a script that ends by itself.

    Raises UserError for steps that leave none to measure, and for steps without hooks.
    """
    limit = whole_number(knobs, "steps") if "steps" in knobs else None
    warmup = whole_number(knobs, "timing_warmup")
    if limit is not None and warmup >= limit:
        raise UserError(
            f"timing_warmup={warmup} leaves none of the {limit} steps to measure",
            key="timing_warmup",
            advice=f"steps={warmup + 5}",
            option=f"--steps {warmup + 5}",
        )
    if steps_from_log is None:
        return limit
    if not steps_from_log:
        raise UserError("--steps-from-log is empty: every line would count", key="--steps-from-log")
    try:
        re.compile(steps_from_log)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"--steps-from-log {steps_from_log!r}: {error}", key="--steps-from-log") from None
    if limit is not None:
        raise UserError("--steps needs the hooks, which --steps-from-log replaces", key="--steps-from-log")
    return None


def _chosen_gpus(machine: Machine, knobs: KnobValues) -> Gpus:
    """The GPUs that the script may use: all that it sees, unless `devices` names some."""
    devices = knobs.get("devices")
    if machine.device == "cuda" and not isinstance(devices, int | str):
        return tuple(gpu for gpu in machine.gpus if gpu.error is None)
    return chosen_gpus({"devices": devices}, machine)


def _script_variables(knobs: KnobValues, gpus: Gpus) -> dict[str, str]:
    """Environment variables that the launch adds; the variable that names the run is added at the start."""
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(HOOKS_FOLDER)) if path]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    if asks_for_cpu(knobs.get("devices")):
        env[VISIBLE_DEVICES] = ""
    elif gpus and knobs.get("devices") is not None:
        # The script may use DeepSpeed, which reads indexes only.
        env |= visible_gpus(gpus, by_index=True)
    return env


def no_torch_message(interpreter: str) -> str:
    """The message for a Python without torch, with the way to name another."""
    return f"{interpreter} has no torch: give the script's own Python by --python, or in the command"


def _hooks_blocked_reason(command: ScriptCommand, versions: dict[str, str | None]) -> str | None:
    """The reason that the hooks cannot load in this command with this torch; None if they can."""
    if command.hooks_blocked is not None:
        return command.hooks_blocked
    if command.interpreter is not None and versions and versions.get("torch") is None:
        return no_torch_message(command.interpreter)
    torch = versions.get("torch")
    version_numbers = _version_numbers(torch or "")
    if len(version_numbers) < 2 or version_numbers >= _version_numbers(FIRST_TORCH):
        return None  # new enough, or unknown
    return f"torch {torch} is older than {FIRST_TORCH} and loads no hooks"


def _version_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2] if part.isdecimal()]


HOOKS_FOLDER = Path(__file__).parents[1] / "door"
"""The folder that is appended to PYTHONPATH; it holds the hooks alone, so it shadows nothing."""
RUN_VARIABLE = "TRAINFAST_RUN"
"""The variable that names the run directory to a script."""


TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables by which experiment trackers take no part, by their documentation."""


def sandbox(folder: Path) -> dict[str, str]:
    """The variables that keep a script's traces in `folder`."""
    return {
        **TRACKERS_OFF,
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "WANDB_DIR": str(folder),
        "PL_TRAINER_DEFAULT_ROOT_DIR": str(folder),
        "TMPDIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def framework_environment(knobs: KnobValues) -> dict[str, str]:
    """Variables by which accelerate and Lightning (PL_TRAINER_*) take these knobs."""
    env = {}
    precision = str(knobs.get("precision"))
    if precision in ACCELERATE_NAMES:
        env["ACCELERATE_MIXED_PRECISION"] = ACCELERATE_NAMES[precision]
    if precision in LIGHTNING_NAMES:
        env["PL_TRAINER_PRECISION"] = LIGHTNING_NAMES[precision]
    if "grad_accum" in knobs:
        env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(knobs["grad_accum"])
        env["PL_TRAINER_ACCUMULATE_GRAD_BATCHES"] = str(knobs["grad_accum"])
    if "grad_clip" in knobs:
        env["PL_TRAINER_GRADIENT_CLIP_VAL"] = str(knobs["grad_clip"])
    return env


def loader_defaults(knobs: KnobValues) -> dict[str, object]:
    """Defaults of DataLoader's arguments; `prefetch_factor` has none that suits a loader without workers."""
    return {name: value for name, value in loader_arguments(knobs).items() if name in ("num_workers", "pin_memory")}
