"""The ceiling of each device that `doctor --calibrate` measured, kept in the home and put beside every later run."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu import cpu_name
from trainfast_runner.machine.devices import detect_machine, visible_gpus
from trainfast_runner.machine.training_python import ask_worker, find_python, own_environment, torch_build
from trainfast_runner.records.file_locks import locked
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import read_cached, write_atomically

CALIBRATION_FILE = "calibration.json"
UNDISTURBED_SHARE = 0.9
"""Share of the time its threads could have run below which a measurement on a CPU was disturbed."""


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """Measured ceilings of one device."""

    device: str
    name: str
    threads: int = 0
    torch: str = ""
    tflops: dict[str, float] = {}
    """TFLOP/s by precision."""
    copy_gb_per_s: float | None = None
    """GB/s read and written by a copy."""
    operation_us: float | None = None
    """The time of one small operation of a training step; None in calibrations before it was measured."""
    cpu_share: float | None = None
    """The share of the time in which the threads held the CPU; None on a GPU."""
    wall_ns: int = 0

    @property
    def launches_per_s(self) -> float | None:
        """Small operations a second that the host can start; None in calibrations before it was measured."""
        return 1e6 / self.operation_us if self.operation_us else None

    @property
    def disturbed(self) -> bool:
        """True if other processes took so much of the CPU that the ceiling is too low."""
        return self.cpu_share is not None and self.cpu_share < UNDISTURBED_SHARE


def calibrate(home: Home, python: str | None = None) -> Ceiling:
    """Measure the device a run would use, in the training Python; a few seconds. Raises UserError."""
    executable = find_python(python)
    home.create()
    ceiling = _measure(executable, *_device(executable))
    # Two calibrations may end together.
    with locked(home.path / f"{CALIBRATION_FILE}.lock"):
        ceilings = {**read(home), ceiling.name: ceiling}
        write_atomically(home.path / CALIBRATION_FILE, msgspec.json.encode(ceilings))
    return ceiling


def read(home: Home) -> dict[str, Ceiling]:
    """Every ceiling that was measured in this home, by the device's name; a damaged file is none."""
    return read_cached(home.path / CALIBRATION_FILE, dict[str, Ceiling]) or {}


def read_ceiling(home: Home, device: str, gpu_name: str | None) -> dict[str, Any] | None:
    """The ceiling of the CPU, or of a GPU of this name, as a dictionary for `run.json`; None when not measured."""
    ceilings = read(home)
    if not ceilings:
        return None
    name = (gpu_name or "") if device == "cuda" else cpu_name()
    ceiling = ceilings.get(name)
    return None if ceiling is None else msgspec.to_builtins(ceiling)


def is_calibrated(home: Home, name: str) -> bool:
    """True if the device of this name was measured undisturbed, in each way that this version measures."""
    ceiling = read(home).get(name)
    return ceiling is not None and not ceiling.disturbed and ceiling.operation_us is not None


def _device(executable: str) -> tuple[str, dict[str, str]]:
    """cuda or cpu, and the variables with which a process sees that device alone. Raises UserError."""
    versions = torch_build(executable)
    if versions.get("torch") is None:
        raise UserError(f"{executable} has no torch to calibrate with", key="python")
    machine = detect_machine(versions, executable)
    if machine.refusal is not None:
        raise machine.refusal
    gpus = machine.default_gpus("single").gpus if machine.device == "cuda" else ()
    return machine.device, visible_gpus(gpus)


def _measure(executable: str, device: str, visible: dict[str, str]) -> Ceiling:
    environment = own_environment() | visible
    try:
        answer = ask_worker(executable, "calibrate.py", [device], environment, task="calibrate")
    except UserError as error:
        raise UserError(error.message, key="--calibrate", exit_code=4) from None
    name = answer["name"] or cpu_name()
    return msgspec.convert({**answer, "name": name, "wall_ns": time.time_ns()}, Ceiling)


