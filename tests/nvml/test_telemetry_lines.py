"""`telemetry.jsonl`: a reader gets every tick back whole, a long run's file stays bounded, and devices come and go."""

import threading
import time

import msgspec
import pytest
import stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import Machine, gpus

from trainfast_runner.records.json_lines import ENDS, read_all
from trainfast_runner.records.tick import (
    DeviceProcess,
    DeviceReading,
    HostReading,
    RunReading,
    TelemetryTail,
    Tick,
    thin_evenly,
    thin_telemetry,
)
from trainfast_runner.running import record_files
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
    return [
        Tick(t_ns=second * SECOND_NS, host=HostReading(), devices=[], missing={}, sample_us=1) for second in seconds
    ]


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
    tail = TelemetryTail(path, Tick)
    with path.open("ab", buffering=0) as file:
        for tick, line in zip(ticks, lines, strict=True):
            file.write(line[:50])
            assert tail.new() == []
            file.write(line[50:])
            assert tail.new() == [tick]


def seconds_of(path):
    return [tick.t_ns // SECOND_NS for tick in read_all(path, Tick)[0]]


def write(path, seconds):
    with path.open("ab") as file:
        file.writelines(lines_of(plain(seconds)))


def test_thinning_keeps_the_start_the_newer_half_and_an_even_share_of_the_rest(path):
    write(path, range(4000))
    assert thin_telemetry(path) == 1
    kept = seconds_of(path)
    assert (kept[:ENDS], kept[-2000:]) == (list(range(ENDS)), list(range(2000, 4000)))
    parts = [sum(start <= one < start + 450 for one in kept) for start in range(100, 1900, 450)]
    assert all(200 <= part <= 250 for part in parts), "one in two, evenly"


def test_a_file_that_is_thinned_again_and_again_stays_bounded_and_covers_all_its_time(path):
    level = 0
    for day in range(40):
        write(path, range(1000 * day, 1000 * day + 1000))
        while len(path.read_bytes().splitlines()) > 2000:
            level = thin_telemetry(path)
    thin_evenly(path, level)
    kept = seconds_of(path)
    assert len(kept) <= 2000
    parts = [sum(start <= one < start + 5000 for one in kept) for start in range(1000, 36_000, 5000)]
    assert min(parts) > 0.8 * max(parts), "medians weigh all of its time alike"
    assert (kept[0], kept[-1]) == (0, 39_999)


def test_a_reader_gets_no_tick_twice_when_the_file_is_thinned_meanwhile(path):
    write(path, range(1000))
    tail = TelemetryTail(path, Tick)
    assert len(tail.new()) == 1000
    thin_telemetry(path)
    write(path, range(1000, 1003))
    assert [tick.t_ns // SECOND_NS for tick in tail.new()] == [1000, 1001, 1002]
    assert tail.unreadable == 0


def test_a_run_thins_its_telemetry_at_the_cap_and_says_so_once(tmp_path):
    cap_bytes = 1 << 20
    events = []
    log = TelemetryLog(tmp_path, [], events.append, print, cap_bytes=cap_bytes)
    path = tmp_path / "telemetry.jsonl"
    sizes = []
    for tick in plain(range(8000)):
        log._write_tick(tick)
        sizes.append(path.stat().st_size)
    log.stop()
    assert max(sizes) <= cap_bytes * 1.25
    assert path.stat().st_size <= cap_bytes
    assert [event.kind for event in events] == ["telemetry_thinned"]
    kept = seconds_of(path)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, 7999)


def test_a_full_disk_while_thinning_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    failures = []
    log = TelemetryLog(tmp_path, [], lambda event: None, failures.append, cap_bytes=1 << 16)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_files, "thin_telemetry", full)
    for tick in plain(range(300)):
        log._write_tick(tick)
    log.stop()
    assert seconds_of(tmp_path / "telemetry.jsonl") == list(range(300))
    assert failures == ["telemetry.jsonl: No space left on device"]


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
