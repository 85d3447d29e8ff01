"""DeepSpeed's extensions are built by one process at a time; a killed build's lock holds up no other."""

import json
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from trainfast_runner.machine.training_python import extensions_directory
from trainfast_runner.worker.strategies.deepspeed_zero import build_failure
from trainfast_tui.text.event_words import start_words

BUILD = """
import sys
from pathlib import Path
from trainfast_runner.worker.strategies.deepspeed_zero import build_lock
lock = Path(sys.argv[1])
with build_lock(lock.parents[1], "cpu_adam"):
    print("alone", flush=True)
    open(lock, "x")
    sys.stdin.readline()
"""


def begin(lock):
    """A build that takes torch's lock and keeps it until a line comes."""
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def next_line(process):
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_build_waits_for_a_live_one_and_not_for_the_lock_of_a_killed_one(tmp_path):
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


def test_extensions_are_built_below_the_users_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = extensions_directory("/env/bin/python", {"torch": "2.9.0", "deepspeed": "0.18.2"})
    assert found.parent == tmp_path / "trainfast"
    assert found.name.startswith("torch2.9.0-deepspeed0.18.2-")


@pytest.mark.long
def test_the_build_of_an_extension_is_a_phase_of_its_own_once(start, environment, tmp_path):
    """DeepSpeedCPUAdam, compiled for offloaded states before the model is built."""
    pytest.importorskip("deepspeed")
    phases = []
    for _ in range(2):
        folder, command = start(strategy="zero2-offload", steps=3)
        torchrun = [command[0], "-m", "torch.distributed.run", "--standalone", *command[1:]]
        fresh = {**environment, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
        subprocess.run(torchrun, env=fresh, cwd=folder, check=True, capture_output=True, timeout=600)
        lines = [json.loads(line) for line in (folder / "worker.jsonl").read_text().splitlines()]
        phases.append(list(dict.fromkeys(line["phase"] for line in lines if line["kind"] == "phase")))
        shown = [start_words(line["phase"], line["detail"]) for line in lines if line.get("phase") == "compile"]
        assert shown == ["compiling an extension (CPUAdam of DeepSpeed, once for this Python)"][: 2 - len(phases)]
    assert phases == [["import", "data", "compile", "model", "train"], ["import", "data", "model", "train"]]


def test_an_extension_that_is_built_is_loaded_without_a_phase(tmp_path, monkeypatch):
    """A stand-in for DeepSpeed's table of builders: what takes a minute there is a file here."""

    class TinyBuilder:
        name = "tiny"

        def load(self, verbose):
            (tmp_path / "tiny").mkdir(exist_ok=True)
            (tmp_path / "tiny" / "tiny.so").touch()

    table = ModuleType("deepspeed.ops")
    table.op_builder = SimpleNamespace(TinyBuilder=TinyBuilder)
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.ops", table)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    phases = []
    for _ in range(2):
        assert build_failure("TinyBuilder", lambda phase, detail: phases.append(start_words(phase, detail))) is None
    assert phases == ["compiling an extension (Tiny of DeepSpeed, once for this Python)"]
