"""Benchmarks that drive the worker's own objects or start scripts still run; their figures are not judged here."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("words", ["step_records", "script_speeds --only plain_torch", "attached --window 1"])
def test_benchmark_prints_its_table(words):
    name, *more = words.split()
    command = [sys.executable, "-m", f"benchmarks.{name}", "--pairs", "2", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.strip().endswith("held"), done.stderr
