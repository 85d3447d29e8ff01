"""The start of a planned run: refuse devices in use, write `run.json`, start the supervisor, hand over the lock."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.calibration import read_ceiling
from trainfast_runner.machine.cpu import choose_policy, cpu_has_fp16, fixed_policy, script_policy, thread_count
from trainfast_runner.machine.devices import sample_gpus
from trainfast_runner.machine.processes import boot_id, identify, reap_when_ended
from trainfast_runner.machine.resource_limits import inherited_limits, limit_words
from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.machine.telemetry.topology import read_links_among
from trainfast_runner.machine.warm_python import WARM, StandbyKey, WarmPython
from trainfast_runner.memory.headroom import cached_prediction
from trainfast_runner.records import run_directory
from trainfast_runner.records.home import Home, cache_directory, home_error
from trainfast_runner.records.json_lines import open_to_append, write_atomically
from trainfast_runner.records.run_file import ClockAnchor, ForeignProcess, RunFile
from trainfast_runner.running.placing import start_nodes
from trainfast_runner.running.planning import RUN_VARIABLE, RunPlan, busy_with, refuse_busy, sandbox
from trainfast_runner.settings.spec import strategy_of
from trainfast_runner.units import CPU
from trainfast_runner.worker.shared.host import OnWait, make_private, print_holder

HANDOVER_S, STANDBY_HANDOVER_S = 30.0, 10.0
HANDOVER_POLL_S = 0.01
"""Chosen, not measured: longest wait for the first event of a supervisor, new or waiting, and the pause."""
MEMORY_SETTLED_BYTES = 64 << 20
MEMORY_SETTLES_S = 10.0
MEMORY_POLL_S = 0.25
"""Chosen, not measured: the memory above the level before the last run that counts as freed, the longest wait for that,
and the pause between two readings."""
GIT_WITHIN_S = 2.0
"""Chosen, not measured: git on a slow network disk must not hold up a launch."""


def start(plan: RunPlan, home: Home, on_wait: OnWait = print_holder) -> Path:
    """Start the run and return its directory once the supervisor holds its lock.

    `on_wait` is called throughout the waits for memory and for other launches; if it raises, nothing is started.

    Raises DevicesBusy when a live run of this home uses one of its devices, UserError when the home cannot be written.
    """
    plan = replace(plan, asked_ns=plan.asked_ns or time.monotonic_ns())
    home.create()
    refuse_busy(plan, home)
    plan, clean = _wait_for_memory(plan, home, on_wait)
    plan = _with_thread_policy(plan)
    run = _run_file(plan, home, clean)
    with ExitStack() as locks:
        try:
            # Each launch waits for this lock: nothing within takes long.
            with home.launching(on_wait):
                refuse_busy(plan, home)
                on_wait("")
                _, directory = home.new_run(plan.spec.name)
                try:
                    # Held until the supervisor holds it too: a reader never sees a started run without a holder.
                    locks.enter_context(run_directory.shared_lock(directory))
                    _write_run_file(run, plan, home, directory)
                except (OSError, UserError):
                    shutil.rmtree(directory, ignore_errors=True)
                    raise
            if plan.placement is not None:
                start_nodes(directory, plan.placement)
            else:
                _start_supervisor(directory, *WARM.take(standby_key(plan)))
        except OSError as error:
            raise home_error(home.path, error) from None
    return directory


CORES_TO_IMPORT_BESIDE = 4
"""Chosen, not measured: from this many cores on, imports take none that feeds a GPU."""
FIXED_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_", "PYTHON")
"""Beginnings of the variables that libraries and the interpreter read when they are loaded."""


def standby_key(plan: RunPlan) -> StandbyKey | None:
    """Return the key of the standby that could become this run; None where it starts cold: a script, several nodes."""
    if plan.script is not None or plan.placement is not None:
        return None
    variables = sorted((name, value) for name, value in plan.env.items() if name.startswith(FIXED_AT_IMPORT))
    ranks = 0 if strategy_of(plan.spec.knobs).one_process else plan.world_size
    packages = tuple(training_python.install_stamps(plan.python))
    return StandbyKey(plan.python, plan.device, ranks, tuple(variables), packages)


def keep_standby(plan: RunPlan, home: Home) -> None:
    """Keep a standby for runs like this one, until it becomes one or this program ends.

    Keeps none for a script, where memory is short or no process starts, and beside a run on the same device: on a CPU
    its imports take what is timed, and on a GPU a core.
    """
    plan = _with_thread_policy(plan)
    is_beside = plan.device == "cuda" and len(os.sched_getaffinity(0)) >= CORES_TO_IMPORT_BESIDE
    if (key := standby_key(plan)) is None or not (is_beside or busy_with(plan, home) is None):
        return
    boot, folder = boot_id()[:8], home.path / "standby"
    order = {
        "argv": plan.argv(),
        "env": plan.env,
        "imports": [plan.device, plan.spec.model, plan.spec.data["objective"]],
        "ranks": key.ranks,
        "output": str(folder / f"{boot}-{os.getpid()}-{time.monotonic_ns()}.log"),
    }
    with suppress(UserError, OSError):  # the run starts cold, and reports what keeps it from that
        make_private(home.create().path / "standby")
        for left in folder.glob(f"{boot}-*-*.log"):
            # The output of a standby of this machine whose supervisor was killed.
            if identify(int(left.stem.split("-")[-2])) is None:
                left.unlink(missing_ok=True)
        WARM.keep(key, order)


def _with_thread_policy(plan: RunPlan) -> RunPlan:
    """The plan of a CPU run with the wait policy of its threads, by the present load of others; a script's is noted."""
    if plan.device != "cpu":
        return plan
    environment = {**os.environ, **plan.env}
    if plan.script is not None:
        return replace(plan, threads=script_policy(environment, plan.world_size))
    policy = fixed_policy(environment, thread_count(environment)) or choose_policy(plan.window, WARM.wait_policy)
    return replace(plan, threads=policy, env={**plan.env, **policy.env})


