"""Builds the stand-in `libnvidia-ml.so.1` that whole processes find through LD_LIBRARY_PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = [str(Path(__file__).with_name(name)) for name in ("libnvidia_ml.c", "scenario.c")]


def build(folder: Path) -> Path:
    """Compiles `libnvidia-ml.so.1` into `folder` and returns the folder; skips the test without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the stand-in NVML library cannot be built")
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library)]
    subprocess.run([compiler, *flags, *SOURCES, "-lm", "-lpthread"], check=True)
    return folder


def environment(folder: Path, *, gpus: int = 8, scenario: Path | None = None) -> dict[str, str]:
    """This process's environment with the library in `folder` as the machine's NVML."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    added = {"LD_LIBRARY_PATH": path, "NVML_STAND_IN_GPUS": str(gpus)}
    if scenario is not None:
        added["NVML_STAND_IN_SCENARIO"] = str(scenario)
    return {**os.environ, **added}
