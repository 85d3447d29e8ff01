"""The typed shape of a result's device conditions: energy, throttling, outages, and the state of the machine."""

from __future__ import annotations

import msgspec

from trainfast_runner.records.run_file import ForeignProcess


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Joules over the measured window, summed over watched devices."""

    joules: float | None = None
    joules_per_sample: float | None = None
    joules_per_step: float | None = None
    source: str | None = None
    """"energy counter", or "integrated power" if a device has no such counter."""
    reason: str | None = None
    """The reason that a distrusted counter gives no figure."""


class ThrottledDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Throttling of one watched device over the measured window, by cause; its source is one of `throttle.SOURCES`."""

    index: int | None = None
    uuid: str | None = None
    thermal_fraction: float | None = None
    thermal_source: str | None = None
    power_fraction: float | None = None
    power_source: str | None = None
    brake_fraction: float | None = None
    brake_source: str | None = None
    sync_boost_fraction: float | None = None
    sync_boost_source: str | None = None
    throttled_ms: dict[str, float | None] = {}
    lost_ms_per_step: dict[str, float | None] = {}
    """None for every cause on a GPU that the run only watches."""
    clock_loss_fraction: float | None = None
    temperature_c: float | None = None
    """The temperature when the window began."""


class Throttle(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the measured window in which the worst watched device was throttled, by cause, and the worst clock loss:
    1 - SM clock / maximum SM clock, the mean over the window's time in which the GPU was not idle."""

    thermal_fraction: float | None = None
    power_fraction: float | None = None
    brake_fraction: float | None = None
    sync_boost_fraction: float | None = None
    clock_loss_fraction: float | None = None
    devices: list[ThrottledDevice] = []


class SteadyState(msgspec.Struct, frozen=True, kw_only=True):
    """The warm-up of a run. No measured step is left out for it.

    The slopes are of the steady window, else of the second half.
    """

    steady_from_step: int | None = None
    """From this step on neither temperature nor step time drifted any more."""
    still_warming: bool | None = None
    """True if they still drifted at the end; None if the steps are too few."""
    temperature_slope_c_per_min: float | None = None
    """Degrees Celsius a minute."""
    step_drift_percent: float | None = None
    """The percent by which the window's last step is longer than its first; None when the steps scatter too much."""


class RecordedOutage(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which a watched GPU that had answered gave no reading."""

    device: int | None = None
    """NVML index."""
    seconds: float | None = None
    """The time until the GPU answered again or the records end."""
    back: bool = False
    """True if the GPU answered again."""
    measured_fraction: float = 0.0
    """Share of the measured window."""
    throttled_ms: dict[str, float] = {}
    """Growth of the GPU's own counters by cause, from the last reading before to the first one after: without clocks,
    so in no other figure."""


class XidError(msgspec.Struct, frozen=True, kw_only=True):
    """An Xid error while the run went on; `device` is an NVML index, None when unknown."""

    device: int | None = None
    detail: str | None = None


class RunConditions(SteadyState, frozen=True, kw_only=True):
    """Conditions of the machine; `clean` is False when the comparison with another run is in doubt."""

    start_temperature_c: float | None = None
    """The hottest watched GPU at the launch."""
    measured_from_temperature_c: float | None = None
    """The hottest watched GPU at the start of the first measured step."""
    foreign_processes: list[ForeignProcess] = []
    others_cpu_percent: float | None = None
    """The share of all cores that processes of others took while the measured steps ran, the mean."""
    clean: bool = True
    started_clean: bool | None = None
    """True if the devices were as free as before at the launch; None if unknown."""
    outages: list[RecordedOutage] = msgspec.field(default_factory=list, name="absences")
    xid_errors: list[XidError] = []
    driver: str | None = None
