"""Torch's lock on the directory of an extension: a live build keeps it, a killed build does not."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainfast_runner.worker.invalid import InvalidInput
from trainfast_runner.worker.strategies import extension_builds
from trainfast_runner.worker.strategies.deepspeed_zero import why_not_built

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
with only_builder("cpu_adam"):
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


def test_the_build_of_another_extension_is_not_waited_for(tmp_path: Path, lock: Path) -> None:
    other = tmp_path / "of_the_user" / "lock"
    other.parent.mkdir()
    build = begin(BUILD, str(other), folder=tmp_path)
    assert next_line(build) == "True"
    ours = begin(OURS, folder=tmp_path)
    assert next_line(ours) == "alone"
    ours.communicate()
    assert other.exists()
    build.kill()
    build.communicate()


def test_a_lock_of_which_the_kernel_cannot_tell_ends_the_wait_with_what_to_do(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory takes no lease, as a file on NFS or of another user."""
    lock.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    monkeypatch.setattr(extension_builds, "UNKNOWN_WITHIN_S", 0.3)
    with pytest.raises(InvalidInput) as refused, extension_builds.only_builder("cpu_adam"):
        pytest.fail("the build began")
    assert str(refused.value) == f"cannot tell whether a build still holds {lock}: delete it if none runs"


@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="nothing can be built here")
def test_a_training_is_refused_for_such_a_lock_and_takes_no_other_optimizer(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    lock.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    monkeypatch.setattr(extension_builds, "UNKNOWN_WITHIN_S", 0.0)
    with pytest.raises(InvalidInput, match="delete it if none runs"):
        why_not_built("CPUAdamBuilder")


def test_a_file_system_that_gives_no_leases_cannot_tell_either(
    lock: Path, users_build: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS 4 refuses with the same error as a lock that is held, even on a file that nobody has open."""

    def refused(fd: int, command: int, argument: int) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    assert extension_builds._is_held(lock) is True
    monkeypatch.setattr(extension_builds.fcntl, "fcntl", refused)
    assert extension_builds._is_held(lock) is None
    assert [path.name for path in lock.parent.iterdir()] == ["lock"]
