"""The values of the `devices` knob that ask for the CPU: `cpu`, and `cpu:N` for N processes."""

from __future__ import annotations

CPU = "cpu"


def asks_for_cpu(devices: object) -> bool:
    """True if a value of the `devices` knob is `cpu` or `cpu:N`."""
    return isinstance(devices, str) and devices.startswith(CPU)


def cpu_processes(devices: object) -> int | None:
    """N of `cpu:N`; None for any other value of the `devices` knob."""
    count = str(devices).partition(":")[2] if asks_for_cpu(devices) else ""
    return int(count) if count else None
