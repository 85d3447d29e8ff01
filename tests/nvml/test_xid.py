"""Xid errors reach whoever asked for them, with the GPU and what the number means."""

import queue

import pynvml
import pytest
import stand_in
from stand_in import Gpu, Machine

from cli.command import until
from trainfast_runner.machine.telemetry.nvml import Nvml


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
