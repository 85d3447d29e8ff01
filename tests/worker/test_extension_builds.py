"""DeepSpeed's extensions are built by one process at a time; a killed build's lock holds up no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainfast_runner.machine.extensions import compiler, extensions_directory

BUILD = """
import sys
from trainfast_runner.worker.strategies.extension_builds import build_lock
with build_lock("cpu_adam"):
    print("alone", flush=True)
    open(sys.argv[1], "x")
    sys.stdin.readline()
"""


def begin(lock: Path) -> subprocess.Popen[str]:
    """A build that takes torch's lock and keeps it until a line comes."""
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(lock)],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(lock.parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("command", ["", " "])
def test_an_empty_cxx_is_no_compiler(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CXX", command)
    assert compiler(sys.executable) is None


def test_a_build_waits_for_a_live_one_and_not_for_the_lock_of_a_killed_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    first = begin(lock)
    assert next_line(first) == "alone"
    second = begin(lock)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(2)
    first.kill()
    first.communicate()
    # It has found the lock gone: it makes one itself.
    assert next_line(second) == "alone"
    second.communicate("\n")
    assert second.returncode == 0


def test_extensions_are_built_below_the_users_directory_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = extensions_directory("/env/bin/python", {"torch": "2.9.0", "deepspeed": "0.18.2"})
    assert found.parent == tmp_path / "trainfast"
    assert found.name.startswith("torch2.9.0-deepspeed0.18.2-")
