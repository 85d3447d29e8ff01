"""Signs of an NVIDIA GPU outside of NVML, whose failure alone does not mean that there is none."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python

NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
"""PCI vendor, and the PCI class of display and 3D controllers."""


def sign_of_a_gpu(python: str | None = None, root: Path = Path("/")) -> str | None:
    """The first sign that an NVIDIA GPU is here, in words; None without any.

    Torch in the training Python is asked last, and only if the CUDA driver library can be loaded: that takes seconds.
    """
    return _device_file(root) or _driver_listing(root) or pci_card(root) or _torch_sees_one(python)


def pci_card(root: Path = Path("/")) -> str | None:
    """The first NVIDIA display or 3D controller on the PCI bus, with or without a driver; None without one."""
    for entry in _entries(root / "sys/bus/pci/devices"):
        try:
            vendor = (entry / "vendor").read_text().strip()
            kind = (entry / "class").read_text().strip()
        except OSError:
            continue
        if vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY_CLASS):
            return f"the PCI bus lists {entry.name}"
    return None


def _device_file(root: Path) -> str | None:
    names = [entry.name for entry in _entries(root / "dev") if re.fullmatch(r"nvidia\d+", entry.name)]
    return f"/dev/{names[0]} is there" if names else None


def _driver_listing(root: Path) -> str | None:
    folder = root / "proc/driver/nvidia/gpus"
    entries = _entries(folder)
    return f"/proc/driver/nvidia/gpus lists {entries[0].name}" if entries else None


def _torch_sees_one(python: str | None) -> str | None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None  # torch's CUDA goes through this library
    try:
        devices = training_python.cuda_devices(training_python.find_python(python))
    except UserError:
        return None
    return f"torch sees {devices.names[0]}" if devices.names else None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
