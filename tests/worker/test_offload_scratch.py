"""A run's files under `offload_path` are removed with it, or at the latest when the next run starts."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainfast_runner.worker.shared import host
from trainfast_runner.worker.shared.host import Scratch, remove_leftovers

HOLD = """
import sys
from pathlib import Path
from trainfast_runner.worker.shared.host import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.path / "states").write_bytes(b"0" * 64)
print(scratch.path, flush=True)
sys.stdin.read()
"""


def left_by_a_dead_run(parent: Path) -> Path:
    """The directory of a run that was killed, with a file in it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    states = Path(process.stdout.readline().decode().strip())
    process.kill()
    process.communicate()
    return states.parent


def test_only_what_carries_the_mark_is_deleted_under_offload_path(tmp_path: Path) -> None:
    """A checkout of this project is called trainfast-tui: it was deleted."""
    live, left = Scratch(tmp_path), left_by_a_dead_run(tmp_path)
    users = [tmp_path / name for name in ("trainfast-tui", "trainfast-offload-of-mine", f"{left.name}-copy")]
    for folder in users[:2]:
        folder.mkdir()
        (folder / "mine").touch()
    shutil.copytree(left, users[2])
    (tmp_path / "trainfast-offload.txt").touch()
    (tmp_path / "trainfast-offload-link").symlink_to(users[0])
    ours = Scratch(tmp_path)
    ours.remove()
    assert not left.exists()
    assert not ours.path.exists()
    assert live.path.exists(), "its run lives"
    assert all(list(folder.iterdir()) for folder in users)
    assert (tmp_path / "trainfast-offload.txt").exists()
    assert (tmp_path / "trainfast-offload-link").is_symlink()


def test_a_deletion_that_was_cut_short_is_finished_later(tmp_path: Path) -> None:
    left = left_by_a_dead_run(tmp_path)
    shutil.rmtree(left / "states")
    remove_leftovers(tmp_path)
    assert not left.exists()


def test_a_directory_that_another_process_keeps_locked_is_left_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LOCK_WITHIN_S", 0.2)
    left = left_by_a_dead_run(tmp_path)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert not remove_leftovers(tmp_path)
    assert left.exists()
    os.close(held)
    assert remove_leftovers(tmp_path)
    assert not left.exists()
