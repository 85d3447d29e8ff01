"""The malloc thresholds of a CPU run: their names, the ordinary ones, and the user's own settings of malloc."""

from __future__ import annotations

from collections.abc import Mapping

STRICT, ORDINARY, KEPT = "strict", "ordinary", "kept"
"""The thresholds of a step, as a run records them; `kept` are the user's own, which no run changes."""
STRICT_IN_WARMUP = "strict in warm-up"
"""Recorded for a run whose timed steps are ordinary."""
ORDINARY_MMAP_BYTES = 32 << 20
"""The most that glibc's own threshold grows to on 64 bits (DEFAULT_MMAP_THRESHOLD_MAX, malloc.c)."""
ORDINARY_TRIM_BYTES = 256 << 20
"""Free bytes at the top of the heap beyond which glibc returns them; chosen by measured speed (docs/decisions.md)."""
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