def _write_run_file(run: RunFile, plan: RunPlan, home: Home, directory: Path) -> None:
    """Write `run.json`, with the fields that its directory and its start decide."""
    run = msgspec.structs.replace(
        run,
        run_id=directory.name,
        number=home.number_launch(directory.name),
        argv=plan.argv(str(directory)),
        env=_launch_variables(plan, directory),
        clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
    )
    try:
        write_atomically(directory / run_directory.RUN_FILE, msgspec.json.encode(run))
    except UnicodeEncodeError as error:
        raise UserError(f"{os.fsencode(error.object)!r} is not UTF-8 and cannot be recorded") from None


def _run_file(plan: RunPlan, home: Home, clean: bool) -> RunFile:
    """Return the facts of the run; `_write_run_file` adds the others."""
    placement = plan.placement
    temperatures = [gpu.temperature_c for gpu in plan.watched if gpu.temperature_c is not None]
    return RunFile(
        run_id="",
        host=socket.gethostname() if placement is None else placement.host,
        **plan.spec.record_fields(),
        device=plan.device,
        world_size=plan.world_size,
        device_uuids=plan.device_uuids,
        device_names=plan.device_names,
        compute_capabilities=plan.compute_capabilities,
        watch_uuids=[gpu.uuid for gpu in plan.watched if gpu.uuid],
        memory_limit_bytes=list(plan.memory_limit_bytes) if plan.memory_limit_bytes else None,
        used_before_bytes={
            gpu.uuid: gpu.memory_used_bytes for gpu in plan.gpus if gpu.uuid and gpu.memory_used_bytes is not None
        },
        python=plan.python,
        script=plan.script,
        versions=plan.versions,
        cwd=plan.cwd or training_python.working_directory(),
        git_commit=_git_commit(plan.cwd),
        limits=inherited_limits(),
        boot_id=boot_id() if placement is None else placement.boot_id,
        by_slurm=placement is not None and placement.slurm_options is not None,
        nodes=[] if placement is None else list(placement.nodes),
        clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
        asked_ns=plan.asked_ns,
        cache_dir=str(cache_directory()),
        start_temperature_c=max(temperatures, default=None),
        foreign_processes=[
            ForeignProcess(device=gpu.index, pid=process.pid, memory_used_bytes=process.memory_used_bytes)
            for gpu in plan.gpus or plan.watched
            for process in gpu.processes or []
        ],
        clean=clean,
        link=links.slowest if (links := read_links_among(plan.device_uuids)) else None,
        role=plan.role,
        search_id=plan.search_id,
        calibration=read_ceiling(home, plan.device, plan.gpus[0].name if plan.gpus else None),
        # By an earlier trace: a launch itself traces nothing.
        predicted=None
        if plan.script is not None
        else cached_prediction(plan.spec, plan.device, plan.python, plan.world_size, plan.device_names),
        predicted_speed=plan.predicted_speed,
        threads=plan.threads,
        cpu_has_fp16=cpu_has_fp16() if plan.device == CPU else None,
    )


