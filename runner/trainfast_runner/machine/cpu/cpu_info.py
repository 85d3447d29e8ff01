"""Facts about the processor from /proc/cpuinfo."""

from __future__ import annotations

import functools
import os
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The processor's own name and how many of its cores this process may use."""
    name = "CPU"
    for line in _cpu_info().splitlines():
        if line.lower().startswith(("model name", "cpu model")):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def cpu_has_fp16() -> bool:
    """True if this CPU multiplies fp16 itself (by AVX512-FP16, which torch's oneDNN asks for)."""
    return "avx512_fp16" in _cpu_info()


@functools.cache
def _cpu_info() -> str:
    """The whole text; empty when it cannot be read."""
    try:
        return CPU_INFO.read_text()
    except OSError:
        return ""
