"""A run's settings checked against this machine and the training Python: the plan that a launch starts.

The plan of a user's own script has its command as typed, its devices, and the environment that loads the hooks.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainfast_runner import __version__
from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python, warm_python
from trainfast_runner.machine.cpu import CpuWindow, ThreadPolicy, thread_variables
from trainfast_runner.machine.devices import (
    DEVICE_VARIABLES,
    VISIBLE_DEVICES,
    Gpus,
    Machine,
    detect_machine,
    visible_gpus,
)
from trainfast_runner.machine.hosts import Host
from trainfast_runner.machine.training_python import extensions_directory, search_path
from trainfast_runner.memory.headroom import limit_below_weights_error
from trainfast_runner.records.home import Home, conducted_search_of, may_start_a_run, search_directories
from trainfast_runner.records.run_directory import is_unfinished
from trainfast_runner.records.run_file import FIRST_TORCH, PredictedSpeed, RunFile, ScriptAsked
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.running.command import ScriptCommand, read_command
from trainfast_runner.running.placing import Placement, place, place_by_slurm
from trainfast_runner.running.present_state import live_runs
from trainfast_runner.settings import compatibility, device_counts
from trainfast_runner.settings.compatibility import Facts, check, release
from trainfast_runner.settings.knob_values import KnobValues, bytes_of_ranks, whole_number
from trainfast_runner.settings.knobs import (
    compile_mode,
    knob,
    loader_arguments,
    setting_of,
    settings_of,
    trainer_fields,
)
from trainfast_runner.settings.precisions import ACCELERATE_NAMES, LIGHTNING_NAMES
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import FRAMEWORK_KNOBS, LAUNCH_KNOBS, check_reach, has_flag
from trainfast_runner.settings.spec import RunSpec, expand_paths, offload_folder, strategy_of
from trainfast_runner.units import asks_for_cpu, gpus_text
from trainfast_runner.worker.catalog import ALLOCATOR_VARIABLES, LEVERS, WITH_ADAPTERS
from trainfast_runner.worker.catalog.levers import KINDS_OF_LAYERS


@dataclass(frozen=True)
class RunPlan:
    """A checked run, ready to start: only a busy device or a full disk can still refuse it."""

    spec: RunSpec
    device: str
    world_size: int
    gpus: Gpus
    watched: Gpus
    memory_limit_bytes: tuple[int, ...] | None
    python: str
    versions: dict[str, str | None]
    env: dict[str, str]
    threads: ThreadPolicy | None = None
    """The wait policy of a CPU run's threads; chosen at the start."""
    asked_ns: int = 0
    """CLOCK_MONOTONIC at which the run was asked for; 0 for the moment of its start, as for the runs of a search."""
    window: CpuWindow | None = None
    """The load of other processes since the planning began."""
    predicted_speed: PredictedSpeed | None = None
    """Predicted speed of the run; None without a prediction."""
    role: str | None = None
    """Role in a search (`probe`, `trial`, `proof` or `cold`), whose id is `search_id`; None for any other run."""
    search_id: str | None = None
    script: ScriptAsked | None = None
    """The user's own script that is run in place of the worker."""
    cwd: str = ""
    """The folder in which the training starts; empty for the present one."""
    placement: Placement | None = None
    """The nodes of a run on several; None for a run on this machine."""

    @property
    def device_uuids(self) -> list[str]:
        """UUIDs of the GPUs the ranks use; empty on a CPU."""
        return [gpu.uuid for gpu in self.gpus if gpu.uuid]

    @property
    def device_names(self) -> list[str]:
        """Names of the GPUs the ranks use; empty on a CPU."""
        return [gpu.name for gpu in self.gpus if gpu.name]

    @property
    def compute_capabilities(self) -> list[str]:
        """Compute capabilities of the GPUs the ranks use, as in `8.6`; empty on a CPU or if one is unknown."""
        capabilities = [gpu.compute_capability for gpu in self.gpus if gpu.compute_capability]
        return capabilities if len(capabilities) == len(self.gpus) else []

    @property
    def spans_nodes(self) -> bool:
        """True if one copy of the model is cut over several nodes."""
        degree = device_counts.model_degree(self.spec.knobs)
        return self.placement is not None and degree > min(node.world_size for node in self.placement.nodes)

    def argv(self, *words: str) -> list[str]:
        """The command of the training process with the worker's arguments, a run's directory, or those of a standby.

        torchrun is called as a module, so it need not be on PATH.
        """
        if self.script is not None:
            return self.script.argv
        bootstrap = str(training_python.WORKER_FOLDER / "bootstrap.py")
        if strategy_of(self.spec.knobs).one_process:
            return [self.python, bootstrap, *words]
        options = ["--standalone", f"--nproc-per-node={self.world_size}", "--max-restarts=0"]
        if self.placement is not None:
            # The supervisor of each node adds its own (nodes.py: node_argv).
            options = [
                f"--nnodes={len(self.placement.nodes)}",
                "--rdzv-backend=c10d",
                "--rdzv-id=trainfast",
                "--max-restarts=0",
            ]
        return [self.python, "-m", "torch.distributed.run", *options, bootstrap, *words]


