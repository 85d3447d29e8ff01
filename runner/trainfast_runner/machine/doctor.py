"""The examination of this machine: each finding with its cure.

It only reads: no driver is changed, nothing is installed, no run is started.
"""

from __future__ import annotations

import locale
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from trainfast_runner.errors import UserError
from trainfast_runner.machine import warm_python
from trainfast_runner.machine.device_events import defects
from trainfast_runner.machine.devices import CUDA_BUILD, HIP_BUILD, detect_machine, pci_card
from trainfast_runner.machine.processes import has_open
from trainfast_runner.machine.resource_limits import read_host_free_bytes, tightest_group_limit
from trainfast_runner.machine.telemetry.binding import LIBRARY_FAILURES, LIBRARY_NOT_FOUND, NvmlFailure
from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.machine.telemetry.sampler import take_tick
from trainfast_runner.machine.training_python import NEEDED_PACKAGES, compiler, find_python, search_path
from trainfast_runner.machine.warm_python import STANDBY_NEEDS_BYTES
from trainfast_runner.records.home import Home, cache_directory
from trainfast_runner.records.tick import Tick
from trainfast_runner.units import counted, gibibytes
from trainfast_runner.worker.shared.host import can_move_cursor, make_private

_PACKAGES = (NEEDED_PACKAGES, ("accelerate", "bitsandbytes", "deepspeed", "datasets", "numpy"))
"""Those without which no run starts, and those that some knobs and data need."""
SETTLE_S = 0.05
"""Seconds between two readings where no rate is judged."""
BUS_WITHIN_S = 5.0
"""Time for systemd-logind to answer on its bus."""
ENOUGH_HOME_BYTES = 1 << 30
ENOUGH_SHM_BYTES = 1 << 30
ENOUGH_MEMORY_BYTES = 4 << 30
"""Chosen, not measured: below these `doctor` warns."""
SMALLEST_TERMINAL = (80, 24)
"""Columns and lines that the app needs."""


State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One finding. `fail`: no run can be started here; `warn`: something will not work, or may surprise."""

    name: str
    state: State
    finding: str
    cure: str | None = None


def judged(name: str, is_well: bool, finding: str, cure: str, state: State = "warn") -> Finding:
    """A finding that is well, or in this `state` with its cure."""
    return Finding(name, "ok" if is_well else state, finding, None if is_well else cure)


def examine(home: Home, python: str | None = None) -> list[Finding]:
    """All findings, the essential ones first. Takes about a second."""
    executable, versions = python or sys.executable, dict[str, str | None]()
    try:
        executable = find_python(python)
        answer = warm_python.packages(executable, "list its packages")
        versions = answer["versions"]
        own = Finding("training Python", "ok", f"{executable}, Python {answer['python']}")
        training = [own, *_packages(executable, versions, python)]
    except UserError as error:
        training = [Finding("training Python", "fail", error.line(), "give another one with --python PATH")]
    nvml = Nvml()
    tick = take_tick(settle_s=SETTLE_S, nvml=nvml)
    return [
        *training,
        *_home(home),
        _memory(),
        _standby(),
        *gpu_findings(tick, versions, detect_machine(versions).refusal, nvml.failure),
        *_compiler(executable),
        _shared_memory(),
        _logout(),
        *_terminal(os.environ),
    ]


def is_healthy(findings: list[Finding]) -> bool:
    """True if a run can be started here."""
    return all(finding.state != "fail" for finding in findings)


def _packages(executable: str, versions: dict[str, str | None], python: str | None) -> Iterator[Finding]:
    """The packages of the Python that trains; `python` is the one asked for."""
    missing, optional = ([name for name in names if not versions.get(name)] for names in _PACKAGES)
    if missing:
        packages = '"trainfast-tui[train]"' if python is None else " ".join(missing)
        finding = f"no {', '.join(missing)}; runs cannot be started with this Python"
        cure = f"{executable} -m pip install {packages}; or train with another Python: --python PATH"
        yield Finding("training stack", "fail", finding, cure)
        return
    installed = [f"{name} {versions[name]}" for names in _PACKAGES for name in names if versions.get(name)]
    yield Finding("training stack", "ok", ", ".join(installed))
    if optional:
        finding = f"no {', '.join(optional)}: the knobs and data that need them are refused"
        cure = f"{executable} -m pip install {' '.join(optional)}"
        yield Finding("optional packages", "ok" if optional == ["datasets"] else "warn", finding, cure)


def _home(home: Home) -> Iterator[Finding]:
    try:
        home.create()
    except UserError as error:
        yield Finding("run directory", "fail", error.line(), "set TRAINFAST_HOME to a directory you can write")
        return
    free = shutil.disk_usage(home.path).free
    finding = f"{home.path} can be written, {gibibytes(free)} free, {counted(len(home.run_ids()), 'run')}"
    cure = "free some space, or delete old runs: trainfast-tui runs prune --keep 20"
    yield judged("run directory", free >= ENOUGH_HOME_BYTES, finding, cure)
    cache = cache_directory()
    with suppress(OSError):
        make_private(cache)
        if os.access(cache, os.W_OK):
            return
    finding = f"{cache} cannot be written: text is tokenized again for every run"
    yield Finding("cache", "warn", finding, "set XDG_CACHE_HOME to a directory you can write")


def _memory() -> Finding:
    """The tightest memory limit of this process's control groups."""
    limit, group = tightest_group_limit()
    if limit is None:
        return Finding("memory limit", "ok", "no control group limits this session's memory")
    finding = f"{group} allows {gibibytes(limit)}: over it the kernel kills, and the run ends as out of memory"
    cure = "raise the container's limit, or set memory_limit below it"
    return judged("memory limit", limit >= ENOUGH_MEMORY_BYTES, finding, cure)


