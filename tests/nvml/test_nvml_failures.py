"""Messages when the driver, a GPU or the binding is not there, the readings that go on, and Xid errors."""

import ctypes
import functools
import queue
import struct
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
import stand_in
from stand_in import Gpu, Machine, gpus
from stand_in_machine import FUNCTIONS, gpu_of, put

import trainfast_runner
from cli.command import until
from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.machine.telemetry.topology import read_topology

RUNNER = Path(next(iter(trainfast_runner.__path__))).parent


def test_a_lost_gpu_is_recorded_the_others_go_on_and_it_comes_back(watch):
    machine = Machine(gpus(3))
    machine.gpus[1].lost = (3, 8)
    look = watch(machine)
    errors = {}
    for at_s in range(20):
        readings, missing = look(at_s)
        assert [gpu.uuid for gpu in readings] == ["GPU-0", "GPU-1", "GPU-2"]
        assert readings[0].temperature_c == readings[2].temperature_c == 50
        errors[at_s] = readings[1].error
        if readings[1].error:
            assert readings[1].temperature_c is None
            assert missing["gpu1"] == readings[1].error
    assert errors[2] is None
    assert "GPU is lost" in (errors[3] or "")
    assert "GPU is lost" in (errors[7] or "")
    assert errors[19] is None, "after the GPU came back it must report again"
    assert readings[1].temperature_c == 50
    assert machine.calls["nvmlInitWithFlags"] <= 5, "initializing again is paced by a growing delay"


def test_a_gpu_lost_before_the_start_takes_its_place_when_it_comes(watch):
    machine = Machine(gpus(2))
    machine.gpus[0].lost = (0, 2)
    look = watch(machine)
    first, second = look(0)[0]
    assert (first.index, first.uuid, second.index, second.uuid) == (0, None, 1, "GPU-1")
    look(10)
    first, second = look(11)[0]
    assert (first.index, first.uuid, first.error, second.index) == (0, "GPU-0", None, 1)


def test_a_gpu_that_the_driver_stops_listing_does_not_vanish(watch):
    machine = Machine(gpus(3))
    look = watch(machine)
    look(0)
    machine.gpus = [machine.gpus[0], machine.gpus[2]]
    machine.forgets = True
    look(1)
    readings, _ = look(5)
    assert [(gpu.index, gpu.uuid) for gpu in readings] == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2")]
    assert "no longer lists" in (readings[1].error or "")
    assert readings[2].temperature_c == 50


def test_a_lost_connection_is_opened_again(watch):
    machine = Machine(gpus(2))
    look = watch(machine)
    look(0)
    machine.forgets = True
    readings, missing = look(1)
    assert {gpu.error for gpu in readings} == {missing["nvml"]}
    assert "connection to the NVIDIA driver was lost" in missing["nvml"]
    readings, missing = look(3)
    assert [gpu.temperature_c for gpu in readings] == [50, 50]
    assert missing == {}


def test_counters_that_start_again_with_the_driver_are_still_believed(watch):
    loaded = {"s": 0.0}
    machine = Machine(
        gpus(
            1,
            violation_ns=lambda number, s: int((s - loaded["s"]) * 5e8),
            pcie_bytes=lambda s: int((s - loaded["s"]) * 1e6),
            reasons=0xFC,
        )
    )
    look = watch(machine)
    look(0)
    assert look(10)[0][0].thermal_violation_ns == 5_000_000_000
    machine.forgets = True
    look(11)
    loaded["s"] = 12.0
    [gpu], missing = look(14)
    assert (gpu.thermal_violation_ns, gpu.sw_thermal_slowdown_ns) == (1_000_000_000, 1_000_000_000)
    assert gpu.pcie_tx_bytes == 2_000_000
    assert missing == {}


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "driver was updated under the running system: reboot"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
        (pynvml.NVML_ERROR_UNKNOWN, "code 999"),
    ],
)
def test_a_driver_that_does_not_start_is_explained_and_tried_again(watch, code, sentence):
    machine = Machine(gpus(1), init_code=code)
    look = watch(machine)
    readings, missing = look(0)
    assert readings == []
    assert sentence in missing["nvml"]
    machine.init_code = 0
    assert look(0.5)[0] == [], "not before the delay has passed"
    readings, missing = look(1.5)
    assert readings[0].temperature_c == 50
    assert missing == {}


def test_no_gpu_is_recorded(watch):
    assert watch(Machine([]))(0) == ([], {"nvml": "the NVIDIA driver is loaded and lists no GPU"})


def test_no_library_gives_the_sentence_with_the_cure(monkeypatch):
    def nothing_to_load(_name):
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", nothing_to_load)
    readings, missing = Nvml().sample(0)
    assert readings == []
    assert "libnvidia-ml.so.1 was not found" in missing["nvml"]
    assert "LD_LIBRARY_PATH" in missing["nvml"]


@pytest.mark.parametrize("source", ["raise ImportError('broken')\n", ""], ids=["broken binding", "no functions"])
def test_a_pynvml_that_cannot_be_used_is_named_with_the_cure(tmp_path, source):
    (tmp_path / "pynvml.py").write_text(source)
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(RUNNER)!r}]\n"
        "from trainfast_runner.machine.telemetry.nvml import Nvml\n"
        "from trainfast_runner.machine.telemetry.topology import read_topology\n"
        "print(Nvml().sample(0)[1]['nvml'])\n"
        "assert read_topology().missing\n"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "the pynvml module cannot be imported, or lacks functions" in output
    assert "pip install --force-reinstall nvidia-ml-py" in output


