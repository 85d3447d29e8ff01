"""The OpenMP library of a CPU run, and how its threads wait for each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PASSIVE, DEFAULT = "passive", "default"
"""The policies of a waiting OpenMP thread: sleep, or spin first."""
PASSIVE_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""For libgomp, and for libiomp and libomp, whose threads spin 200 ms under any policy unless KMP_BLOCKTIME is 0."""
WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables that set how long a waiting thread spins: OpenMP's, libgomp's, and two of libiomp and libomp."""
_LIBRARY = re.compile(r"/(lib(?:gomp|iomp5|omp5?)[^/\s]*\.so[.\d]*)$", re.MULTILINE)
"""The file of an OpenMP library at the end of a line of `/proc/self/maps`."""


def openmp_libraries() -> str | None:
    """File names of the OpenMP libraries in this process, such as `libgomp.so.1`; None without one."""
    libraries = dict.fromkeys(_LIBRARY.findall(Path("/proc/self/maps").read_text()))
    return ", ".join(libraries) or None


def wait_policy(environment: Mapping[str, str]) -> str:
    """Return `passive`, `default` (the library's own: it spins first), or the settings as NAME=VALUE."""
    settings = {name: environment[name] for name in WAIT_SETTINGS if name in environment}
    if not settings:
        return DEFAULT
    upper_settings = {name: value.upper() for name, value in settings.items()}
    if "OMP_WAIT_POLICY" in upper_settings and upper_settings.items() <= PASSIVE_SETTINGS.items():
        return PASSIVE
    return ", ".join(f"{name}={value}" for name, value in settings.items())
