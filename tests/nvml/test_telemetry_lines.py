"""`telemetry.jsonl`: a reader gets every tick back whole, a long run's file stays bounded, and devices come and go."""

import threading
import time

import msgspec
import pytest
import stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import Machine, gpus

from trainfast_runner.records.capped_file import RecordTail, capped_records
from trainfast_runner.records.json_lines import read_all, remaining_records
from trainfast_runner.records.tick import DeviceProcess, DeviceReading, HostReading, RunReading, Tick
from trainfast_runner.running.record_files import TelemetryLog

SECOND_NS = 1_000_000_000

runs = st.builds(
    RunReading,
    cpu_percent=st.none() | st.sampled_from([100.0, 199.9]),
    processes=st.integers(1, 2),
    threads=st.integers(1, 2),
)
hosts = st.builds(
    HostReading,
    cpu_percent=st.none() | st.sampled_from([0.0, 50.5]),
    disk_read_bytes=st.none() | st.integers(0, 3),
    run=st.none() | runs,
)
processes = st.lists(st.builds(DeviceProcess, pid=st.integers(1, 3), memory_used_bytes=st.none() | st.integers(0, 2)))


@st.composite
def devices(draw):
    return [
        DeviceReading(
            index=index,
            uuid=f"GPU-{index}",
            temperature_c=draw(st.none() | st.integers(50, 52)),
            power_w=draw(st.none() | st.sampled_from([300.25, 12.0])),
            throttle_reasons=draw(st.none() | st.sampled_from([[], ["sw_thermal"], ["0x200"]])),
            processes=draw(st.none() | processes),
            error=draw(st.none() | st.just("GPU is lost")),
        )
        for index in range(draw(st.integers(0, 4)))
    ]


@st.composite
def series(draw):
    return [
        Tick(
            t_ns=place * SECOND_NS,
            host=draw(hosts),
            devices=draw(devices()),
            missing=draw(st.dictionaries(st.sampled_from(["nvml", "gpu0", "run"]), st.sampled_from(["a", "b"]))),
            sample_us=draw(st.integers(0, 2)),
            nvml_us=draw(st.none() | st.integers(0, 2)),
        )
        for place in range(draw(st.integers(1, 12)))
    ]


def lines_of(ticks):
    return [msgspec.json.encode(tick) + b"\n" for tick in ticks]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "telemetry.jsonl"


@settings(max_examples=25)
@given(ticks=series())
def test_every_tick_comes_back_as_it_was(tmp_path_factory, ticks):
    path = tmp_path_factory.getbasetemp() / "telemetry.jsonl"
    path.write_bytes(b"".join(lines_of(ticks)))
    assert read_all(path, Tick) == (ticks, 0)


def plain(seconds):
    """A tick of nothing at each of these seconds."""
    return [Tick(t_ns=s * SECOND_NS, host=HostReading(), devices=[], missing={}, sample_us=1) for s in seconds]


@pytest.mark.parametrize("damage", [b"", b"\0\0\0\n", b'{"t_ns": 4, "host"\n', b"[[[[\n", b"[" * 20_000 + b"\n"])
def test_a_damaged_line_loses_its_tick_alone(path, damage):
    ticks = plain(range(8))
    lines = lines_of(ticks)
    path.write_bytes(b"".join([*lines[:4], damage, *lines[5:]]))
    # Zeros are a hole in the file, which is counted apart.
    assert read_all(path, Tick) == (ticks[:4] + ticks[5:], bool(damage.strip(b"\0\n")))


def test_a_reader_that_follows_sees_each_tick_when_its_line_is_whole(path):
    ticks = plain(range(4))
    lines = lines_of(ticks)
    tail = RecordTail(path, Tick)
    with path.open("ab", buffering=0) as file:
        for tick, line in zip(ticks, lines, strict=True):
            file.write(line[:50])
            assert tail.new() == []
            file.write(line[50:])
            assert tail.new() == [tick]


def test_telemetry_over_its_cap_keeps_head_and_tail_and_no_reader_gets_a_tick_twice(path):
    capped = capped_records(path, 64 << 10)
    tail = RecordTail(path, Tick)
    seen = []
    for seconds in range(0, 4000, 50):
        with path.open("ab") as file:
            file.writelines(lines_of(plain(range(seconds, seconds + 50))))
        seen += tail.new()
        capped.trim()
    assert path.stat().st_blocks * 512 <= 80 << 10
    capped.compact()
    seen += tail.new()
    assert [tick.t_ns // SECOND_NS for tick in seen] == list(range(4000))
    whole = RecordTail(path, Tick)
    kept = [tick.t_ns // SECOND_NS for tick in remaining_records(whole)]
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1], whole.unreadable, whole.dropped_bytes) == (0, 3999, 0, capped.dropped_bytes)


def ticks(directory):
    return read_all(directory / "telemetry.jsonl", Tick)[0]


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
    assert [(event.kind, event.device) for event in events] == [("gpu_lost", 1), ("gpu_back", 1), ("xid", 2)]
    assert events[-1].detail == "48: double-bit ECC error"
    assert troubles == []
