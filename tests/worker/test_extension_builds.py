"""Torch's lock on the directory of an extension: a live build keeps it, a killed build does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

BUILD = """
import sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
print(baton.try_acquire(), flush=True)
sys.stdin.readline()
baton.release()
sys.stdin.readline()
"""
OURS = """
from trainfast_runner.worker.strategies.extension_builds import only_builder
with only_builder():
    print("alone", flush=True)
"""


def begin(code: str, *arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


@pytest.fixture
def users_build(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A script of the user's own that builds in the same directory."""
    build = begin(BUILD, str(lock), folder=lock.parents[1])
    assert next_line(build) == "True"
    yield build
    build.kill()
    build.communicate()


@pytest.mark.parametrize("end", ["finishes", "is killed"])
def test_a_lock_of_a_live_build_is_waited_for(lock: Path, users_build: subprocess.Popen[str], end: str) -> None:
    ours = begin(OURS, folder=lock.parents[1])
    assert next_line(ours) == f"deepspeed: waiting for the build that holds {lock}; delete it if no build is running"
    assert lock.exists()
    if end == "is killed":
        users_build.kill()
    else:
        assert users_build.stdin is not None
        users_build.stdin.write("\n")
        users_build.stdin.flush()
    assert next_line(ours) == "alone"
    ours.communicate()
    assert not lock.exists()


def test_a_lock_of_a_killed_build_is_removed_at_once(lock: Path, users_build: subprocess.Popen[str]) -> None:
    users_build.kill()
    users_build.wait()
    assert lock.exists()
    ours = begin(OURS, folder=lock.parents[1])
    assert next_line(ours) == "alone"
    ours.communicate()
    assert not lock.exists()