# images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
VOLTA = "NVIDIA V100 datasheet (1165301-r5)"
# www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
T4 = "NVIDIA T4 datasheet (951643)"
# images.nvidia.com/.../turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf; reference cards, with a fan.
TURING = "NVIDIA Turing GPU Architecture whitepaper (2018), appendix A"
QUADRO = "NVIDIA Quadro RTX 8000 datasheet"
# www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
A100 = "NVIDIA A100 datasheet (1758950-r4)"
# www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf and its siblings' data sheets.
A10 = "NVIDIA A10 datasheet"
A30 = "NVIDIA A30 datasheet"
A40 = "NVIDIA A40 datasheet"
# www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper (v2, 2021)"
# www.nvidia.com/content/dam/en-zz/Solutions/products/workstations/nvidia-rtx-a5000-datasheet.pdf and its sibling;
# tensor performance printed with sparsity: 153.4 and 222.2 TFLOPS.
A4000 = "NVIDIA RTX A4000 datasheet"
A5000 = "NVIDIA RTX A5000 datasheet"
# www.nvidia.com/en-us/data-center/h100 and /h200, printed with sparsity.
H100 = "NVIDIA H100 datasheet"
H200 = "NVIDIA H200 datasheet (the chip of the H100)"
HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
# Printed with sparsity: 4.5 PFLOPS for half precision, 2.2 for tf32.
BLACKWELL = "NVIDIA HGX B200 datasheet, per GPU"
# resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet, printed with sparsity.
L4 = "NVIDIA L4 datasheet"
L40 = "NVIDIA L40 datasheet"
L40S = "NVIDIA L40S datasheet"
# www.nvidia.com/.../rtx-6000/proviz-print-rtx6000-datasheet-web-2504660.pdf: 1457 TFLOPS of FP8 with sparsity, four
# times half precision.
ADA_6000 = "NVIDIA RTX 6000 Ada Generation datasheet (2504660)"
BLACKWELL_PRO = "NVIDIA RTX Blackwell PRO GPU Architecture whitepaper (v1.0, 2025), appendix A"
# The rates of the three generations, printed for one card each: RTX 3090 (35.6, 35.6 tf32, 71 half), RTX 4090 (82.6,
# 82.6, 165.2) and RTX 5090 (104.8, 104.8, 209.5).
AMPERE_RATES = "NVIDIA's cores x boost clock, rates of the Ampere GA102 whitepaper (v2, 2021)"
# images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
ADA_RATES = "NVIDIA's cores x boost clock, rates of the Ada GPU Architecture whitepaper (v2.1), appendix A"
BLACKWELL_RATES = "NVIDIA's cores x boost clock, rates of the RTX Blackwell GPU Architecture whitepaper (2025)"


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s; None when the card has no unit for the format."""

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


def _geforce(cores: int, boost_mhz: int, source: str) -> Peak:
    """A GeForce card since Ampere, from CUDA cores and boost clock as its maker lists them.

    A core multiplies and adds once a clock; tf32 runs at that same rate, half precision at twice that rate.
    """
    fp32 = 2 * cores * boost_mhz / 1e6
    return Peak(round(fp32, 1), round(fp32, 1), round(2 * fp32, 1), True, source)


PEAKS: dict[str, Peak] = {
    "V100 SXM": Peak(15.7, None, 125.0, False, VOLTA),
    "V100 PCIe": Peak(14.0, None, 112.0, False, VOLTA),
    "V100S PCIe": Peak(16.4, None, 130.0, False, VOLTA),
    "T4": Peak(8.1, None, 65.0, False, T4),
    "A100": Peak(19.5, 156.0, 312.0, True, A100),
    "A10": Peak(31.2, 62.5, 125.0, True, A10),
    "A30": Peak(10.3, 82.0, 165.0, True, A30),
    "A40": Peak(37.4, 74.8, 149.7, True, A40),
    "H100 SXM": Peak(66.9, 494.7, 989.4, True, HOPPER),
    "H100 PCIe": Peak(51.2, 378.0, 756.0, True, HOPPER),
    "H100 NVL": Peak(60.0, 417.5, 835.5, True, H100),
    "H200": Peak(66.9, 494.7, 989.4, True, H200),
    "H200 NVL": Peak(60.0, 417.5, 835.5, True, H200),
    "B200": Peak(75.0, 1100.0, 2250.0, True, BLACKWELL),
    "L4": Peak(30.3, 60.0, 121.0, True, L4),
    "L40": Peak(90.5, 90.5, 181.05, True, L40),
    "L40S": Peak(91.6, 183.0, 362.05, True, L40S),
    "TITAN RTX": Peak(16.3, None, 130.5, False, GA102),
    "Quadro RTX 8000": Peak(16.3, None, 130.5, False, QUADRO),
    "Quadro RTX 6000": Peak(16.3, None, 130.5, False, TURING),
    "RTX A4000": Peak(19.2, 38.3, 76.7, True, A4000),
    "RTX A5000": Peak(27.8, 55.5, 111.1, True, A5000),
    "RTX A6000": Peak(38.7, 77.4, 154.8, True, GA102),
    "RTX 6000 Ada": Peak(91.1, 182.1, 364.2, True, ADA_6000),
    "RTX PRO 6000 Blackwell": Peak(126.0, 251.9, 503.8, True, BLACKWELL_PRO),
    "RTX 2080 Ti": Peak(13.4, None, 53.8, False, TURING),
    "RTX 3060": _geforce(3584, 1777, AMPERE_RATES),
    "RTX 3060 Ti": _geforce(4864, 1665, AMPERE_RATES),
    "RTX 3070": _geforce(5888, 1725, AMPERE_RATES),
    "RTX 3070 Ti": _geforce(6144, 1770, AMPERE_RATES),
    # The card of 10 GB; the card of 12 GB has the same name and 3 % more cores.
    "RTX 3080": _geforce(8704, 1710, AMPERE_RATES),
    "RTX 3080 Ti": _geforce(10240, 1665, AMPERE_RATES),
    "RTX 3090": _geforce(10496, 1695, AMPERE_RATES),
    "RTX 3090 Ti": _geforce(10752, 1860, AMPERE_RATES),
    "RTX 4060": _geforce(3072, 2460, ADA_RATES),
    "RTX 4060 Ti": _geforce(4352, 2535, ADA_RATES),
    "RTX 4070": _geforce(5888, 2475, ADA_RATES),
    "RTX 4070 SUPER": _geforce(7168, 2475, ADA_RATES),
    "RTX 4070 Ti": _geforce(7680, 2610, ADA_RATES),
    "RTX 4070 Ti SUPER": _geforce(8448, 2610, ADA_RATES),
    "RTX 4080": _geforce(9728, 2505, ADA_RATES),
    "RTX 4080 SUPER": _geforce(10240, 2550, ADA_RATES),
    "RTX 4090": _geforce(16384, 2520, ADA_RATES),
    "RTX 4090 D": _geforce(14592, 2520, ADA_RATES),
    "RTX 5060": _geforce(3840, 2497, BLACKWELL_RATES),
    "RTX 5060 Ti": _geforce(4608, 2572, BLACKWELL_RATES),
    "RTX 5070": _geforce(6144, 2512, BLACKWELL_RATES),
    "RTX 5070 Ti": _geforce(8960, 2452, BLACKWELL_RATES),
    "RTX 5080": _geforce(10752, 2617, BLACKWELL_RATES),
    "RTX 5090": _geforce(21760, 2407, BLACKWELL_RATES),
}
_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"V100-SXM2-\d+GB", "V100 SXM"),
    (r"V100-PCIE-\d+GB", "V100 PCIe"),
    (r"V100S-PCIE-\d+GB", "V100S PCIe"),
    (r"A100-(SXM4|PCIE|PCIe)-\d+GB|A100 80GB PCIe", "A100"),
    (r"H100 80GB HBM3", "H100 SXM"),
    (r"RTX 6000 Ada Generation", "RTX 6000 Ada"),
    # Its server and Max-Q editions have lower clocks.
    (r"RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
)


def peak_of(device_name: str | None) -> Peak | None:
    """The peak of the card a driver calls by this name; None for one that is not in the table.

    A laptop's card or a MIG slice shares its name with the whole card but not its figures: the whole name must fit.
    """
    if not device_name:
        return None
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", device_name.strip())
    for pattern, entry in _PATTERNS:
        if re.fullmatch(pattern, name):
            return PEAKS[entry]
    return PEAKS.get(name)
