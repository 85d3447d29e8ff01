"""The maker's peaks of a card, found by the name that its driver gives it."""

import pytest

from trainfast_runner.machine.calibration import Ceiling, peak_of, peaks

ALIKE = ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA H100 80GB HBM3", "bf16-pure", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA B200", "bf16", 2250.0),
        ("Tesla T4", "fp16", 65.0),
        ("NVIDIA TITAN RTX", "fp16", 130.5),
        ("TITAN RTX", "fp32", 16.3),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA L40S", "tf32", 183.0),
        ("NVIDIA B200", "tf32", 1100.0),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
        # GeForce with fp32 accumulation, as the three whitepapers print it: 71, 165.2 and 209.5.
        ("NVIDIA GeForce RTX 3090", "fp16", 71.2),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8),
        ("NVIDIA GeForce RTX 2080 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "fp32", 44.1),
        ("NVIDIA GeForce RTX 5090", "tf32", 104.8),
    ],
)
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
