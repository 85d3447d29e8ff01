"""The commands of `benchmarks/gpu.sh` on a machine with a GPU: each one exists, though none can run here."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks.gpu_check import why_left_out
from benchmarks.several_gpus import matrix_of

from trainfast_runner.machine.devices import Machine
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.settings.compatibility.check import check
from trainfast_runner.settings.compatibility.facts import Facts
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.catalog import STRATEGIES
from trainfast_tui.cli import parser

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
GPU = DeviceReading(index=0, uuid="GPU-0", name="NVIDIA H200", memory_free_bytes=139 << 30, compute_capability="9.0")
GPUS = tuple(msgspec.structs.replace(GPU, index=index, uuid=f"GPU-{index}") for index in range(2))
ONE_GPU = Machine(device="cuda", gpus=GPUS[:1], nvml_gpus=GPUS[:1], cores=16)
TWO_GPUS = Machine(device="cuda", gpus=GPUS, nvml_gpus=GPUS, cores=16)
MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tNODE\t0-51\t0\t\tN/A
NIC0\tPXB\tNODE\t X \t\t\t

Legend:

  X    = Self
"""
INSTALLED = {
    "torch": "2.11.0",
    "transformers": "5.17.0",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.0",
    "deepspeed": "0.19.8",
}


def commands(*arguments: str) -> list[list[str]]:
    words = subprocess.run(["bash", str(SCRIPT), "-n", *arguments], capture_output=True, text=True, check=True)
    assert words.stderr == ""
    return [line.split() for line in words.stdout.splitlines()]


def test_every_run_it_starts_is_valid_on_the_gpus_it_needs() -> None:
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
        machine = ONE_GPU if spec.knobs["devices"] in (None, 1) else TWO_GPUS
        check(Facts(spec, machine, {}, INSTALLED, sys.executable))
        assert parsed.preset == preset


def test_a_part_of_it_can_be_asked_for() -> None:
    whole = [name for name, *_ in commands()]
    before = ("nvml", "first", "precision", "optimizer", "technique", "strategy", "several")
    groups = (*before, "memory", "slowdown", "screen")
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


def test_with_one_gpu_the_checks_of_several_say_that_they_were_left_out() -> None:
    seen = ["name, driver_version", "NVIDIA H200, 580.82"]
    assert why_left_out(None, 2, seen) == "needs 2 GPUs, and there is 1 here"
    assert why_left_out(None, 2, [*seen, seen[1]]) is None
    assert why_left_out(None, 1, seen) is None
    assert why_left_out("no-such-package", 1, seen) == "no-such-package is not installed"


def test_the_matrix_of_nvidia_smi_is_read_without_its_other_columns() -> None:
    assert matrix_of(MATRIX) == [["X", "NV18"], ["NV18", "X"]]


def test_every_strategy_of_several_gpus_has_a_check_of_its_losses() -> None:
    checked = {words[5] for words in commands("several") if words[3:5] == ["benchmarks.several_gpus", "losses"]}
    assert checked == set(STRATEGIES) - {"single"}
