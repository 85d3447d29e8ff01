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
SUITES = [
    f"test_{name}.py" for name in ["nvml_readings", "nvml_failures", "field_values", "topology", "nvml_whole_process"]
]
"""The tests that go through the binding; the rest of this folder does not depend on it."""
RUN = """
import pathlib, sys, pynvml, pytest
folder, *suites = sys.argv[1:]
assert pathlib.Path(pynvml.__file__).samefile(pathlib.Path(folder) / "pynvml.py"), pynvml.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *suites]))
"""
NUMBERS = {"12.535.161": None, "12.575.51": 251, "13.590.48": 269, NEWEST: 269}
"""The number that each version has for the counter of software thermal slowdown. The driver is of any of these minds
under every one of them (`test_single_causes_are_counted_where_the_driver_has_them`), so each mismatch is run."""
ASK = "import pynvml; print(getattr(pynvml, 'NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN', None))"


def installed(version, fresh):
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
def test_the_versions_disagree_about_the_numbers(version, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed(version, tmp_path))}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(NUMBERS[version])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_readings_are_the_same_under(version, tmp_path):
    folder = installed(version, tmp_path)
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), *(str(here / suite) for suite in SUITES)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
