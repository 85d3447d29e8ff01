"""The ceiling of each device that `doctor --calibrate` measured, kept in the home and put beside every later run."""

from __future__ import annotations

import functools
import re
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu import cpu_name
from trainfast_runner.machine.devices import detect_machine, visible_gpus
from trainfast_runner.machine.training_python import ask_worker, find_python, own_environment
from trainfast_runner.machine.warm_python import torch_build
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import read_cached, write_atomically
from trainfast_runner.records.run_directory import locked

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
    copy_gb_per_s: float
    """GB/s read and written by a copy."""
    operation_us: float
    """The time of one small operation of a training step."""
    cpu_share: float | None = None
    """The share of the time in which the threads held the CPU; None on a GPU."""
    wall_ns: int = 0

    @property
    def launches_per_s(self) -> float:
        """Small operations a second that the host can start."""
        return 1e6 / self.operation_us

    @property
    def disturbed(self) -> bool:
        """True if other processes took so much of the CPU that the ceiling is too low."""
        return self.cpu_share is not None and self.cpu_share < UNDISTURBED_SHARE


def calibrate(home: Home, python: str | None = None) -> Ceiling:
    """Measure the device a run would use, in the training Python; a few seconds. Raises UserError."""
    executable = find_python(python)
    home.create()
    versions = torch_build(executable)
    if versions.get("torch") is None:
        raise UserError(f"{executable} has no torch to calibrate with", key="python")
    machine = detect_machine(versions)
    if machine.refusal is not None:
        raise machine.refusal
    environment = own_environment() | visible_gpus(machine.default_gpus("single") if machine.device == "cuda" else ())
    try:
        answer = ask_worker(executable, "calibrate.py", [machine.device], environment, task="calibrate")
    except UserError as error:
        raise UserError(error.message, key="--calibrate", exit_code=4) from None
    name = answer["name"] or cpu_name()
    ceiling = msgspec.convert({**answer, "name": name, "wall_ns": time.time_ns()}, Ceiling)
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
    ceiling = read(home).get((gpu_name or "") if device == "cuda" else cpu_name())
    return None if ceiling is None else msgspec.to_builtins(ceiling)


def is_calibrated(home: Home, name: str) -> bool:
    """True if the device of this name was measured undisturbed."""
    ceiling = read(home).get(name)
    return ceiling is not None and not ceiling.disturbed


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s; None when the card has no unit for the format."""

    fp32: float
    tf32: float | None
    half: float
    source: str

    def of(self, precision: str) -> float | None:
        """The peak that belongs to a value of the `precision` knob; a card with tf32 has bf16 too."""
        if precision in ("fp32", "tf32"):
            return self.fp32 if precision == "fp32" else self.tf32
        if precision == "fp8":
            return None
        return self.half if precision == "fp16" or self.tf32 is not None else None


@functools.cache
def peaks() -> dict[str, Peak]:
    """The peak of every card in `peaks.toml`, by the regular expression for the card's name."""
    sheets = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))
    return {name: _peak(source, **card) for source, cards in sheets.items() for name, card in cards.items()}


def _peak(
    source: str, fp32: float = 0, tf32: float | None = None, half: float = 0, cores: int = 0, boost_mhz: int = 0
) -> Peak:
    """A card with figures of its own, or one with CUDA cores, which multiply and add once a clock."""
    if not cores:
        return Peak(fp32, tf32, half, source)
    fp32 = 2 * cores * boost_mhz / 1e6
    return Peak(round(fp32, 1), round(fp32, 1), round(2 * fp32, 1), source)


def peak_of(device_name: str | None) -> Peak | None:
    """The peak of the card a driver calls by this name; None for one that is not in the table."""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", (device_name or "").strip())
    return next((peak for pattern, peak in peaks().items() if re.fullmatch(pattern, name)), None)
