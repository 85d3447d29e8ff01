"""What a GPU's matrix units can do at most, by the makers' own figures: dense TFLOP/s without sparsity.

Half precision is with fp32 accumulation, as training does it: GeForce cards then run at half of the rate that is
usually advertised. fp32 is that of the CUDA cores. No figure knows of a power cap or of the clocks of a hot room:
`doctor --calibrate` measures what this card really reaches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VOLTA = "NVIDIA Tesla V100 datasheet"
TURING = "NVIDIA Turing GPU Architecture whitepaper (2018)"
T4 = "NVIDIA T4 datasheet"
A100 = "NVIDIA A100 datasheet"
AMPERE_CENTER = "NVIDIA A10, A30 and A40 datasheets"
GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper (2021), appendix"
HOPPER = "NVIDIA H100 datasheet"
H200 = "NVIDIA H200 datasheet"
BLACKWELL = "NVIDIA HGX B200 datasheet, per GPU"
ADA_CENTER = "NVIDIA L4, L40 and L40S datasheets"
ADA = "NVIDIA Ada GPU Architecture whitepaper (2023), appendix"
ADA_PRO = "NVIDIA RTX 6000 Ada Generation datasheet"
AMPERE_PRO = "NVIDIA RTX A-series datasheets"
BLACKWELL_PRO = "NVIDIA RTX PRO Blackwell GPU Architecture whitepaper (2025)"
BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU Architecture whitepaper (2025), appendix"


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s; None where the card has no unit for the format."""

    fp32: float
    tf32: float | None
    half: float
    bf16: bool
    source: str

    def of(self, precision: str) -> float | None:
        """The peak that belongs to a value of the `precision` knob."""
        if precision == "fp32":
            return self.fp32
        if precision == "tf32":
            return self.tf32
        if precision == "fp16":
            return self.half
        return self.half if self.bf16 else None


def _geforce(fp32: float, source: str) -> Peak:
    """A GeForce card since Ampere: half precision at twice, tf32 at once the rate of the CUDA cores."""
    return Peak(fp32, fp32, round(2 * fp32, 1), True, source)


def _workstation(fp32: float, source: str) -> Peak:
    """The same chips in a workstation card: half precision at four times, tf32 at twice the CUDA cores' rate."""
    return Peak(fp32, round(2 * fp32, 1), round(4 * fp32, 1), True, source)


PEAKS: dict[str, Peak] = {
    "V100 SXM": Peak(15.7, None, 125.0, False, VOLTA),
    "V100 PCIe": Peak(14.0, None, 112.0, False, VOLTA),
    "T4": Peak(8.1, None, 65.0, False, T4),
    "A100": Peak(19.5, 156.0, 312.0, True, A100),
    "A10": Peak(31.2, 62.5, 125.0, True, AMPERE_CENTER),
    "A30": Peak(10.3, 82.0, 165.0, True, AMPERE_CENTER),
    "A40": Peak(37.4, 74.8, 149.7, True, AMPERE_CENTER),
    "H100 SXM": Peak(67.0, 494.7, 989.4, True, HOPPER),
    "H100 PCIe": Peak(51.2, 378.0, 756.0, True, HOPPER),
    "H100 NVL": Peak(60.0, 417.5, 835.5, True, HOPPER),
    "H200": Peak(67.0, 494.7, 989.4, True, H200),
    "H200 NVL": Peak(60.0, 417.5, 835.5, True, H200),
    "B200": Peak(75.0, 1125.0, 2250.0, True, BLACKWELL),
    "L4": Peak(30.3, 60.0, 121.0, True, ADA_CENTER),
    "L40": Peak(90.5, 90.5, 181.1, True, ADA_CENTER),
    "L40S": Peak(91.6, 183.0, 362.1, True, ADA_CENTER),
    "TITAN RTX": Peak(16.3, None, 130.5, False, TURING),
    "Quadro RTX 8000": Peak(16.3, None, 130.5, False, TURING),
    "Quadro RTX 6000": Peak(16.3, None, 130.5, False, TURING),
    "RTX A4000": _workstation(19.2, AMPERE_PRO),
    "RTX A5000": _workstation(27.8, AMPERE_PRO),
    "RTX A6000": _workstation(38.7, AMPERE_PRO),
    "RTX 6000 Ada": _workstation(91.1, ADA_PRO),
    "RTX PRO 6000 Blackwell": Peak(125.0, 251.9, 503.8, True, BLACKWELL_PRO),
    "RTX 3060": _geforce(12.7, GA102),
    "RTX 3060 Ti": _geforce(16.2, GA102),
    "RTX 3070": _geforce(20.3, GA102),
    "RTX 3070 Ti": _geforce(21.7, GA102),
    "RTX 3080": _geforce(29.8, GA102),
    "RTX 3080 Ti": _geforce(34.1, GA102),
    "RTX 3090": _geforce(35.6, GA102),
    "RTX 3090 Ti": _geforce(40.0, GA102),
    "RTX 4060": _geforce(15.1, ADA),
    "RTX 4060 Ti": _geforce(22.1, ADA),
    "RTX 4070": _geforce(29.1, ADA),
    "RTX 4070 SUPER": _geforce(35.5, ADA),
    "RTX 4070 Ti": _geforce(40.1, ADA),
    "RTX 4070 Ti SUPER": _geforce(44.1, ADA),
    "RTX 4080": _geforce(48.7, ADA),
    "RTX 4080 SUPER": _geforce(52.2, ADA),
    "RTX 4090": _geforce(82.6, ADA),
    "RTX 5060 Ti": _geforce(23.7, BLACKWELL_RTX),
    "RTX 5070": _geforce(30.9, BLACKWELL_RTX),
    "RTX 5070 Ti": _geforce(43.9, BLACKWELL_RTX),
    "RTX 5080": _geforce(56.3, BLACKWELL_RTX),
    "RTX 5090": _geforce(104.8, BLACKWELL_RTX),
}
_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"V100-SXM\d.*", "V100 SXM"),
    (r"V100-PCIE.*|V100 PCIe.*", "V100 PCIe"),
    (r"A100[- ].*", "A100"),
    (r"H100 PCIe", "H100 PCIe"),
    (r"H100 NVL", "H100 NVL"),
    (r"H100( 80GB HBM3|-SXM.*| SXM.*)", "H100 SXM"),
    (r"H200( SXM.*)?", "H200"),
    (r"B200( SXM.*)?", "B200"),
    (r"RTX 6000 Ada Generation", "RTX 6000 Ada"),
    (r"RTX PRO 6000 Blackwell (Workstation|Server) Edition", "RTX PRO 6000 Blackwell"),
)


def peak_of(device_name: str | None) -> Peak | None:
    """The peak of the card a driver calls by this name; None for one that is not in the table.

    A laptop's card shares its name with a desktop's but not its figures: the whole name must fit.
    """
    if not device_name:
        return None
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", device_name.strip())
    for pattern, entry in _PATTERNS:
        if re.fullmatch(pattern, name):
            return PEAKS[entry]
    return PEAKS.get(name)
