"""The readings under several versions of nvidia-ml-py: each runs the tests beside this one in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

pytestmark = pytest.mark.long

NEWEST = "newest"
VERSIONS = ("12.535.161", "12.575.51", "13.590.48", NEWEST)
SUITES = (
    "test_nvml_readings.py",
    "test_nvml_failures.py",
    "test_field_values.py",
    "test_topology.py",
    "test_xid.py",
    "test_nvml_whole_process.py",
)
"""What goes through the binding; the rest of this folder does not depend on it."""


def installed(version: str, fresh: Path) -> Path:
    """A folder with that version alone, kept between runs; skips when the registry cannot be reached."""
    cache = platformdirs.user_cache_path("trainfast-tui") / "tests" / f"nvidia-ml-py-{version}"
    folder = fresh if version == NEWEST else cache
    if (folder / "pynvml.py").exists():
        return folder
    wanted = "nvidia-ml-py" if version == NEWEST else f"nvidia-ml-py=={version}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), wanted]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"not run: {wanted} cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_the_readings_are_the_same_under(version: str, tmp_path: Path) -> None:
    folder = installed(version, tmp_path)
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(here / suite) for suite in SUITES)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
