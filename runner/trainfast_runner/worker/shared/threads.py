"""The OpenMP library of a CPU run, and how its threads wait for each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PASSIVE, DEFAULT = "passive", "default"
"""The policies of a waiting OpenMP thread: sleep, or spin first."""
WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables that set how long a waiting thread spins: OpenMP's, libgomp's, and two of libiomp and libomp."""
_LIBRARY = re.compile(r"/(lib(?:gomp|iomp5|omp5?)[^/\s]*\.so[.\d]*)$", re.MULTILINE)


def openmp_libraries() -> str | None:
    """File names of the OpenMP libraries in this process, such as `libgomp.so.1`; None without one."""
    libraries = dict.fromkeys(_LIBRARY.findall(Path("/proc/self/maps").read_text()))
    return ", ".join(libraries) or None


def wait_policy(environment: Mapping[str, str]) -> str:
    """Return `passive`, `default` (the library's own: it spins first), or the settings as NAME=VALUE."""
    chosen = {name: environment[name] for name in WAIT_SETTINGS if name in environment}
    if not chosen:
        return DEFAULT
    if chosen.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" and chosen.get("KMP_BLOCKTIME", "0") == "0":
        return PASSIVE
    return ", ".join(f"{name}={value}" for name, value in chosen.items())
