"""A run is on the CPU only if that is asked for or there is no GPU; whatever is neither is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_python import cuda_python

from cli.command import SMALL, Cli

INSTANCES = [f"MIG-00000000-0000-0000-{part:04}-{0:012}" for part in (1, 2)]


@pytest.fixture
def gpus(nvml_library: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose two GPUs do what the file `scenario` says."""
    (tmp_path / "scenario").touch()
    return {
        "LD_LIBRARY_PATH": str(nvml_library),
        "NVML_STAND_IN_GPUS": "2",
        "NVML_STAND_IN_SCENARIO": str(tmp_path / "scenario"),
    }


@pytest.fixture
def python(tmp_path: Path) -> list[str]:
    """`--python` with a CUDA build of torch."""
    return ["--python", cuda_python(tmp_path / "bin")]


@pytest.mark.parametrize("command", [["run"], ["search", "max-batch"], ["predict"]])
def test_an_nvml_failure_with_gpus_present_is_refused_before_launch(
    cli: Cli, gpus: dict[str, str], python: list[str], tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "scenario").write_text("init 18 0 1000\n")
    done = cli(*command, "tiny-llama", *python, "--json", **gpus)
    assert "the driver was updated under the running system: reboot" in done.refused()
    assert "try devices=cpu to train on the CPU" in done.refused()
    assert done.json["error"]["key"] == "devices"
    assert cli("runs", "list", "--json").json["runs"] == []


def test_a_rocm_build_says_what_is_not_supported(cli: Cli, gpus: dict[str, str], tmp_path: Path) -> None:
    python = cuda_python(tmp_path / "bin", {"torch.version.cuda": None, "torch.version.hip": "7.0"})
    line = cli("run", "tiny-llama", "--python", python, **gpus).refused()
    assert "is a ROCm build (HIP 7.0): AMD GPUs are not supported" in line


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (INSTANCES[0][:-1] + "9", f"names no MIG instance here; did you mean {INSTANCES[0]}?"),
        ("0", f"GPU 0 is in MIG mode, where runs use an instance by its name; try CUDA_VISIBLE_DEVICES={INSTANCES[0]}"),
        ("5", "CUDA_VISIBLE_DEVICES=5 names no GPU here"),
    ],
)
def test_a_device_name_that_no_run_can_use_starts_nothing(
    cli: Cli, gpus: dict[str, str], python: list[str], tmp_path: Path, variable: str, expected: str
) -> None:
    (tmp_path / "scenario").write_text("instance 0 7 0 512\ninstance 0 8 0 64\n")
    done = cli("run", "tiny-llama", *python, "--json", **gpus, CUDA_VISIBLE_DEVICES=variable)
    assert expected in done.refused()
    assert cli("runs", "list", "--json").json["runs"] == []


@pytest.mark.long
def test_devices_cpu_trains_on_the_cpu_beside_gpus_and_is_exported(
    cli: Cli, gpus: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "scenario").write_text("init 18 0 1000\n")
    settings = [*SMALL, "--set", "strategy=ddp", "--set", "devices=cpu:2", "--set", "steps=5"]
    done = cli("run", "tiny-llama", *settings, "--json", **gpus)
    assert done.code == 0, done.err
    result = done.json
    assert (result["actual"]["device"], result["actual"]["world_size"]) == ("cpu", 2)
    assert result["knobs"]["devices"] == "cpu:2"
    assert "--set devices=cpu:2" in cli("export", "last", "--to", "command").out
    assert "use_cpu=True" in cli("export", "last", "--to", "training-args").out
    predicted = cli("predict", "tiny-llama", *settings, "--json", **gpus).json
    assert predicted["predicted"]["context_bytes"] is None
