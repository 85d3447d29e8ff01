"""The precisions of a training, one entry each: the number formats, and the names in other tools.

The formats as the worker sets them are in `worker/model/optimizer.py`, and `door/` has the names of other tools as it
reads them in a script: neither may import this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def has_capability(compute_capability: str | None, least: tuple[int, int]) -> bool:
    """True if a GPU's compute capability, as in `8.6`, is at least this one; True also for None, an unknown one."""
    if compute_capability is None:
        return True
    major, _, minor = compute_capability.partition(".")
    return (int(major), int(minor or 0)) >= least


class PrecisionEntry(msgspec.Struct, frozen=True):
    """One value of the knob `precision`. Formats are torch's dtypes; a tool without the precision has None."""

    name: str
    param_dtype: str
    """Format of the weights."""
    compute_dtype: str
    """Format of the matrix products' operands."""
    peak: str
    """The precision whose published and calibrated TFLOP/s hold for this one."""
    accelerate: str | None = None
    """accelerate's `mixed_precision`; it has none for TF32, which is a setting of the process."""
    lightning: str | None = None
    min_compute_capability: tuple[int, int] = (0, 0)
    """The first NVIDIA GPUs with this format, by the table of features in the CUDA C++ Programming Guide."""
    in_trainer: bool = True
    """True if TrainingArguments has a field for it; the Trainer keeps the weights in fp32."""
    needs_gpus_reason: str | None = None
    """The reason that it needs GPUs; None if it runs on a CPU too."""
    package: str | None = None
    """The package that has to be installed."""
    min_version: str | None = None
    """The first version of the package that has it."""
    strategies: tuple[str, ...] = ()
    """Strategies that have it; empty for all. Likewise the engines."""
    engines: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, and of its gradient."""
        return DTYPE_BYTES[self.param_dtype]

    @property
    def compute_bytes(self) -> int:
        """Bytes of an operand of the matrix products, and of a weight under DeepSpeed."""
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def has_half_weights(self) -> bool:
        """True if the weights themselves are in half precision."""
        return self.weight_bytes < DTYPE_BYTES["float32"]

    @property
    def computes_in_half(self) -> bool:
        """True if the matrix products are in half precision."""
        return self.compute_bytes < DTYPE_BYTES["float32"]

    @property
    def is_mixed(self) -> bool:
        """True if the weights are cast for the matrix products."""
        return self.param_dtype != self.compute_dtype


AMPERE_CAPABILITY = (8, 0)
"""The first compute capability with tf32 and bf16."""


PRECISIONS: Mapping[str, PrecisionEntry] = {
    precision.name: precision
    for precision in (
        PrecisionEntry("fp32", "float32", "float32", peak="fp32", accelerate="no", lightning="32-true"),
        PrecisionEntry(
            name="tf32",
            param_dtype="float32",
            compute_dtype="float32",
            peak="tf32",
            min_compute_capability=AMPERE_CAPABILITY,
            needs_gpus_reason="is a format of NVIDIA tensor cores",
        ),
        PrecisionEntry("fp16", "float32", "float16", peak="fp16", accelerate="fp16", lightning="16-mixed"),
        PrecisionEntry(
            name="bf16",
            param_dtype="float32",
            compute_dtype="bfloat16",
            peak="bf16",
            accelerate="bf16",
            lightning="bf16-mixed",
            min_compute_capability=AMPERE_CAPABILITY,
        ),
        PrecisionEntry(
            name="bf16-pure",
            param_dtype="bfloat16",
            compute_dtype="bfloat16",
            peak="bf16",
            lightning="bf16-true",
            min_compute_capability=AMPERE_CAPABILITY,
            in_trainer=False,
        ),
        # As torchao has it: weights in fp32, autocast to bf16, and float8 within the products of the blocks.
        PrecisionEntry(
            name="fp8",
            param_dtype="float32",
            compute_dtype="bfloat16",
            peak="fp8",
            accelerate="fp8",
            min_compute_capability=(8, 9),
            in_trainer=False,
            needs_gpus_reason="is a format of NVIDIA tensor cores",
            package="torchao",
            min_version="0.7",  # the first with `convert_to_float8_training` (torchao/float8 of its releases)
            strategies=("single", "ddp", "fsdp"),
            engines=("native",),
        ),
    )
}

MIXED_PRECISIONS = tuple(name for name, precision in PRECISIONS.items() if precision.is_mixed)
TRAINER_PRECISIONS = tuple(name for name, precision in PRECISIONS.items() if precision.in_trainer)
ACCELERATE_NAMES = {name: entry.accelerate for name, entry in PRECISIONS.items() if entry.accelerate is not None}
LIGHTNING_NAMES = {name: entry.lightning for name, entry in PRECISIONS.items() if entry.lightning is not None}


def computing_precision(knobs: Mapping[str, Any]) -> str:
    """The precision of the matrix products: matrices of four bits become half ones also in fp32."""
    name = str(knobs.get("precision"))
    is_half = name not in PRECISIONS or PRECISIONS[name].computes_in_half
    return "bf16" if knobs.get("method") == "qlora" and not is_half else name


def peak_precision(name: str) -> str:
    """The precision whose peak TFLOP/s hold for this one; a precision of another version has its own."""
    return PRECISIONS[name].peak if name in PRECISIONS else name