def _standby() -> Finding:
    """The standbys of this user, and whether there is memory for one."""
    # One that has become a run reads nothing any more.
    pids = [
        str(process.pid)
        for process in psutil.process_iter(["cmdline"])
        if "trainfast_runner.running.supervisor" in (words := process.info["cmdline"] or []) and "--standby" in words
        if not has_open(process.pid, Path(os.devnull))
    ]
    held = f"; waiting now: process {', '.join(pids)}" if pids else ""
    finding = f"the app and searches keep one training process with its imports done, of about 0.7 GiB{held}"
    cure = f"free memory: below {gibibytes(STANDBY_NEEDS_BYTES)} available none is kept, and runs start cold"
    return judged("standby", read_host_free_bytes() >= STANDBY_NEEDS_BYTES, finding, cure)


def _compiler(executable: str) -> Iterator[Finding]:
    """The build tools of DeepSpeed's extensions and torch.compile; a launch puts the Python's own bin first in PATH."""
    install_gcc = "install g++: apt-get install g++, dnf install gcc-c++, or pacman -S gcc"
    ninja = shutil.which("ninja", path=search_path(executable))
    for name, path, refused, cure in (
        ("C++ compiler", compiler(executable), "compile on the CPU and offload_path are refused", install_gcc),
        ("ninja", ninja, "offload_path is refused", f"{executable} -m pip install ninja"),
    ):
        consequence = f"none found: {refused}; zero*-offload steps with torch's AdamW"
        yield judged(name, path is not None, path or consequence, cure)


def _shared_memory() -> Finding:
    """DataLoader workers hand their batches over through /dev/shm."""
    name = "/dev/shm"
    try:
        size = shutil.disk_usage(name).total
    except OSError:
        return Finding(name, "warn", "not mounted: workers above 0 cannot pass batches", f"mount -t tmpfs tmpfs {name}")
    is_enough = size >= ENOUGH_SHM_BYTES
    consequence = "" if is_enough else ": DataLoader workers and NCCL may end with a bus error"
    cure = "start the container with --shm-size=8g or --ipc=host"
    return judged(name, is_enough, f"{gibibytes(size)}{consequence}", cure)


