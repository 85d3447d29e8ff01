"""The memory limit of each rank."""

import re
from collections.abc import Iterable, Mapping, Sequence

from .process import ORDINARY_MMAP_BYTES, ORDINARY_TRIM_BYTES


def limit_of_rank(limits: Sequence[int] | None, rank: int) -> int | None:
    """Return the rank's own figure, or the last one if there are fewer than ranks; None without limits."""
    return limits[min(rank, len(limits) - 1)] if limits else None


SPELLINGS: tuple[tuple[str, str], ...] = (
    ("torch", r"\b(?:torch\.|torch\.cuda\.)?OutOfMemoryError\b"),
    ("caching allocator", r"\b(?:CUDA|HIP|XPU|MPS(?: backend)?) out of memory\b"),
    ("driver", r"\b(?:CUDA|HIP) (?:driver )?error:? ?(?:\(\d+\):? ?)?out of memory\b"),
    ("driver code", r"\bcudaErrorMemoryAllocation\b|\bCUDA_ERROR_OUT_OF_MEMORY\b"),
    ("cuBLAS", r"\bCUBLAS_STATUS_ALLOC_FAILED\b"),
    ("cuSOLVER, cuSPARSE", r"\bCUS(?:OLVER|PARSE)_STATUS_(?:ALLOC_FAILED|INSUFFICIENT_RESOURCES)\b"),
    ("cuDNN", r"\bCUDNN_STATUS_ALLOC_FAILED\b"),
    ("NCCL", r"\bFailed to CUDA (?:m|c|host ?)alloc\b|\bCuda failure (?:2 )?'?out of memory"),
    ("host allocator", r"\bDefaultCPUAllocator: (?:can't allocate memory|not enough memory)"),
    ("host", r"\bMemoryError\b|\bstd::bad_alloc\b|\[Errno 12\]|\bCannot allocate memory\b"),
    ("numpy", r"\bUnable to allocate \S+ \w+ for an array\b"),
    ("bitsandbytes", r"\bError out of memory at line\b"),
    ("kernel", r"\bOut of memory: Killed process\b|\boom-kill\b"),
)
"""Patterns of an out-of-memory report, each with the library that writes it."""
HINTS: tuple[tuple[str, str], ...] = (
    # cuBLAS creates its handle and workspace lazily: with no memory left it says "not initialized".
    ("cuBLAS", r"\bCUBLAS_STATUS_NOT_INITIALIZED\b"),
    ("cuDNN", r"\bCUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR)\b"),
    ("cuDNN engines", r"\bunable to find an engine\b"),
)
"""Errors that an OOM can cause, as well as other reasons: they count only if little memory was free."""

_KERNEL_RESOURCES = re.compile(r"out of resources?: *(?:shared memory|threads|registers)", re.IGNORECASE)
"""A kernel that needs more shared memory than the chip has: a smaller batch does not help."""
_ANY, _HINT = (
    re.compile("|".join(f"(?:{pattern})" for _, pattern in table), re.IGNORECASE) for table in (SPELLINGS, HINTS)
)
"""Any of the spellings, and any of the hints."""


def is_out_of_memory(texts: Iterable[str], *, memory_is_low: bool = False) -> bool:
    """True if any link of an exception chain, each as `Type: message`, reports an OOM.

    A link about a kernel's own resources (Triton's shared memory) does not count, and a hint counts only if the
    device's memory was low.
    """
    suspects = [text for text in texts if not _KERNEL_RESOURCES.search(text)]
    return any(_ANY.search(text) for text in suspects) or (memory_is_low and hints_at_memory(suspects))


def hints_at_memory(texts: Iterable[str]) -> bool:
    """True if any of the texts may report an OOM or another error."""
    return any(_HINT.search(text) for text in texts)


STRICT, ORDINARY, KEPT = "strict", "ordinary", "kept"
"""The thresholds of a step, as a run records them; `kept` are the user's own, which no run changes."""
STRICT_IN_WARMUP = "strict in warm-up"
"""Recorded for a run whose timed steps are ordinary."""
ORDINARY_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(ORDINARY_MMAP_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(ORDINARY_TRIM_BYTES),
}
"""The variables that start another program with ordinary thresholds (mallopt(3))."""


def malloc_settings(environment: Mapping[str, str]) -> list[str]:
    """Names of the user's own settings of glibc's malloc."""
    malloc_names = sorted(variable for variable in environment if variable.startswith("MALLOC_"))
    if "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        malloc_names.append("GLIBC_TUNABLES")
    return malloc_names
