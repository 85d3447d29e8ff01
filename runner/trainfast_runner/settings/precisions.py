"""The precisions of a training, one entry each: the number formats, and the names in other tools.

The formats as the worker sets them are in `worker/precision.py`, and `door/` has the names of other tools as it reads
them in a script: neither may import this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PrecisionEntry:
    """One value of the knob `precision`. Formats are torch's dtypes; a tool without the precision has None."""

    name: str
    param_dtype: str
    """Format of the weights."""
    compute_dtype: str
    """Format of the matrix products' operands."""
    peak: str
    """The precision whose published and calibrated TFLOP/s hold for this one."""
    accelerate: str | None = None
    """accelerate's `mixed_precision`; TF32 is a setting of the process besides."""
    lightning: str | None = None

    @property
    def is_mixed(self) -> bool:
        """True if the weights are cast for the matrix products."""
        return self.param_dtype != self.compute_dtype


PRECISIONS: Mapping[str, PrecisionEntry] = {
    precision.name: precision
    for precision in (
        PrecisionEntry("fp32", "float32", "float32", peak="fp32", accelerate="no", lightning="32-true"),
        PrecisionEntry("tf32", "float32", "float32", peak="tf32", accelerate="no"),
        PrecisionEntry("fp16", "float32", "float16", peak="fp16", accelerate="fp16", lightning="16-mixed"),
        PrecisionEntry("bf16", "float32", "bfloat16", peak="bf16", accelerate="bf16", lightning="bf16-mixed"),
        PrecisionEntry("bf16-pure", "bfloat16", "bfloat16", peak="bf16", lightning="bf16-true"),
    )
}

MIXED = tuple(name for name, precision in PRECISIONS.items() if precision.is_mixed)
ACCELERATE_NAMES = {name: entry.accelerate for name, entry in PRECISIONS.items() if entry.accelerate is not None}
LIGHTNING_NAMES = {name: entry.lightning for name, entry in PRECISIONS.items() if entry.lightning is not None}


def peak_precision(name: str) -> str:
    """The precision whose peak TFLOP/s hold for this one; a precision of another version has its own."""
    return PRECISIONS[name].peak if name in PRECISIONS else name