def plan_run(
    spec: RunSpec,
    python: str | None = None,
    among: Sequence[str] = (),
    hosts: Sequence[Host] = (),
    slurm_options: Sequence[str] | None = None,
    placement: Placement | None = None,
) -> RunPlan:
    """Check a run against this machine and the training Python; about a second the first time.

    `among` are the UUIDs of the GPUs that the run may use: empty for all, without meaning if `devices` names GPUs.
    With `hosts` the run is on these, with `slurm_options` on the nodes that Slurm gives: `devices` counts those of each
    node, and every check is of all together. `placement` is that of an earlier plan, whose hosts are not asked again.
    Raises UserError; with exit code 3 when `memory_limit` is below what the parameters alone need.
    """
    asked_ns, window = time.monotonic_ns(), CpuWindow()
    spec = replace(spec, data=expand_paths(spec.data))
    executable = training_python.find_python(python)
    if hosts:
        placement = place(hosts, spec.knobs["devices"], executable, Home())
    elif slurm_options is not None:
        machine = detect_machine(warm_python.torch_build(executable))
        placement = place_by_slurm(slurm_options, spec.knobs["devices"], machine)
    if placement is not None:
        if (strategy := strategy_of(spec.knobs)).one_device:
            message = f"strategy={strategy.name} trains on one device: it has no run on several nodes"
            raise UserError(message, key="strategy", advice="--set strategy=ddp")
        spec = placement.spec(spec)
    inspection, machine = _check_settings(spec, python, among, placement)
    devices = device_counts.device_count(spec, machine)
    if (too_small := limit_below_weights_error(spec, inspection.parameters, devices)) is not None:
        raise too_small
    ranks = device_counts.world_size(spec, machine)
    gpus = device_counts.chosen_gpus(spec.knobs, machine)
    versions = {"python": inspection.python, **inspection.versions}
    env = _worker_variables(spec, machine, ranks, gpus, inspection)
    if placement is not None:
        for name in DEVICE_VARIABLES:  # each node sees its own
            env.pop(name, None)
    plan = plan_on(machine, gpus, _as_recorded(spec, machine), ranks, inspection.executable, versions, env)
    if placement is not None:
        plan = replace(plan, spec=placement.spec(plan.spec, of_each=True), placement=placement)
    return replace(plan, asked_ns=asked_ns, window=window)


def plan_on(
    machine: Machine,
    gpus: Gpus,
    spec: RunSpec,
    ranks: int,
    python: str,
    versions: Mapping[str, str | None],
    env: dict[str, str],
) -> RunPlan:
    """Return the plan of checked settings on these devices; `env` is added to the inherited environment."""
    return RunPlan(
        spec=spec,
        device=machine.device,
        world_size=ranks,
        gpus=gpus,
        watched=machine.watched(spec.knobs.get("watch"), gpus),
        memory_limit_bytes=bytes_of_ranks(spec.knobs.get("memory_limit"), ranks),
        python=python,
        versions={"trainfast-tui": __version__, "driver": machine.driver_version, **versions},
        env=env,
    )


