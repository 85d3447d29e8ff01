"""What `benchmarks/gpu.sh` would run on a machine with a GPU: every command of it is one, though none can run here."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from trainfast_runner.combinations.check import check
from trainfast_runner.combinations.facts import Facts
from trainfast_runner.hardware.machine import Machine
from trainfast_runner.settings.spec import resolve
from trainfast_runner.telemetry.readings import DeviceReading
from trainfast_tui.cli import parser

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
GPU = DeviceReading(index=0, uuid="GPU-0", name="NVIDIA H200", memory_free_bytes=139 << 30, compute_capability="9.0")
ONE_GPU = Machine(device="cuda", gpus=(GPU,), nvml_gpus=(GPU,), cores=16)
INSTALLED = {
    "torch": "2.11.0",
    "transformers": "5.17.0",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.0",
    "deepspeed": "0.19.8",
}


def commands(*arguments: str) -> list[list[str]]:
    said = subprocess.run(["bash", str(SCRIPT), "-n", *arguments], capture_output=True, text=True, check=True)
    assert said.stderr == ""
    return [line.split() for line in said.stdout.splitlines()]


def test_every_run_it_starts_is_valid_on_one_gpu() -> None:
    names = [name for name, *_ in commands()]
    assert len(set(names)) == len(names), "each check has a file of its own"
    trainings = [words[3:] for words in commands() if words[2] == "trainfast-tui"]
    assert len(trainings) > 25
    for words in trainings:
        _, parsed = parser.parse(words)
        if words[0] not in ("run", "search"):
            continue
        preset = words[2] if words[0] == "search" else words[1]
        spec = resolve(preset, [value for flag, value in itertools.pairwise(words) if flag == "--set"])
        check(Facts(spec, ONE_GPU, {}, INSTALLED, sys.executable))
        assert parsed.preset == preset


def test_a_part_of_it_can_be_asked_for() -> None:
    whole = [name for name, *_ in commands()]
    groups = ("nvml", "first", "precision", "optimizer", "technique", "strategy", "memory", "slowdown", "screen")
    assert [name for group in groups for name, *_ in commands(group)] == whole
    assert [name for name, *_ in commands("-k", "optimizer-adamw-f*", "run")] == [
        "optimizer-adamw-foreach",
        "optimizer-adamw-fused",
    ]


def test_every_measurement_it_starts_exists() -> None:
    modules = {words[3] for words in commands() if words[2] == "-m"}
    assert {"benchmarks.nvml_truth", "benchmarks.attached", "benchmarks.memory_prediction"} <= modules
    for module in modules:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    assert importlib.util.find_spec("trainfast_tui.cli.__main__"), "it is run as a module"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SCRIPT), "-o", str(tmp_path / "out")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no GPU: ")
    assert not (tmp_path / "out").exists()
