"""Faults of a GPU that answers, with their cures, and the peaks of a card by the name that its driver gives it."""

import pytest

from trainfast_runner.machine.calibration import Ceiling, peak_of, peaks
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


ALIKE = ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")


PEAKS = [
    ("Tesla V100-SXM2-16GB", "fp16", 125.0), ("Tesla V100-SXM2-16GB", "bf16", None),
    ("NVIDIA A100-SXM4-80GB", "bf16", 312.0), ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
    ("NVIDIA H100 80GB HBM3", "bf16-pure", 989.4), ("NVIDIA H100 PCIe", "bf16", 756.0),
    ("NVIDIA H200 NVL", "bf16", 835.5), ("NVIDIA B200", "bf16", 2250.0), ("Tesla T4", "fp16", 65.0),
    ("NVIDIA TITAN RTX", "fp16", 130.5), ("TITAN RTX", "fp32", 16.3), ("NVIDIA RTX A6000", "bf16", 154.8),
    ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2), ("NVIDIA L40S", "tf32", 183.0),
    ("NVIDIA B200", "tf32", 1100.0), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
    # GeForce with fp32 accumulation, as the three whitepapers print it: 71, 165.2 and 209.5.
    ("NVIDIA GeForce RTX 3090", "fp16", 71.2), ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ("NVIDIA GeForce RTX 5090", "bf16", 209.5), ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8),
    ("NVIDIA GeForce RTX 2080 Ti", "bf16", None), ("NVIDIA GeForce RTX 4070 Ti SUPER", "fp32", 44.1),
    ("NVIDIA GeForce RTX 5090", "tf32", 104.8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "precision", "tflops"), PEAKS)
def test_a_card_is_known_by_its_drivers_name(name, precision, tflops):
    peak = peak_of(name)
    assert peak.of(precision) == (tflops if tflops is None else pytest.approx(tflops))


@pytest.mark.parametrize("name", [None, "", "AMD Radeon", "NVIDIA A100X", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", *ALIKE])
def test_a_card_that_only_looks_alike_has_no_peak(name):
    assert peak_of(name) is None


def test_every_peak_has_a_source_and_a_disturbed_ceiling_is_called_too_low():
    for name, peak in peaks().items():
        assert peak.source.startswith("NVIDIA"), name
        assert 1.9 <= peak.half / peak.fp32 <= 30, name
        # Every unit that knows tf32 does half precision at twice its rate.
        assert peak.tf32 is None or peak.half / peak.tf32 == pytest.approx(2, rel=0.03), name
    figures = {"device": "cpu", "name": "x", "copy_gb_per_s": 10.0, "operation_us": 10.0}
    assert [Ceiling(**figures, cpu_share=share).disturbed for share in (0.5, 0.99, None)] == [True, False, False]
