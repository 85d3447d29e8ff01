"""The figures that the hooks in a script and the worker compute each for itself are the same in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainfast_runner.door.trainfast_door import install, notes
from trainfast_runner.worker import main
from trainfast_runner.worker.records import record_file

LIMITED = """
import json, resource, torch
from trainfast_runner.door.trainfast_door import memory_limit
from trainfast_runner.worker.memory import memory_meter

of_hooks = memory_limit.MemoryLimit([1 << 30], "cpu")
of_hooks.impose(rank=0)
of_worker = memory_meter.HostLimitGauge(1 << 30)
torch.ones(64 << 20, dtype=torch.uint8)
peaks = [of_hooks.peak_bytes(), of_worker.peak_bytes()]

def set_to(cap, limits):
    limits(cap)
    return resource.getrlimit(resource.RLIMIT_DATA)

HARD = 1 << 40
resource.setrlimit(resource.RLIMIT_DATA, (HARD, HARD))
both = memory_limit._set_limit, memory_meter._limit_data
limits = [[set_to(cap, one) for one in both] for cap in (HARD >> 1, HARD << 1)]
print(json.dumps({"peaks": peaks, "limits": limits}))
"""
"""A process of its own, because the limit stays."""


def test_the_peak_under_a_limit_and_the_limit_itself_agree() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    hooks_bytes, worker_bytes = found["peaks"]
    assert hooks_bytes > 64 << 20
    assert hooks_bytes == pytest.approx(worker_bytes, abs=2 << 20)
    assert all(of_hooks == of_worker for of_hooks, of_worker in found["limits"])


class OddError(Exception):
    """An error with a module."""


def caught() -> BaseException:
    """An error with a cause, which was raised while another one was handled."""
    try:
        try:
            try:
                raise KeyError("hidden")
            except KeyError:
                raise OddError("x" * 5000) from None
        except OddError:
            int("seven")
    except ValueError as error:
        try:
            raise RuntimeError("last") from error
        except RuntimeError as last:
            return last
    raise AssertionError


def test_the_chain_of_an_exception_agrees() -> None:
    error = caught()
    chain = install.exception_chain(error)
    assert chain == record_file.exception_chain(error)
    assert [link["type"].rpartition(".")[2] for link in chain] == ["RuntimeError", "ValueError", "OddError"]
    assert install.TRACEBACK_CHARACTERS == record_file.TRACEBACK_CHARACTERS


def test_the_start_of_a_process_and_the_names_of_its_files_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert notes._start_ticks() == main.start_ticks()
    for rank in (0, 3):
        monkeypatch.setenv("RANK", str(rank))
        assert notes.RankFiles(str(tmp_path), steps_from_log=True)._suffix() == record_file.rank_suffix(rank)
