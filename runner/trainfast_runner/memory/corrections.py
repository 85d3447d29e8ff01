"""Corrections of predictions by this machine's own runs: kernel workspaces, fragmentation, the CUDA context.

A finished run leaves, for its trace, strategy and number of ranks, the difference at each phase's peak, which later
predictions of the same case add. A run that ran out of memory under a limit leaves the least that it must have taken
beyond its trace. Kept in the home, by the device's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.cpu_info import cpu_name
from trainfast_runner.records.home import home_directory
from trainfast_runner.records.json_lines import DAMAGE
from trainfast_runner.records.regular_files import read_regular

CORRECTIONS_FILE = "memory_corrections.json"
NOT_TRACED = (
    ("compile", ("default", "max-autotune"), "the memory of the compiled program and its compiler"),
    ("engine", ("trainer",), "the Trainer's own memory"),
)
"""Knobs, their values, and the memory of these that no trace shows."""
WHOLE_STEP = "step"
"""Key of a correction of the whole step: a run that ran out of memory tells nothing of single phases."""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a run took beyond the traced peak."""

    run_id: str
    beyond_bytes: dict[str, int]
    """Bytes by phase; negative if the run took less."""
    step_bytes: int | None = None
    """The traced peak of forward and backward, with which the correction grows."""

    def share(self, knobs: Mapping[str, Any], step_bytes: float) -> float:
        """The share that applies to a step of this size: less for a smaller one, 1 at most.

        1 too for a run that keeps untraced memory, whatever the size of the step.
        """
        keeps_untraced = any(knobs.get(name) in values for name, values, _ in NOT_TRACED)
        return 1.0 if keeps_untraced or not self.step_bytes else min(1.0, step_bytes / self.step_bytes)


class DeviceCorrections(msgspec.Struct, frozen=True, kw_only=True):
    """The corrections of one device: `context_bytes` outside of the allocator, and corrections by `correction_key`."""

    device: str = "cpu"
    """The device's kind: cpu or cuda."""
    context_bytes: int | None = None
    by_case: dict[str, Correction] = msgspec.field(default_factory=dict, name="corrections")
    failed_by_case: dict[str, Correction] = msgspec.field(default_factory=dict, name="failed")
    """Least bytes beyond the trace, under WHOLE_STEP, of runs that ran out of memory under a limit of a CPU."""


def correction_key(trace: str, knobs: Mapping[str, Any], ranks: int) -> str:
    """The key of a correction: compiled, or by another engine, the same step takes other temporary bytes."""
    return "/".join([trace, *(str(knobs.get(name)) for name in ("strategy", "engine", "compile")), str(ranks)])


def read_corrections(home: Path | None = None) -> dict[str, DeviceCorrections]:
    """Read the corrections by device name; empty if there is no file or it is damaged."""
    return _corrections_or_trouble(home)[0]


def unreadable_reason(home: Path | None = None) -> str | None:
    """Return the error that keeps the home's corrections from being read, in one line; None without one."""
    return _corrections_or_trouble(home)[1]


def _corrections_or_trouble(home: Path | None) -> tuple[dict[str, DeviceCorrections], str | None]:
    try:
        file = (home or home_directory()) / CORRECTIONS_FILE
        return msgspec.json.decode(read_regular(file), type=dict[str, DeviceCorrections]), None
    except (FileNotFoundError, UserError):
        return {}, None
    except (OSError, *DAMAGE) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return {}, f"{file} cannot be read ({reason}): nothing is corrected by earlier runs until another one ends"


def read_device_corrections(device: str, gpu: str | None = None, home: Path | None = None) -> DeviceCorrections:
    """The corrections of a device, cpu or cuda; when no GPU is named, of the only one that has any."""
    devices = read_corrections(home)
    if device != "cuda":
        return devices.get(cpu_name(), DeviceCorrections())
    if gpu is not None:
        return devices.get(gpu, DeviceCorrections())
    gpus = [corrections for corrections in devices.values() if corrections.device == "cuda"]
    return gpus[0] if len(gpus) == 1 else DeviceCorrections()
