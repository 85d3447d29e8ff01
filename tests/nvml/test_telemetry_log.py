"""A run's telemetry and events while its devices come and go."""

import threading
import time

import stand_in
from stand_in import Gpu, Machine, gpus

from trainfast_runner.records.telemetry_lines import read_ticks
from trainfast_runner.running.supervision.record_files import TelemetryLog


def ticks(directory):
    return read_ticks(directory / "telemetry.jsonl")[0]


def test_a_gpu_lost_and_back_leaves_two_events_and_no_gap_in_the_others(tmp_path):
    machine = Machine(gpus(3))
    events = []
    troubles = []
    with stand_in.installed(machine):
        log = TelemetryLog(tmp_path, ["GPU-0", "GPU-1", "GPU-2"], events.append, troubles.append, period_s=0.05)

        def wait(kind):
            deadline = time.monotonic() + 60
            while not any(event.kind == kind for event in events):
                assert time.monotonic() < deadline, [event.kind for event in events]
                threading.Event().wait(0.01)

        log.start()
        while not ticks(tmp_path):
            threading.Event().wait(0.01)
        machine.gpus[1].lost = (0, float("inf"))
        wait("gpu_lost")
        machine.gpus[1].lost = None
        wait("gpu_back")
        machine.xids.put((2, 48))
        wait("xid")
        log.stop()
    seen = ticks(tmp_path)
    for gpu in (0, 2):
        assert all(tick.devices[gpu].temperature_c == 50 for tick in seen)
    assert any(tick.devices[1].error for tick in seen)
    # On a busy machine the sampler may slow itself meanwhile.
    about_gpus = [event for event in events if event.kind != "trouble"]
    assert [(event.kind, event.device) for event in about_gpus] == [("gpu_lost", 1), ("gpu_back", 1), ("xid", 2)]
    assert about_gpus[-1].detail == "48: double-bit ECC error"
    assert troubles == []


def test_an_xid_of_its_gpu_is_an_event_of_a_run_on_a_mig_instance(tmp_path):
    parts = tuple(Gpu(uuid=f"MIG-{number}", name="MIG 1g.10gb", numbers=(number, 0)) for number in (7, 8))
    machine = Machine([Gpu(uuid="GPU-0"), Gpu(uuid="GPU-1", mig=True, instances=parts)])
    events = []
    troubles = []
    with stand_in.installed(machine):
        log = TelemetryLog(tmp_path, ["MIG-8"], events.append, troubles.append, period_s=0.05)
        log.start()
        while not ticks(tmp_path):
            threading.Event().wait(0.01)
        # Of another GPU, of the other instance, of this instance, and of the whole GPU.
        for xid in ((0, 79), (1, 13, 7), (1, 31, 8), (1, 48)):
            machine.xids.put(xid)
        deadline = time.monotonic() + 60
        while not any(event.detail == "48: double-bit ECC error" for event in events):
            assert time.monotonic() < deadline, events
            threading.Event().wait(0.01)
        log.stop()
    xids = [(event.device, event.detail) for event in events if event.kind == "xid"]
    assert xids == [(2, "31: memory page fault of the program"), (2, "48: double-bit ECC error")]
    assert all("gpu2.xid_errors" not in tick.missing for tick in ticks(tmp_path))