def _check_settings(
    spec: RunSpec, python: str | None, among: Sequence[str], placement: Placement | None
) -> tuple[warm_python.Inspection, Machine]:
    """Check that the settings work together, in this training Python and on this machine; return both as inspected.

    The parameters are counted only where a setting depends on their number. Raises UserError.
    """
    knobs, training_objective = spec.knobs, spec.data["objective"]
    inspection = warm_python.inspect(python, spec.model, training_objective, count=knobs["memory_limit"] is not None)
    machine = detect_machine(inspection.versions).used_by(knobs["devices"])
    if placement is not None:
        machine = placement.machine(machine)
    if among and not isinstance(knobs["devices"], str):
        machine = machine.limited_to(among)
    facts = Facts(
        spec, machine, inspection.config, inspection.versions, inspection.executable, families=inspection.families
    )
    check(facts)
    if knobs["attention"] not in compatibility.EVERY_MODELS_ATTENTION:
        # Only the model's class has the answer, which takes an import of torch.
        inspected = warm_python.inspect(python, spec.model, training_objective, attention=True)
        check(replace(facts, attentions=inspected.attentions))
    if knobs["method"] in WITH_ADAPTERS and knobs["lora_targets"] not in KINDS_OF_LAYERS:
        warm_python.inspect(python, spec.model, training_objective, lora_targets=str(knobs["lora_targets"]))
    if offload_folder(knobs) is not None:
        # Counting imports torch, so only settings that work are counted.
        inspection = warm_python.inspect(python, spec.model, training_objective, count=True)
        compatibility.refuse_small_disk(knobs, inspection.parameters)
    return inspection, machine


def _as_recorded(spec: RunSpec, machine: Machine) -> RunSpec:
    """The spec with its devices chosen and its paths absolute."""
    knobs = {**spec.knobs, "devices": device_counts.recorded_devices(spec, machine)}
    if knobs["offload_path"] is not None:
        knobs["offload_path"] = os.path.abspath(os.path.expanduser(str(knobs["offload_path"])))
    return replace(spec, knobs=knobs)


def _worker_variables(
    spec: RunSpec, machine: Machine, ranks: int, gpus: tuple[DeviceReading, ...], inspection: warm_python.Inspection
) -> dict[str, str]:
    """The variables that the launch sets in the inherited environment."""
    env = {
        "PATH": search_path(inspection.executable),
        "PYTHONUNBUFFERED": "1",
        # torchrun's `-m` and the processes multiprocessing spawns would import a random.py of the working directory.
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **visible_gpus(gpus, by_index=strategy_of(spec.knobs).is_zero),
    }
    env |= thread_variables(machine.device, str(spec.knobs["strategy"]), machine.cores, ranks, os.environ)
    if strategy_of(spec.knobs).is_zero:
        env["DS_ACCELERATOR"] = machine.device
        if machine.device == "cuda":
            # DeepSpeed otherwise asks nvcc at every import, and before 0.19 fails without a CUDA toolkit
            # (op_builder: installed_cuda_version).
            env["DS_IGNORE_CUDA_DETECTION"] = "1"
        env["TORCH_EXTENSIONS_DIR"] = str(extensions_directory(inspection.executable, inspection.versions))
    if spec.knobs["p2p"] == "off":
        env["NCCL_P2P_DISABLE"] = "1"
    return env | allocator_variables(_allocator_settings(spec.knobs), inspection.versions, os.environ)


def _allocator_settings(knobs: KnobValues) -> list[str]:
    settings = (LEVERS[name][value].allocator_setting for name, value in knobs.items() if name in LEVERS)
    return list(filter(None, settings))


