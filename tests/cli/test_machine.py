"""`monitor`, `doctor`, `topo` and the device of a run: the machine as it is, with and without GPUs."""

import signal
from pathlib import Path

import pytest
from cuda_python import cuda_python

from cli.command import SMALL
from trainfast_runner.machine.doctor import ends_at_logout


def test_monitor_gives_the_hosts_real_readings(cli):
    tick = cli("monitor", "--once", "--json").json
    assert set(tick) >= {"schema", "t_ns", "host", "devices", "missing"}
    assert 0 <= tick["host"]["cpu_percent"] <= 100
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert tick["host"]["memory_total_bytes"] == total_kib * 1024
    assert 0 < tick["host"]["memory_used_bytes"] < tick["host"]["memory_total_bytes"]


def test_everything_that_monitor_cannot_give_has_its_reason(cli, gpus):
    """MIG, the host's memory as the GPU's, no counters and no memory: what is null is in `missing`, in the same words
    that doctor uses."""
    machine = gpus(
        4, "mig 0", "unified 1", "counters none", "no 2 nvmlDeviceGetMemoryInfo_v2", "no 2 field:75", "lost 3 0 1e9"
    )
    tick = cli("monitor", "--once", "--json", **machine).json
    for gpu in tick["devices"][:3]:
        absent = {name for name, value in gpu.items() if value is None and name != "error"}
        assert absent == {name for name in gpu if tick["missing"].get(f"gpu{gpu['index']}.{name}")}
    assert tick["devices"][3]["error"] == tick["missing"]["gpu3"]
    assert {f"host.{name}" for name, value in tick["host"].items() if value is None} <= tick["missing"].keys()
    text = cli("doctor", **machine).out
    for reason in {reason for key, reason in tick["missing"].items() if key.startswith("gpu")}:
        assert reason in text


GARBLED = ("garbled 0 nvmlDeviceGetName", "garbled 0 nvmlSystemGetDriverVersion", "garbled 1 nvmlDeviceGetUUID")


def test_case_09_an_unreadable_answer_loses_itself_alone(cli, gpus):
    """Garbage for a name, a UUID and the driver's version, which pynvml cannot decode."""
    machine = gpus(3, *GARBLED)
    tick = cli("monitor", "--once", "--json", **machine).json
    assert [gpu["name"] is None for gpu in tick["devices"]] == [True, False, False]
    assert [gpu["uuid"] is None for gpu in tick["devices"]] == [False, True, False]
    assert [(gpu["temperature_c"], gpu["error"]) for gpu in tick["devices"]] == [(40, None), (41, None), (42, None)]
    for key in ("gpu0.name", "gpu1.uuid"):
        assert tick["missing"][key].startswith("the driver's answer cannot be read (UnicodeDecodeError: ")
    doctor_text = cli("doctor", **machine).out
    assert "a GPU whose name cannot be read, 80.0 GiB" in doctor_text
    assert "name (GPU 0), uuid (GPU 1): the driver's answer cannot be read" in doctor_text
    devices = cli("topo", "--json", **machine).json["devices"]
    absent = [(gpu["name"] is None, gpu["uuid"] is None) for gpu in devices]
    assert absent == [(True, False), (False, True), (False, False)]
    done = cli("run", "tiny-llama", *SMALL, "--set", "steps=4", "--set", "devices=cpu", "--json", **machine)
    assert done.code == 0, done.err


def test_case_10_impossible_readings_are_null_with_their_reason(cli, gpus):
    machine = gpus(
        2, "ramp 0 0 4294967256 0 3714000 9999", "pcie 0 77 4294967295", "process 0 4294967295 1 0 1e18",
        "process 0 0 1 0 1e18", "process 0 4242 1 0 1e18", "ecc 0 4294967295 4294967295 4294967295",
    )  # fmt: skip
    tick = cli("monitor", "--once", "--json", **machine).json
    gpu, sound = tick["devices"]
    names = {"temperature_c", "memory_temperature_c", "power_w", "power_average_w", "power_instant_w", "sm_clock_mhz"}
    names |= {"pcie_generation", "pcie_width", "ecc_corrected_errors", "ecc_uncorrected_errors"}
    names |= {"remapped_rows_corrected"}
    for name in names:
        assert gpu[name] is None
        assert tick["missing"][f"gpu0.{name}"].startswith("the driver's answer is impossible: ")
        assert sound[name] is not None
    assert [process["pid"] for process in gpu["processes"]] == [4242]
    assert "4294967295, 0" in tick["missing"]["gpu0.processes.pid"]
    text = cli("doctor", **machine).out
    assert "more air" not in text
    assert "sudo nvidia-smi --gpu-reset" not in text
    assert "PCIe lanes" not in cli("topo", **machine).out


