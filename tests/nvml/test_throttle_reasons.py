import pytest

from trainfast_runner.machine.telemetry import throttle


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0x0, []),
        (0x1, ["idle"]),
        (0x2, ["application_clocks"]),
        (0x4, ["sw_power_cap"]),
        (0x8, ["hw_slowdown"]),
        (0x10, ["sync_boost"]),
        (0x20, ["sw_thermal"]),
        (0x40, ["hw_thermal"]),
        (0x80, ["hw_power_brake"]),
        (0x100, ["display_clock"]),
        (0x24, ["sw_power_cap", "sw_thermal"]),
        (0x200, ["0x200"]),
        (0x8000000000000620, ["sw_thermal", "0x200", "0x400", "0x8000000000000000"]),
    ],
)
def test_every_bit_gets_its_name_and_unknown_bits_stay_visible(bits, names):
    assert throttle.decode(bits) == names


def test_idle_is_no_throttling_the_power_cap_is_information_and_heat_is_a_warning():
    severities = [throttle.severity(name) for name in ("idle", "sw_power_cap", "sw_thermal", "hw_thermal", "0x200")]
    assert severities == ["none", "info", "warning", "warning", "warning"]
