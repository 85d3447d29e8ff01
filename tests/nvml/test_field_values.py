"""The batched field query: counters whose numbers moved, that wrap, or are not there; and the bits of throttling."""

import pytest
from stand_in import Machine, gpus

from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.machine.telemetry.device import Unwrapped

SW, HW, BRAKE = 269, 270, 271


def half_throttled(number, seconds):
    """The policy and software-thermal counters run at half of the time, the others stand."""
    return int(seconds * 5e8) if number in (75, SW) else 0


@pytest.mark.parametrize(
    ("numbers", "label", "slowed"),
    [(269, "269-271", [0, 500_000_000]), (251, "251-253", [0, 500_000_000]), (None, None, [None, None])],
)
def test_single_causes_are_counted_where_the_driver_has_them(watch, numbers, label, slowed):
    look = watch(Machine(gpus(1, cause_numbers=numbers, violation_ns=half_throttled, reasons=0x20)))
    seen = [look(second)[0][0] for second in range(2)]
    assert [gpu.sw_thermal_slowdown_ns for gpu in seen] == slowed
    assert seen[1].throttle_counters == label
    assert seen[1].thermal_violation_ns == 500_000_000, "the policy's own counter stays in any case"
    missing = look(2)[1]
    assert ("gpu0.sw_thermal_slowdown_ns" in missing) == (numbers is None)


def test_settings_of_power_smoothing_are_no_counters_and_a_failing_query_loses_only_its_fields(watch):
    """251 to 253 answer with 32 bits there; a counter of nanoseconds would wrap within five seconds."""
    [gpu], missing = watch(Machine(gpus(1, cause_numbers=None)))(0)
    assert gpu.throttle_counters is None
    assert missing["gpu0.hw_power_brake_ns"] == "not supported by this GPU and driver"
    [gpu], missing = watch(Machine(gpus(1, unsupported=frozenset({"nvmlDeviceGetFieldValues"}))))(0)
    assert (gpu.temperature_c, gpu.energy_mj, gpu.pcie_tx_bytes) == (50, 5_000_000, None)
    assert missing["gpu0.pcie_tx_bytes"] == "not supported by this GPU and driver"


def test_traffic_goes_on_where_a_counter_wraps_and_a_wide_one_was_set_back(watch):
    rate = 3_000_000_000
    look = watch(Machine(gpus(1, pcie_bytes=lambda s: int(s * rate), nvlink_kib=lambda s: int(s * 1000))))
    seen = [look(second)[0][0] for second in range(5)]
    assert [gpu.pcie_tx_bytes for gpu in seen] == [second * rate for second in range(5)]
    assert [gpu.nvlink_rx_bytes for gpu in seen] == [second * 1_024_000 for second in range(5)]
    counter = Unwrapped()
    assert [counter.follow(raw, 64) for raw in (10, 2**33, 5, 9)] == [10, 2**33, 2**33, 2**33 + 4]


def test_why_unified_memory_has_no_size(watch):
    memory = {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"}
    [unified], missing = watch(Machine(gpus(1, unsupported=frozenset(memory))))(0)
    assert unified.memory_total_bytes is None
    assert "shares the host's memory" in missing["gpu0.memory_used_bytes"]


def test_a_list_of_processes_is_bounded_whatever_the_driver_claims(watch):
    many, absurd = Machine(gpus(1, processes=dict.fromkeys(range(1, 257), 1))), Machine(gpus(1))
    [gpu], _ = watch(many)(0)
    assert len(gpu.processes or []) == 256
    absurd.gpus[0].claimed_processes = 1_000_000_000
    [gpu], missing = watch(absurd)(0)
    assert (gpu.processes, gpu.temperature_c) == (None, 50)
    assert "more processes than are looked at" in missing["gpu0.processes"]


BITS = """idle application_clocks sw_power_cap hw_slowdown sync_boost sw_thermal hw_thermal hw_power_brake
    display_clock 0x200"""
SEVERAL = [(0x24, ["sw_power_cap", "sw_thermal"]), (1 << 63 | 0x620, ["sw_thermal", "0x200", "0x400", f"{1 << 63:#x}"])]


@pytest.mark.parametrize(
    ("bits", "names"), [(0, []), *((1 << bit, [name]) for bit, name in enumerate(BITS.split())), *SEVERAL]
)
def test_every_bit_gets_its_name_and_unknown_bits_stay_visible(bits, names):
    assert throttle.decode(bits) == names


def test_idle_is_no_throttling_the_power_cap_is_information_and_heat_is_a_warning():
    severities = [throttle.severity(name) for name in ("idle", "sw_power_cap", "sw_thermal", "hw_thermal", "0x200")]
    assert severities == ["none", "info", "warning", "warning", "warning"]