def test_monitor_shows_eight_gpus(cli, gpus):
    machine = gpus(8)
    tick = cli("monitor", "--once", "--json", **machine).json
    assert [gpu["temperature_c"] for gpu in tick["devices"]] == [40 + index for index in range(8)]
    assert all(gpu["throttle_reasons"] == ["idle"] for gpu in tick["devices"])
    units = ("bytes", "percent", "c", "w", "mj", "mhz", "ns", "errors", "us")
    counts = {"index", "pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max"}
    for reading, value in tick["devices"][0].items():
        assert value is not None or f"gpu0.{reading}" in tick["missing"] or reading == "error"
        if isinstance(value, (int, float)) and not isinstance(value, bool) and reading not in counts:
            assert reading.rsplit("_", 1)[-1] in units or reading.startswith("remapped_rows_"), reading
    lines = cli("monitor", "--once", **machine).out.splitlines()
    assert [line.split()[0] for line in lines] == ["CPU", *["GPU"] * 8]


def test_monitor_streams_until_it_is_interrupted(cli):
    started = cli.start("monitor", "--json", "--interval", "0.1")
    lines = [started.process.stdout.readline() for _ in range(3)] if started.process.stdout else []
    started.signal(signal.SIGINT)
    done = started.end()
    assert (done.code, done.err) == (130, "")
    assert all(line.startswith('{"schema":') for line in lines)


def test_doctor_names_what_is_there(cli):
    found = cli("doctor", "--json")
    assert found.code == 0
    checks = {check["name"]: check for check in found.json["checks"]}
    assert found.json["healthy"]
    assert "torch " in checks["training stack"]["finding"]
    for name in ("run directory", "memory limit", "standby", "C++ compiler", "ninja", "/dev/shm", "logout"):
        assert checks[name]["state"] in ("ok", "warn")
        assert checks[name]["finding"]
    for check in found.json["checks"]:
        assert check["state"] != "warn" or check["cure"] or check["name"].startswith("GPU")


def test_a_binding_that_cannot_be_used_is_one_sentence_everywhere_and_nothing_else_suffers(cli, tmp_path):
    (tmp_path / "pynvml.py").write_text("raise RuntimeError('not for you')\n")
    machine = {"PYTHONPATH": str(tmp_path)}
    what = "the pynvml module cannot be imported, or lacks functions"
    cure = "pip install --force-reinstall nvidia-ml-py"
    assert f"{what}: {cure}" in cli("monitor", "--once", **machine).out
    assert f"{what}: {cure}" in cli("topo", **machine).out
    (check,) = [c for c in cli("doctor", "--json", **machine).json["checks"] if c["name"] == "GPU"]
    assert (check["state"], check["finding"]) == ("warn", f"none: {what}. Training runs on the CPU")
    assert check["cure"].startswith(cure)
    assert cli("runs", "list", **machine).code == 0


def test_logind_says_whose_runs_end_at_logout(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not ends_at_logout("ann"), "there is no busctl"

    def answers(line):
        bus = tmp_path / "busctl"
        bus.write_text(f"#!/bin/sh\necho {line}\n")
        bus.chmod(0o700)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answers("b false")
    assert not ends_at_logout("ann")
    answers("b true")
    assert ends_at_logout("ann")
    assert not ends_at_logout("root")
    answers("Failed to get property")
    assert not ends_at_logout("bob")


@pytest.fixture
def python(tmp_path):
    """`--python` with a CUDA build of torch."""
    return ["--python", cuda_python(tmp_path / "bin")]


@pytest.mark.parametrize("command", [["run"], ["search", "max-batch"], ["predict"]])
def test_an_nvml_failure_with_gpus_present_is_refused_before_launch(cli, gpus, python, command):
    machine = gpus(2, "init 18 0 1000")
    done = cli(*command, "tiny-llama", *python, "--json", **machine)
    assert "the driver was updated under the running system: reboot" in done.refused()
    assert "try devices=cpu to train on the CPU" in done.refused()
    assert done.json["error"]["key"] == "devices"
    assert cli("runs", "list", "--json").json["runs"] == []


def test_a_rocm_build_says_what_is_not_supported(cli, gpus, tmp_path):
    python = cuda_python(tmp_path / "bin", {"torch.version.cuda": None, "torch.version.hip": "7.0"})
    line = cli("run", "tiny-llama", "--python", python, **gpus(2)).refused()
    assert "is a ROCm build (HIP 7.0): AMD GPUs are not supported" in line


@pytest.mark.long
def test_devices_cpu_trains_on_the_cpu_beside_gpus_and_is_exported(cli, gpus):
    machine = gpus(2, "init 18 0 1000")
    settings = [*SMALL, "--set", "strategy=ddp", "--set", "devices=cpu:2", "--set", "steps=5"]
    done = cli("run", "tiny-llama", *settings, "--json", **machine)
    assert done.code == 0, done.err
    result = done.json
    assert (result["actual"]["device"], result["actual"]["world_size"]) == ("cpu", 2)
    assert result["knobs"]["devices"] == "cpu:2"
    assert "--set devices=cpu:2" in cli("export", "last", "--to", "command").out
    assert "use_cpu=True" in cli("export", "last", "--to", "training-args").out
    predicted = cli("predict", "tiny-llama", *settings, "--json", **machine).json
    assert predicted["predicted"]["context_bytes"] is None
