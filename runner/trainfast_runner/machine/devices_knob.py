"""The grammar of the `devices` knob: a count (`2`), GPU indexes (`0+1`, `0+`), or the CPU (`cpu`, `cpu:4`)."""

from __future__ import annotations

import re

CPU = "cpu"
_PROCESSES = re.compile(rf"{CPU}:(\d{{1,9}})")
_INDEXES = re.compile(r"\d{1,4}(?:\+\d{1,4})*\+?")


def asks_for_cpu(devices: object) -> bool:
    """True if a value of the `devices` knob is `cpu` or `cpu:N`."""
    return isinstance(devices, str) and devices.startswith(CPU)


def cpu_processes(devices: object) -> int | None:
    """N of `cpu:N`; None for any other value of the `devices` knob."""
    match = _PROCESSES.fullmatch(devices) if isinstance(devices, str) else None
    return None if match is None else int(match[1])


def count_asked(devices: object) -> int | None:
    """N of a count N and of `cpu:N`; None for indexes, for `cpu` alone and for no value."""
    return devices if isinstance(devices, int) else cpu_processes(devices)


def gpu_indexes(devices: object) -> list[int] | None:
    """The indexes of a text such as `0+1`, `0+` or `0`; None for any other value."""
    if not isinstance(devices, str) or not _INDEXES.fullmatch(devices):
        return None
    return [int(part) for part in devices.split("+") if part]
