"""The records of one sampling tick, an object of `monitor --json`, and `telemetry.jsonl`, whose lines they are.

Every reading may be None: it is unavailable on this machine, for a reason in `Tick.missing`. Zero always means a
measured zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trainfast_runner.records.run_lines import Count

SCHEMA = 1
"""Version of `Tick`; raised when a field changes its meaning, not when one is added."""


MIG_PREFIX = "MIG-"
"""Beginning of each MIG instance's name: MIG-UUID, and MIG-GPU-UUID/GI/CI before driver R470."""


def is_instance(uuid: str | None) -> bool:
    """True if a device of this UUID is a MIG instance: a part of a GPU."""
    return uuid is not None and uuid.startswith(MIG_PREFIX)


class DeviceProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process holding a context on a GPU, as the driver lists it."""

    pid: int
    """Process id as the driver knows it: inside a container this is the host's id, not the container's."""
    memory_used_bytes: int | None = None
    kind: str = "compute"


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one tick. Units are in the names; the source of each is a call of nvml.h."""

    index: int
    """NVML's index (PCI order) when the GPU was first seen; stable while this process samples. A MIG instance has none
    in NVML and is counted after the GPUs."""
    uuid: str | None = None
    t_ns: Count | None = None
    """CLOCK_MONOTONIC nanoseconds when this GPU was asked: behind a slow one, later than the tick's."""
    memory_used_bytes: Count | None = None
    gpu_utilization_percent: int | None = None
    """Share of time in which any kernel ran (0 to 100), not how full the multiprocessors were."""
    temperature_c: int | None = None
    slowdown_temperature_c: int | None = None
    """The temperature at which the hardware slows the GPU down."""
    gpu_max_temperature_c: int | None = None
    """The highest temperature in operation: above it the driver slows the GPU down (sw_thermal)."""
    degrees_to_slowdown_c: int | None = None
    """Degrees left before the GPU is slowed down: NVML's margin, refreshed every few ticks, else the lower of both
    limits less the temperature."""
    power_w: float | None = None
    """Board power; an average over the last second on Ampere and later."""
    power_limit_w: float | None = None
    """The enforced limit: the lowest of all that apply."""
    energy_mj: Count | None = None
    """Energy since the driver was loaded, in millijoules; take differences."""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    throttle_reasons: list[str] | None = None
    """Names from `throttle.REASONS`, unknown bits as hex; empty means not throttled, None means not known."""
    power_violation_ns: Count | None = None
    """Time throttled by the power policy since the driver was loaded; take differences."""
    thermal_violation_ns: Count | None = None
    """Time throttled by the thermal policy since the driver was loaded; take differences."""
    sync_boost_violation_ns: Count | None = None
    """Time throttled by the slowest GPU of the sync-boost group; take differences."""
    sw_thermal_slowdown_ns: Count | None = None
    """Time slowed down for heat by the driver; take differences. None without `throttle_counters`."""
    hw_thermal_slowdown_ns: Count | None = None
    """Time slowed down for heat by the hardware; take differences."""
    hw_power_brake_ns: Count | None = None
    """Time slowed down by the power brake, an outside signal; take differences."""
    pcie_generation: Count | None = None
    """The link's present generation; an idle GPU lowers it."""
    pcie_width: Count | None = None
    pcie_generation_max: Count | None = None
    pcie_width_max: Count | None = None

    name: str | None = None
    compute_capability: str | None = None
    """CUDA's notation: 8.0 is Ampere, the first with bf16 and TF32; 9.0 is Hopper."""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    """Available to an allocation: total minus used minus the driver's reserve."""
    memory_utilization_percent: int | None = None
    """Share of time in which device memory was read or written (0 to 100), not how much is in use."""
    shutdown_temperature_c: int | None = None
    memory_temperature_c: int | None = None
    """High-bandwidth memory only; the hot spot of the chip is not in NVML at all."""
    memory_max_temperature_c: int | None = None
    fan_percent: int | None = None
    power_average_w: float | None = None
    """Over the last second; Ampere and later, without GA100 (A100)."""
    power_instant_w: float | None = None
    """Power now; A100 and H100 look at a quarter of the time only (arXiv 2312.02741): average over seconds."""
    memory_clock_mhz: int | None = None
    """Refreshed every few ticks."""
    memory_clock_max_mhz: int | None = None
    throttle_counters: str | None = None
    """The field numbers of the three counters above, which moved between drivers: "269-271", "251-253", or None."""
    pcie_tx_bytes: int | None = None
    """Sent over PCIe, wrap-arounds undone; take differences. From counters of 32 bits a rate is a lower bound."""
    pcie_rx_bytes: int | None = None
    nvlink_tx_bytes: int | None = None
    """Data sent over all NVLinks, in steps of 1 KiB; take differences."""
    nvlink_rx_bytes: int | None = None
    ecc_corrected_errors: int | None = None
    """Memory errors corrected since the driver was loaded; refreshed every few ticks, as all below."""
    ecc_uncorrected_errors: int | None = None
    remapped_rows_corrected: int | None = None
    """Rows of memory replaced for correctable errors, for good."""
    remapped_rows_uncorrected: int | None = None
    remapped_rows_pending: int | None = None
    """1 when rows wait for a reset of the GPU to be replaced."""
    remapped_rows_failed: int | None = None
    """1 when a row could not be replaced: the GPU should be replaced."""
    mig_mode: bool | None = None
    """True if the GPU is cut into instances (MIG), which hides some readings."""
    processes: list[DeviceProcess] | None = None
    """Compute processes; refreshed every few ticks."""
    error: str | None = None
    """The reason that this GPU reports nothing at all, as text; None when it answers."""


class RunReading(msgspec.Struct, frozen=True, kw_only=True):
    """The process tree of one run: the root process and all its descendants, summed."""

    cpu_percent: float | None = None
    """100 is one core kept busy; eight busy cores are 800."""
    memory_rss_bytes: int | None = None
    """Resident memory; pages that processes share are counted once for each of them."""
    processes: int
    threads: int


class HostReading(msgspec.Struct, frozen=True, kw_only=True):
    """The whole machine at one tick. Counters only grow; take differences."""

    cpu_percent: float | None = None
    """Mean over all cores since the last tick, 0 to 100; None on the first tick."""
    cpu_count: int | None = None
    memory_total_bytes: Count | None = None
    memory_available_bytes: Count | None = None
    swap_used_bytes: Count | None = None
    load_1m: float | None = None
    memory_used_bytes: int | None = None
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
    t_ns: Count
    """CLOCK_MONOTONIC nanoseconds at the start of the sample, on the same axis as the step records."""
    host: HostReading = HostReading()
    devices: list[DeviceReading] = []
    missing: dict[str, str] = {}
    """Reasons for absent readings: `nvml`, `gpu0`, `gpu0.memory_temperature_c`, `host.temperature_c`, `run`, ..."""
    sample_us: int = 0
    """The cost of this sample in microseconds of wall time."""
    nvml_us: int | None = None
    """The part of `sample_us` that the GPUs took."""


TimedReadings = dict[str, list[tuple[int, DeviceReading]]]
"""The readings of each device by UUID, each after its time (CLOCK_MONOTONIC ns), oldest first."""


def readings_by_device(ticks: Iterable[Tick]) -> TimedReadings:
    """The readings in these ticks, oldest first, of each device that has a UUID."""
    readings: TimedReadings = {}
    for tick in ticks:
        for device in tick.devices:
            if device.uuid is not None:
                taken_ns = tick.t_ns if device.t_ns is None else device.t_ns
                readings.setdefault(device.uuid, []).append((taken_ns, device))
    return readings
