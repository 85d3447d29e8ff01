"""The ceiling of each device that `doctor --calibrate` measured, kept in the home and put beside every later run."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.cpu_info import cpu_name
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.machine.gpus.visible import visible_gpus
from trainfast_runner.machine.training_python import find_python, torch_build
from trainfast_runner.machine.worker_programs import ask_worker, own_environment
from trainfast_runner.records.file_locks import locked
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import read_cached, write_atomically

CALIBRATION_FILE = "calibration.json"
UNDISTURBED_SHARE = 0.9
"""Share of the time its threads could have run below which a measurement on a CPU was disturbed."""


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """Measured ceilings of one device."""

    device: str
    name: str
    threads: int = 0
    torch: str = ""
    tflops: dict[str, float] = {}
    """TFLOP/s by precision."""
    copy_gb_per_s: float | None = None
    """GB/s read and written by a copy."""
    operation_us: float | None = None
    """The time of one small operation of a training step; None in calibrations before it was measured."""
    cpu_share: float | None = None
    """The share of the time in which the threads held the CPU; None on a GPU."""
    wall_ns: int = 0

    @property
    def launches_per_s(self) -> float | None:
        """Small operations a second that the host can start; None in calibrations before it was measured."""
        return 1e6 / self.operation_us if self.operation_us else None

    @property
    def disturbed(self) -> bool:
        """True if other processes took so much of the CPU that the ceiling is too low."""
        return self.cpu_share is not None and self.cpu_share < UNDISTURBED_SHARE


def calibrate(home: Home, python: str | None = None) -> Ceiling:
    """Measure the device a run would use, in the training Python; a few seconds. Raises UserError."""
    executable = find_python(python)
    home.create()
    ceiling = _measure(executable, *_device(executable))
    # Two calibrations may end together.
    with locked(home.path / f"{CALIBRATION_FILE}.lock"):
        ceilings = {**read(home), ceiling.name: ceiling}
        write_atomically(home.path / CALIBRATION_FILE, msgspec.json.encode(ceilings))
    return ceiling


def read(home: Home) -> dict[str, Ceiling]:
    """Every ceiling that was measured in this home, by the device's name; a damaged file is none."""
    return read_cached(home.path / CALIBRATION_FILE, dict[str, Ceiling]) or {}


def read_ceiling(home: Home, device: str, gpu_name: str | None) -> dict[str, Any] | None:
    """The ceiling of the CPU, or of a GPU of this name, as a dictionary for `run.json`; None when not measured."""
    ceilings = read(home)
    if not ceilings:
        return None
    name = (gpu_name or "") if device == "cuda" else cpu_name()
    ceiling = ceilings.get(name)
    return None if ceiling is None else msgspec.to_builtins(ceiling)


def is_calibrated(home: Home, name: str) -> bool:
    """True if the device of this name was measured undisturbed, in each way that this version measures."""
    ceiling = read(home).get(name)
    return ceiling is not None and not ceiling.disturbed and ceiling.operation_us is not None


def _device(executable: str) -> tuple[str, dict[str, str]]:
    """cuda or cpu, and the variables with which a process sees that device alone. Raises UserError."""
    versions = torch_build(executable)
    if versions.get("torch") is None:
        raise UserError(f"{executable} has no torch to calibrate with", key="python")
    machine = detect_machine(versions, executable)
    if machine.refusal is not None:
        raise machine.refusal
    gpus = machine.default_gpus("single").gpus if machine.device == "cuda" else ()
    return machine.device, visible_gpus(gpus)


def _measure(executable: str, device: str, visible: dict[str, str]) -> Ceiling:
    environment = own_environment() | visible
    try:
        answer = ask_worker(executable, "calibrate.py", [device], environment, task="calibrate")
    except UserError as error:
        raise UserError(error.message, key="--calibrate", exit_code=4) from None
    name = answer["name"] or cpu_name()
    return msgspec.convert({**answer, "name": name, "wall_ns": time.time_ns()}, Ceiling)
