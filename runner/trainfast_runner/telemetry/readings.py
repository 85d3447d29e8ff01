"""The records of one sampling tick: what `telemetry.jsonl` holds a line of and `monitor --json` prints.

Every reading may be None: it could not be had on this machine, and `Tick.missing` says why.
Zero always means a measured zero.
"""

import msgspec

SCHEMA = 1
"""Version of `Tick`; raised when a field changes its meaning, not when one is added."""


class DeviceProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process holding a context on a GPU, as the driver lists it."""

    pid: int
    """Process id as the driver knows it: inside a container this is the host's id, not the container's."""
    memory_used_bytes: int | None = None
    kind: str = "compute"


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one tick. Units are in the names; the source of each is a call of nvml.h."""

    index: int
    """NVML's index (PCI order) when the GPU was first seen; stable while this process samples."""
    uuid: str | None = None
    name: str | None = None
    compute_capability: str | None = None
    """As CUDA writes it: 8.0 is Ampere, the first with bf16 and TF32; 9.0 is Hopper."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    """What an allocation can still get: total minus used minus what the driver reserves."""
    gpu_utilization_percent: int | None = None
    """Share of time in which any kernel ran (0 to 100), not how full the multiprocessors were."""
    memory_utilization_percent: int | None = None
    """Share of time in which device memory was read or written (0 to 100), not how much is in use."""
    temperature_c: int | None = None
    slowdown_temperature_c: int | None = None
    shutdown_temperature_c: int | None = None
    memory_temperature_c: int | None = None
    fan_percent: int | None = None
    power_w: float | None = None
    """Board power; an average over the last second on Ampere and later."""
    power_limit_w: float | None = None
    """The enforced limit: the lowest of all that apply."""
    energy_mj: int | None = None
    """Energy since the driver was loaded, in millijoules; take differences."""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    throttle_reasons: list[str] | None = None
    """Names from `throttle.REASONS`, unknown bits as hex; empty means not throttled, None means not known."""
    power_violation_ns: int | None = None
    """Time held back by the power policy since the driver was loaded; take differences."""
    thermal_violation_ns: int | None = None
    """Time held back by the thermal policy since the driver was loaded; take differences."""
    pcie_generation: int | None = None
    """The link's present generation; an idle GPU lowers it."""
    pcie_width: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    processes: list[DeviceProcess] | None = None
    """Compute processes; refreshed every few ticks."""
    error: str | None = None
    """Why this GPU reports nothing at all, in plain words, or None when it answers."""


class RunReading(msgspec.Struct, frozen=True, kw_only=True):
    """The process tree of one run: the root process and all its descendants, summed."""

    cpu_percent: float | None = None
    """100 is one core kept busy; eight busy cores are 800."""
    memory_rss_bytes: int | None = None
    """Resident memory; pages that processes share are counted once for each of them."""
    read_bytes: int | None = None
    """Read from storage since the tree was first seen, processes that ended since included."""
    write_bytes: int | None = None
    processes: int
    threads: int


class HostReading(msgspec.Struct, frozen=True, kw_only=True):
    """The whole machine at one tick. Counters only grow; take differences."""

    cpu_percent: float | None = None
    """Mean over all cores since the last tick, 0 to 100; None on the first tick."""
    cpu_count: int | None = None
    cpu_percent_per_core: list[float] | None = None
    load_1m: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    network_received_bytes: int | None = None
    """All interfaces except loopback."""
    network_sent_bytes: int | None = None
    temperature_c: float | None = None
    """The hottest sensor of the processor package; refreshed every few ticks."""
    run: RunReading | None = None


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of the machine."""

    schema: int = SCHEMA
    t_ns: int
    """CLOCK_MONOTONIC nanoseconds at the start of the sample, on the same axis as the step records."""
    host: HostReading
    devices: list[DeviceReading]
    missing: dict[str, str]
    """Why a reading is None: `nvml`, `gpu0`, `gpu0.memory_temperature_c`, `host.temperature_c`, `run`, ..."""
    sample_us: int
    """What taking this sample cost, in microseconds of wall time."""
