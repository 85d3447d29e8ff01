"""Faults of a GPU that answers, with their cures, and the temperature at which it is slowed down."""

import pytest

from trainfast_runner.machine.device_events import defects
from trainfast_runner.machine.doctor import gpu_findings
from trainfast_runner.machine.telemetry.throttle import degrees_left, slows_down_at_c
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, HostReading, Tick
from trainfast_tui.cli.monitor import lines_below
from trainfast_tui.text.topology import pcie_link

LINK = {"pcie_generation": 4, "pcie_width": 16, "pcie_generation_max": 4, "pcie_width_max": 16}


def gpu(**fields):
    return DeviceReading(
        **{"index": 2, "uuid": "GPU-2", "name": "NVIDIA H100", "throttle_reasons": [], **LINK, **fields}
    )


@pytest.mark.parametrize(
    ("fields", "expected", "cure"),
    [
        ({"throttle_reasons": ["hw_slowdown", "hw_thermal"], "temperature_c": 93}, "hardware), at 93 °C", "more air"),
        ({"throttle_reasons": ["hw_power_brake"]}, "power brake from the power supply", "its cables"),
        ({"temperature_c": 92, "gpu_max_temperature_c": 87}, "at its temperature limit, at 92 °C", "more air"),
        ({"ecc_uncorrected_errors": 2}, "2 uncorrected memory errors since the driver was loaded", "--gpu-reset"),
        ({"remapped_rows_uncorrected": 1}, "1 rows of its memory were replaced", "ROW_REMAPPER"),
        ({"remapped_rows_pending": 1}, "wait to be replaced", "--gpu-reset"),
        ({"remapped_rows_failed": 1}, "could not be replaced", "replace this card"),
        ({"pcie_width": 8}, "8 of its 16 PCIe lanes", "reseat"),
        ({"pcie_generation": 1, "gpu_utilization_percent": 90}, "PCIe generation 1 of 4 under load", "reseat"),
    ],
)
def test_each_ailment_is_a_warning_with_its_cure(fields, expected, cure):
    tick = Tick(t_ns=0, host=HostReading(), devices=[gpu(**fields)], missing={}, sample_us=1)
    (one,) = (finding for finding in gpu_findings(tick, {}) if finding.name == "GPU 2" and finding.state == "warn")
    assert expected in one.finding
    assert cure in (one.cure or "")
    assert any(line.startswith("GPU 2: ") and expected in line for line in lines_below([gpu(**fields)]))


@pytest.mark.parametrize(
    "fields",
    [
        {"throttle_reasons": ["idle", "sw_power_cap"], "temperature_c": 60, "gpu_max_temperature_c": 87},
        {"pcie_generation": 1, "gpu_utilization_percent": 0},
        {"ecc_corrected_errors": 9, "ecc_uncorrected_errors": 0, "remapped_rows_corrected": 1},
        dict.fromkeys(("throttle_reasons", *LINK)),
    ],
)
def test_a_healthy_or_idle_gpu_has_none(fields):
    assert list(defects(gpu(**fields))) == []


def test_the_processes_stand_below_the_rows_of_the_monitor():
    assert pcie_link(gpu()) == "4 x16"
    assert pcie_link(gpu(pcie_generation=1, pcie_width=8)) == "1 x8 of 4 x16"
    text = " ".join(" ".join(lines_below([gpu(processes=[DeviceProcess(pid=1 << 22)])])).split())
    assert text == f"GPU PID OWNER MEMORY COMMAND 2 {1 << 22} – – –", "of one that has ended nothing is made up"


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
def test_what_is_known_of_the_limit_is_used(now, driver, hardware, degrees, limit, left):
    seen = DeviceReading(
        index=0,
        temperature_c=now,
        gpu_max_temperature_c=driver,
        slowdown_temperature_c=hardware,
        degrees_to_slowdown_c=degrees,
    )
    assert (slows_down_at_c(seen), degrees_left(seen)) == (limit, left)
