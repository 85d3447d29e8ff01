"""A run's settings checked against this machine and the training Python: the plan that a launch starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainfast_runner import __version__
from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python, warm_python
from trainfast_runner.machine.cpu import CpuWindow, ThreadPolicy, thread_variables
from trainfast_runner.machine.devices import Gpus, Machine, detect_machine, visible_gpus
from trainfast_runner.machine.training_python import extensions_directory, search_path
from trainfast_runner.memory.headroom import limit_below_weights_error
from trainfast_runner.records.home import (
    STAMP_CHARACTERS,
    Home,
    conducted_search_of,
    may_start_a_run,
    search_directories,
)
from trainfast_runner.records.run_directory import is_unfinished, read_run_file
from trainfast_runner.records.run_file import PredictedSpeed, RunFile, ScriptAsked
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.running.present_state import live_runs
from trainfast_runner.settings import compatibility, device_counts
from trainfast_runner.settings.compatibility import Facts, check
from trainfast_runner.settings.knob_values import bytes_of_ranks
from trainfast_runner.settings.spec import RunSpec, expand_paths, offload_folder, strategy_of
from trainfast_runner.units import gpus_text


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
        return [self.python, "-m", "torch.distributed.run", *options, bootstrap, *words]


def plan_run(spec: RunSpec, python: str | None = None, among: Sequence[str] = ()) -> RunPlan:
    """Check a run against this machine and the training Python; about a second the first time.

    `among` are the UUIDs of the GPUs that the run may use: empty for all, without meaning if `devices` names GPUs.
    Raises UserError; with exit code 3 when `memory_limit` is below what the parameters alone need.
    """
    asked_ns, window = time.monotonic_ns(), CpuWindow()
    spec = replace(spec, data=expand_paths(spec.data))
    inspection, machine = _check_settings(spec, python, among)
    devices = device_counts.device_count(spec, machine)
    if (too_small := limit_below_weights_error(spec, inspection.parameters, devices)) is not None:
        raise too_small
    ranks = device_counts.world_size(spec, machine)
    gpus = device_counts.chosen_gpus(spec.knobs, machine)
    versions = {"python": inspection.python, **inspection.versions}
    env = _worker_variables(spec, machine, ranks, gpus, inspection)
    plan = plan_on(machine, gpus, _as_recorded(spec, machine), ranks, inspection.executable, versions, env)
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


def _check_settings(spec: RunSpec, python: str | None, among: Sequence[str]) -> tuple[warm_python.Inspection, Machine]:
    """Check that the settings work together, in this training Python and on this machine; return both as inspected.

    The parameters are counted only where a setting depends on their number. Raises UserError.
    """
    knobs, training_objective = spec.knobs, spec.data["objective"]
    inspection = warm_python.inspect(python, spec.model, training_objective, count=knobs["memory_limit"] is not None)
    machine = detect_machine(inspection.versions).used_by(knobs["devices"])
    if among and not isinstance(knobs["devices"], str):
        machine = machine.limited_to(among)
    facts = Facts(spec, machine, inspection.config, inspection.versions, inspection.executable)
    check(facts)
    if knobs["attention"] in ("sdpa", "flash"):
        # Only the model's class has the answer, which takes an import of torch.
        inspected = warm_python.inspect(python, spec.model, training_objective, attention=True)
        check(replace(facts, attentions=inspected.attentions))
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
    spec: RunSpec,
    machine: Machine,
    ranks: int,
    gpus: tuple[DeviceReading, ...],
    inspection: warm_python.Inspection,
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
    return env


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
    """A live run of this home on one of the plan's devices; the CPU is one device."""
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
    if not live_searches:
        return None
    # Ids begin with their time, and no run is older than its search.
    oldest_stamp = min(live_searches)[:STAMP_CHARACTERS]
    runs = (read_run_file(home.directory(run_id)) for run_id in reversed(home.run_ids()) if run_id >= oldest_stamp)
    return next(
        (run for run in runs if run is not None and run.search_id in live_searches and _shares_a_device(run, plan)),
        None,
    )
