"""The temperature at which a GPU is slowed down: the driver's limit, or the hardware's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainfast_runner.known_values import lowest

if TYPE_CHECKING:
    from trainfast_runner.records.run_records import DeviceSample
    from trainfast_runner.records.tick import DeviceReading

    ThermalReading = DeviceReading | DeviceSample
    """A reading of a GPU with its temperature and limits, in degrees Celsius; None when unavailable."""


def slows_down_at_c(reading: ThermalReading) -> float | None:
    """The temperature at which the GPU is slowed down: by its limits, else by its own margin."""
    limit_c = lowest((reading.gpu_max_temperature_c, reading.slowdown_temperature_c))
    if limit_c is not None or reading.temperature_c is None or reading.degrees_to_slowdown_c is None:
        return limit_c
    return reading.temperature_c + reading.degrees_to_slowdown_c


def degrees_left(reading: ThermalReading) -> float | None:
    """Degrees Celsius before the GPU is slowed down, by its own margin, else by its limits; negative above them."""
    limit_c = slows_down_at_c(reading)
    if reading.degrees_to_slowdown_c is not None or reading.temperature_c is None or limit_c is None:
        return reading.degrees_to_slowdown_c
    return limit_c - reading.temperature_c


def degrees_by_limits(values: dict[str, Any]) -> int | None:
    """Degrees Celsius to the lower of the two slowdown temperatures; None without either, or without a temperature."""
    limit_c = lowest((values.get("gpu_max_temperature_c"), values.get("slowdown_temperature_c")))
    temperature_c: int | None = values.get("temperature_c")
    return None if temperature_c is None or limit_c is None else int(limit_c) - temperature_c
