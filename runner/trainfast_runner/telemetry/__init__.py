"""What the machine is doing, once a period: NVML's readings of every GPU and the kernel's of the host.

`Sampler` takes a `Tick` a period in one thread; `take_tick` takes a single one. A reading that cannot be
had is None, and `Tick.missing` says why.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainfast_runner.telemetry.readings import (
        DeviceProcess,
        DeviceReading,
        HostReading,
        RunReading,
        Tick,
    )
    from trainfast_runner.telemetry.sampler import Sampler, take_tick

__all__ = [
    "DeviceProcess",
    "DeviceReading",
    "HostReading",
    "RunReading",
    "Sampler",
    "Tick",
    "take_tick",
]


def __getattr__(name: str) -> object:
    """These are imported by whoever asks for them: what reads ticks from a file needs neither NVML nor psutil."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = "sampler" if name in ("Sampler", "take_tick") else "readings"
    found = globals()[name] = getattr(import_module(f"{__name__}.{place}"), name)
    return found