@pytest.mark.parametrize(
    ("code", "files", "sentence"),
    [
        (9, [], "modprobe nvidia"),
        (9, ["proc/driver/nvidia/version"], "start it with --gpus all"),
        (999, ["proc/driver/nvidia/version"], "start it with --gpus all"),
        (4, ["proc/driver/nvidia/version", "dev/nvidiactl"], "group video or render"),
        (4, [], "no permission"),
        (999, ["proc/driver/nvidia/version", "dev/nvidiactl"], "a container may have lost its devices"),
        (18, ["proc/driver/nvidia/version", "dev/nvidiactl"], "driver was updated under the running system"),
        (12, [], "libnvidia-ml.so.1 was not found"),
        (7, [], "code 7). See whether `nvidia-smi` works"),
        (15, [], "GPU is lost"),
    ],
)
def test_the_cure_fits_what_the_machine_has(tmp_path, code, files, sentence):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert sentence in binding.library_failure(code, "its name", tmp_path).sentence


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"\xf8", 0, 1, "invalid start byte"),
        ValueError("no figure"),
        struct.error("unpack requires a buffer of 8 bytes"),
        ctypes.ArgumentError("argument 1"),
        TypeError("'NoneType' object is not iterable"),
        pynvml.NVMLError(12345),
    ],
    ids=lambda error: type(error).__name__,
)
def test_kind_a_any_error_of_any_call_loses_its_reading_of_its_gpu_alone(watch, monkeypatch, error):
    raising = ""

    def sometimes(name, answer, machine, handle, *arguments):
        if name == raising and gpu_of(machine, handle) is machine.gpus[0]:
            raise error
        return answer(machine, handle, *arguments)

    names = [name for name in FUNCTIONS if name.startswith("nvmlDeviceGet") and "Handle" not in name]
    names.remove("nvmlDeviceGetCount_v2")
    for name in names:
        monkeypatch.setitem(FUNCTIONS, name, functools.partial(sometimes, name, FUNCTIONS[name]))
    for raising in names:
        look = watch(Machine(gpus(2)))
        for at_s in range(3):
            (hit, sound), missing = look(at_s)
            assert (hit.error, sound.error) == (None, None), raising
            absent = {field for field in hit.__struct_fields__ if getattr(hit, field) is None} - {"error"}
            assert {f"gpu0.{field}" for field in absent} == missing.keys(), raising
        assert [device.error for device in read_topology().devices] == [None, None]


def test_kind_a_a_reading_that_was_unreadable_at_first_comes_back(watch, monkeypatch):
    answers = {
        name: FUNCTIONS[name]
        for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", "nvmlDeviceGetFanSpeed")
    }

    def fail(*_arguments):
        raise ValueError("no figure")

    for name in answers:
        monkeypatch.setitem(FUNCTIONS, name, fail)
    look = watch(Machine(gpus(1)))
    [gpu], missing = look(0)
    assert (gpu.temperature_c, gpu.fan_percent) == (None, None)
    assert {"gpu0.temperature_c", "gpu0.fan_percent"} <= missing.keys()
    FUNCTIONS.update(answers)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    [gpu], missing = [look(at_s) for at_s in range(1, 7)][-1]
    assert (gpu.temperature_c, gpu.fan_percent, missing) == (50, 30, {})


@pytest.mark.parametrize("garbage", [b"\xf8\x95", b"", b"\x01\x02", b"no uuid"])
def test_kind_a_a_uuid_that_cuda_would_not_take_is_none(watch, monkeypatch, garbage):
    def answer(_machine, _handle, buffer, _size):
        buffer.value = garbage
        return 0

    monkeypatch.setitem(FUNCTIONS, "nvmlDeviceGetUUID", answer)
    look = watch(Machine(gpus(2)))
    readings, missing = look(0)
    assert [(gpu.index, gpu.uuid, gpu.temperature_c) for gpu in readings] == [(0, None, 50), (1, None, 50)]
    assert missing["gpu1.uuid"].startswith("the driver's answer cannot be read (")


def test_kind_h_an_impossible_number_of_gpus_is_a_failure_of_the_driver(watch, monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "nvmlDeviceGetCount_v2", lambda _machine, count: put(count, 0xFFFFFFFF))
    readings, missing = watch(Machine(gpus(2)))(0)
    assert (readings, list(missing)) == ([], ["nvml"])
    assert "impossible: 4,294,967,295" in missing["nvml"]
    assert "impossible" in (read_topology().missing or "")


def test_an_xid_event_names_its_gpu_also_beside_a_gpu_without_events():
    silent = Gpu(uuid="GPU-silent", unsupported=frozenset({"nvmlDeviceRegisterEvents"}))
    machine = Machine([silent, Gpu(uuid="GPU-1")])
    xids = queue.SimpleQueue()
    with stand_in.installed(machine):
        nvml = Nvml(on_xid=lambda *what: xids.put(what))
        nvml.sample(0)
        machine.xids.put((1, 79))
        t_ns, index, code = xids.get(timeout=60)
        missing = nvml.sample(1)[1]
        nvml.close()
    assert t_ns > 0
    assert (index, code) == (1, 79)
    assert missing["gpu0.xid_errors"] == "not supported by this GPU and driver"
    assert "gpu1.xid_errors" not in missing


@pytest.mark.parametrize("name", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"])
def test_a_binding_without_a_call_for_events_is_named_as_the_reason(monkeypatch, name):
    monkeypatch.delattr(pynvml, name)
    with stand_in.installed(Machine([Gpu(uuid="GPU-0")])):
        nvml = Nvml(on_xid=lambda *_: None)
        until(lambda: "gpu0.xid_errors" in nvml.sample(0)[1], "the reason for no Xid errors")
        missing = nvml.sample(1)[1]
        nvml.close()
    assert "pip install --upgrade nvidia-ml-py" in missing["gpu0.xid_errors"]