def _launch_variables(plan: RunPlan, directory: Path) -> dict[str, str]:
    """Return the variables that the launch sets, and make the folder for a trial's own files."""
    if plan.script is None:
        return plan.env
    if not plan.script.trial:
        return {**plan.env, RUN_VARIABLE: str(directory)}
    folder = directory / run_directory.SANDBOX_FOLDER
    folder.mkdir(mode=0o700)
    return {**plan.env, **sandbox(folder), RUN_VARIABLE: str(directory)}


def _start_supervisor(directory: Path, standby: WarmPython | None, cold_reason: str) -> None:
    """Give the run to the standby, or start a supervisor, each in a session of its own; return once it has the run."""
    if standby is not None:
        cold_reason = "the standby died"
        with suppress(OSError):
            supervisor = standby.give(directory)
            if _has_taken(supervisor, directory, STANDBY_HANDOVER_S):
                return
            if supervisor.poll() is None:
                cold_reason = "the standby's supervisor did not answer"
        standby.end()
        if (directory / run_directory.EVENTS_FILE).exists():
            return  # it has taken the run after all
    with os.fdopen(open_to_append(directory / run_directory.SUPERVISOR_LOG), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainfast_runner.running.supervisor", str(directory), cold_reason],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if not _has_taken(process, directory, HANDOVER_S):
        # SIGUSR1 ends a supervisor that has no handler yet; one that has a handler kills its training.
        process.send_signal(signal.SIGUSR1)
        reason = training_python.last_error_line((directory / run_directory.SUPERVISOR_LOG).read_text(errors="replace"))
        words = f"the supervisor did not start: {reason}{limit_words(inherited_limits(), reason)}"
        raise UserError(words, key="supervisor", exit_code=4)


def _has_taken(process: subprocess.Popen[bytes], directory: Path, within_s: float) -> bool:
    """True once the supervisor has written its first event; False if it ends or takes longer."""
    reap_when_ended(process)
    events = directory / run_directory.EVENTS_FILE
    deadline_s = time.monotonic() + within_s
    while not (events.exists() and events.stat().st_size):
        if process.poll() is not None or time.monotonic() > deadline_s:
            return False
        time.sleep(HANDOVER_POLL_S)
    return True


def _wait_for_memory(plan: RunPlan, home: Home, on_wait: OnWait) -> tuple[RunPlan, bool]:
    """Return the plan with new readings of its devices, once they have freed the last run's memory, and `clean`.

    Memory is freed at its level before the last run on the same devices plus MEMORY_SETTLED_BYTES; `clean` is False
    when it is above that after MEMORY_SETTLES_S. The plan's own readings may be from before a long wait.
    """
    if not plan.gpus and not plan.watched:
        return plan, True
    freed_limits = _freed_limits(plan, home)
    deadline_s = time.monotonic() + MEMORY_SETTLES_S
    while True:
        gpu_by_uuid = {gpu.uuid: gpu for gpu in sample_gpus(Nvml()) if gpu.uuid}
        clean = all(
            (gpu_by_uuid[uuid].memory_used_bytes or 0) <= limit_bytes
            for uuid, limit_bytes in freed_limits.items()
            if uuid in gpu_by_uuid
        )
        if clean or time.monotonic() > deadline_s:
            gpus, watched = (
                tuple(gpu_by_uuid.get(gpu.uuid or "", gpu) for gpu in group) for group in (plan.gpus, plan.watched)
            )
            return replace(plan, gpus=gpus, watched=watched), clean
        on_wait("")
        time.sleep(MEMORY_POLL_S)


def _freed_limits(plan: RunPlan, home: Home) -> dict[str, int]:
    """Most used bytes of each of the plan's devices that count as freed, by UUID; empty if none was used before."""
    if not plan.device_uuids:
        return {}
    for run_id in reversed(home.run_ids()):
        last = run_directory.read_run_file(home.directory(run_id))
        if last is not None and set(last.device_uuids) & set(plan.device_uuids):
            return {
                uuid: used + MEMORY_SETTLED_BYTES
                for uuid, used in last.used_before_bytes.items()
                if uuid in plan.device_uuids
            }
    return {}


def _git_commit(folder: str) -> str | None:
    """The commit of that folder, empty for the working directory; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder or None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_WITHIN_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
