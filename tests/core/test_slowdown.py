"""The temperature at which a GPU is slowed down, from whichever of its limits and margins can be read."""

import pytest

from trainfast_runner.machine.telemetry.throttle import degrees_left, slows_down_at_c
from trainfast_runner.records.tick import DeviceReading


@pytest.mark.parametrize(
    ("now", "driver", "hardware", "degrees", "limit", "left"),
    [
        (60, 87, 92, None, 87, 27),  # the driver comes first
        (60, 92, 87, None, 87, 27),
        (60, None, 92, None, 92, 32),
        (60, 87, None, 20, 87, 20),  # what it says of the way to go is nearer to it than a difference
        (60, None, None, 20, 80, 20),
        (90, None, 87, None, 87, -3),
        (None, None, 87, None, 87, None),
        (None, None, None, 20, None, 20),
        (60, None, None, None, None, None),
    ],
)
def test_what_is_known_of_the_limit_is_used(
    now: int | None, driver: int | None, hardware: int | None, degrees: int | None, limit: int | None, left: int | None
) -> None:
    seen = DeviceReading(
        index=0,
        temperature_c=now,
        gpu_max_temperature_c=driver,
        slowdown_temperature_c=hardware,
        degrees_to_slowdown_c=degrees,
    )
    assert (slows_down_at_c(seen), degrees_left(seen)) == (limit, left)
