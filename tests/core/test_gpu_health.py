"""Faults of a GPU that answers, with their cures, and the temperature at which it is slowed down."""

import pytest

from trainfast_runner.machine.device_events import defects
from trainfast_runner.machine.doctor import gpu_findings
from trainfast_runner.machine.telemetry.throttle import slows_down_at_c
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, HostReading, Tick
from trainfast_tui.cli.monitor import lines_below
from trainfast_tui.text.topology import pcie_link

LINK = {"pcie_generation": 4, "pcie_width": 16, "pcie_generation_max": 4, "pcie_width_max": 16}


def gpu(**fields):
    return DeviceReading(**{"index": 2, "uuid": "GPU-2", "name": "H100", "throttle_reasons": [], **LINK, **fields})


@pytest.mark.parametrize(
    ("fields", "expected", "cure"),
    [
        ({"throttle_reasons": ["hw_slowdown", "hw_thermal"], "temperature_c": 93}, "hardware), at 93 °C", "more air"),
        ({"throttle_reasons": ["hw_power_brake"]}, "power brake from the power supply", "its cables"),
        ({"temperature_c": 92, "degrees_to_slowdown_c": -5}, "at its temperature limit, at 92 °C", "more air"),
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
        {"throttle_reasons": ["idle", "sw_power_cap"], "temperature_c": 60, "degrees_to_slowdown_c": 27},
        {"pcie_generation": 1, "gpu_utilization_percent": 0},
        {"ecc_corrected_errors": 9, "ecc_uncorrected_errors": 0, "remapped_rows_corrected": 1},
        dict.fromkeys(("throttle_reasons", *LINK)),
    ],
)
def test_a_healthy_or_idle_gpu_has_none(fields):
    assert list(defects(gpu(**fields))) == []


def test_the_processes_stand_below_the_rows_of_the_monitor():
    assert (pcie_link(gpu()), pcie_link(gpu(pcie_generation=1, pcie_width=8))) == ("4 x16", "1 x8 of 4 x16")
    text = " ".join(" ".join(lines_below([gpu(processes=[DeviceProcess(pid=1 << 22)])])).split())
    assert text == f"GPU PID OWNER MEMORY COMMAND 2 {1 << 22} – – –", "of one that has ended nothing is made up"


@pytest.mark.parametrize(("driver", "chip", "limit"), [(87, 92, 87), (92, 87, 87), (None, 92, 92), (None, None, None)])
def test_the_lower_limit_slows_down(driver, chip, limit):
    assert slows_down_at_c(gpu(gpu_max_temperature_c=driver, slowdown_temperature_c=chip)) == limit
