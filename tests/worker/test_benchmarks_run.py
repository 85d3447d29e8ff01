"""The benchmarks that drive the worker's own objects still run; their figures are not judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("name", ["engines", "step_records"])
def test_a_benchmark_of_the_worker_prints_its_table(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--pairs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.strip().endswith("held"), done.stderr