def allocator_variables(
    settings: Sequence[str], versions: Mapping[str, str | None], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that give torch's CUDA allocator these settings beside the user's own.

    PYTORCH_ALLOC_CONF is new in torch 2.9, where either name may win.
    """
    if not settings:
        return {}
    is_new = release(versions.get("torch") or "") >= (2, 9)
    name, other = ALLOCATOR_VARIABLES if is_new else ALLOCATOR_VARIABLES[::-1]
    names = {setting.partition(":")[0] for setting in settings}

    def joined(own: str) -> str:
        kept = [part for part in own.split(",") if part.strip() and part.partition(":")[0].strip() not in names]
        return ",".join([*kept, *settings])

    variables = {one: joined(environment[one]) for one in (name, other) if one in environment}
    return {name: joined(environment.get(other, "")), **variables}


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
    flagged_knobs = {name: value for name, value in knobs.items() if has_flag(name, value, preset)}
    without_flag = {name: value for name, value in knobs.items() if name not in (*flagged_knobs, *LAUNCH_KNOBS)}
    cwd = "" if typed else preset.cwd
    if cwd and not os.path.isdir(cwd):
        raise UserError(f"script.cwd: there is no folder {cwd}", key="script.cwd", where=preset.file)
    command_words = preset.applied(list(typed or preset.command), flagged_knobs)
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
        flagged=list(flagged_knobs),
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
    env |= allocator_variables(_allocator_settings(without_flag), versions, os.environ)
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
            raise UserError(f"{name} has no place in a script: map its flag in a preset", key=name, allowed=takes)
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
    return device_counts.chosen_gpus({"devices": devices}, machine)


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
    version_numbers = release(torch or "")
    if len(version_numbers) < 2 or version_numbers >= release(FIRST_TORCH):
        return None  # new enough, or unknown
    return f"torch {torch} is older than {FIRST_TORCH} and loads no hooks"


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
    if "compile" in knobs:
        is_on = knobs["compile"] != "off"
        env["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR" if is_on else "NO"
        env["ACCELERATE_DYNAMO_MODE"] = compile_mode(knobs) if is_on else "default"
        env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(knobs["compile"] == "blocks")
    return env


def loader_defaults(knobs: KnobValues) -> dict[str, object]:
    """Defaults of DataLoader's arguments; `prefetch_factor` has none that suits a loader without workers."""
    return {name: value for name, value in loader_arguments(knobs).items() if name in ("num_workers", "pin_memory")}


POLL_S = 0.5
"""Chosen, not measured: seconds between two looks at a run that is waited for."""


class DevicesBusy(UserError):
    """A live run of this home uses a device that was asked for; it can be waited for."""


def refuse_busy(plan: RunPlan, home: Home) -> None:
    """Raise DevicesBusy if a live run of this home uses one of the plan's devices."""
    busy = busy_with(plan, home)
    if busy is not None:
        search = f", a run of search {busy.search_id}" if busy.search_id is not None else ""
        shared_indexes = [gpu.index for gpu in plan.gpus if gpu.uuid in busy.device_uuids]
        devices = gpus_text(shared_indexes) if shared_indexes else "the CPU"
        raise DevicesBusy(
            f"{devices} {'are' if len(shared_indexes) > 1 else 'is'} in use by {busy.run_id}{search}",
            key="devices",
            option=f"trainfast-tui stop {busy.run_id}, or --wait",
        )


def busy_with(plan: RunPlan, home: Home) -> RunFile | None:
    """A live run of this home on one of the plan's devices; the CPU is one device. Slurm keeps its own jobs apart."""
    if plan.placement is not None and plan.placement.slurm_options is not None:
        return None
    return next((run for run in live_runs(home) if _shares_a_device(run, plan)), None)


def _shares_a_device(run: RunFile, plan: RunPlan) -> bool:
    return run.device == plan.device and (plan.device == "cpu" or bool(set(run.device_uuids) & set(plan.device_uuids)))


def wait_for_devices(plan: RunPlan, home: Home, on_wait: Callable[[RunFile, float], None]) -> None:
    """Return when no live run uses the plan's devices; `on_wait(run, seconds so far)` every POLL_S seconds.

    A run of a search counts until the search ends or is paused: the search starts one process after another.
    """
    began_s = time.monotonic()
    while (run := busy_with(plan, home) or _newest_run_of_live_search(plan, home)) is not None:
        search = conducted_search_of(home, run)
        # Poll only this run until it has ended: there may be thousands.
        while is_unfinished(home.directory(run.run_id)) or (search is not None and may_start_a_run(search)):
            on_wait(run, time.monotonic() - began_s)
            time.sleep(POLL_S)


def _newest_run_of_live_search(plan: RunPlan, home: Home) -> RunFile | None:
    """The newest run of a search that is between two processes on one of the plan's devices.

    None for the plan of a search: two searches would wait for each other.
    """
    if plan.search_id is not None:
        return None
    live_searches = {directory.name for directory in search_directories(home) if may_start_a_run(directory)}
    return next((run for run in home.runs_of(live_searches) if _shares_a_device(run, plan)), None)
