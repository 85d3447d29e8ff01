"""What the machine is doing, once a period: NVML readings of every GPU and psutil readings of the host.

`Sampler` takes a `Tick` a period in one thread; `take_tick` takes a single one. A reading that cannot be
had is None, and `Tick.missing` says why.
"""

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