def _logout() -> Finding:
    """A warning if logind ends a user's processes at logout, and so a detached run."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container that runs under any uid
        user = str(os.getuid())
    if not Path("/run/systemd/seats").exists() or not ends_at_logout(user):
        return Finding("logout", "ok", "runs go on when this session ends")
    # Lingering keeps the user's manager, not the session's scope: a run has to be started inside the former.
    lingers = Path("/var/lib/systemd/linger", user).exists()
    lingering = "on, but only for what systemd-run --user starts" if lingers else "off"
    cure = (
        f"sudo loginctl enable-linger {user}, then systemd-run --user --scope trainfast-tui; or set"
        " KillUserProcesses=no in /etc/systemd/logind.conf"
    )
    ends = f"logind has KillUserProcesses=yes: runs end when you log out (lingering is {lingering})"
    return Finding("logout", "warn", ends, cure)


def ends_at_logout(user: str) -> bool:
    """True if logind kills this user's processes at logout, by default never root's (logind.conf(5)); False also if it
    does not answer."""
    manager = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
    try:
        command = ["busctl", "get-property", *manager, "KillUserProcesses"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=BUS_WITHIN_S, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    return answer.split() == ["b", "true"] and user != "root"


def _terminal(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The terminal that the app will be drawn on."""
    term = environment.get("TERM", "")
    if not sys.stdout.isatty():
        yield Finding("terminal", "ok", "stdout is not a terminal: the app is not opened here, all commands work")
        return
    columns, lines = shutil.get_terminal_size()
    true_colour = environment.get("COLORTERM", "") in ("truecolor", "24bit")
    if not can_move_cursor(environment):
        yield Finding("terminal", "warn", f"TERM={term or 'unset'} cannot move a cursor", "export TERM=xterm-256color")
    else:
        colours = "24-bit colour" if true_colour else "256 colours" if "256" in term else "16 colours or fewer"
        is_small = columns < SMALLEST_TERMINAL[0] or lines < SMALLEST_TERMINAL[1]
        is_well = not is_small and (true_colour or "256" in term)
        cure = "make the window at least 80x24" if is_small else "export TERM=xterm-256color, in tmux tmux-256color"
        yield judged("terminal", is_well, f"{term}, {colours}, {columns}x{lines}", cure)
    encoding = (sys.stdout.encoding or locale.getpreferredencoding(False)).lower().replace("-", "")
    if encoding != "utf8":
        finding = f"this terminal's encoding is {encoding}: charts cannot be drawn in braille"
        yield Finding("locale", "warn", finding, "export LANG=C.UTF-8, or start the app with --ascii")


def gpu_findings(
    tick: Tick, versions: Mapping[str, str | None], refusal: UserError | None = None, failure: NvmlFailure | None = None
) -> Iterator[Finding]:
    """Findings about NVML, every GPU, their use by this build of torch, and missing readings.

    `refusal` is `Machine.refusal` for the training Python; `failure` is NVML's in this tick.
    """
    if failure is not None and not tick.devices:
        no_library = failure == LIBRARY_FAILURES[LIBRARY_NOT_FOUND]
        state: State = "ok" if no_library and pci_card() is None else "warn"
        trains = "No run starts but with devices=cpu" if refusal is not None else "Training runs on the CPU"
        yield Finding("GPU", state, f"none: {failure.reason}. {trains}", failure.cure)
    for gpu in tick.devices:
        name = f"GPU {gpu.index}"
        if gpu.error:
            yield Finding(name, "warn", f"{gpu.name or 'a GPU'}: {gpu.error}")
            continue
        memory = f", {gibibytes(gpu.memory_total_bytes)}" if gpu.memory_total_bytes else ""
        yield Finding(name, "ok", f"{gpu.name or 'a GPU whose name cannot be read'}{memory}")
        yield from (Finding(name, "warn", defect.finding, defect.cure) for defect in defects(gpu))
    torch = versions.get("torch")
    is_cpu_build = versions.get(CUDA_BUILD) is None and versions.get(HIP_BUILD) is None
    if tick.devices and torch is not None and is_cpu_build:
        cure = "pip install --force-reinstall torch, from the index https://pytorch.org names for your driver"
        yield Finding("GPU and torch", "warn", f"torch {torch} is a build for the CPU: it will not use the GPUs", cure)
    if refusal is not None:
        yield Finding("devices", "fail", refusal.message, refusal.advice)
    yield from _missing_readings(tick)


def _missing_readings(tick: Tick) -> Iterator[Finding]:
    """Missing readings, grouped by the reason, so that eight GPUs make one line."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for key, reason in tick.missing.items():
        owner, _, reading = key.partition(".")
        if owner.startswith("gpu") and reading:
            by_reason.setdefault(reason, {}).setdefault(reading, []).append(owner.removeprefix("gpu"))
        elif reading:
            by_reason.setdefault(reason, {})[key] = []
    everyone = [str(gpu.index) for gpu in tick.devices if not gpu.error]
    for reason, readings in by_reason.items():
        names = []
        for name, gpus in readings.items():
            # The name without its unit: `host temperature` for `host.temperature_c`.
            words = re.sub(r"_(c|w|mj|mhz|percent|bytes|1m)$", "", name).replace(".", " ").replace("_", " ")
            names.append(words + (f" (GPU {', '.join(gpus)})" if gpus and gpus != everyone else ""))
        yield Finding("missing readings", "ok", f"{', '.join(names)}: {reason}")
    if tick.devices:
        yield Finding("missing readings", "ok", "the temperature of the chip's hot spot: NVML gives it for no GPU")
