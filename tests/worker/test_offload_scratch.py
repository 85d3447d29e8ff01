"""What a run wrote under `offload_path` goes with it, and at the latest when the next one starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

HOLD = """
import sys
from pathlib import Path
from trainfast_runner.worker.strategies.offload_scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.path / "states").write_bytes(b"0" * 64)
print(scratch.path, flush=True)
sys.stdin.read()
"""


def test_a_dead_runs_directory_is_removed_and_a_live_ones_is_not(tmp_path: Path) -> None:
    from trainfast_runner.worker.strategies.offload_scratch import Scratch

    (tmp_path / "of-somebody-else").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        theirs = Path(other.stdout.readline().strip())
        ours = Scratch(tmp_path)
        assert (theirs / "states").exists()
        ours.remove()
        assert not ours.path.exists()
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    Scratch(tmp_path).remove()
    assert [folder.name for folder in tmp_path.iterdir()] == ["of-somebody-else"]
