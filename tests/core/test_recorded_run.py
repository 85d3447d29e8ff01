"""A run directory of an earlier version is read as it was, and a file that several write is whole or not there."""

import os
import shutil
import threading

import pytest

from on_disk import RECORDED
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import read_all, write_atomically
from trainfast_runner.records.run_directory import read_records, read_result
from trainfast_runner.records.tick import Tick
from trainfast_runner.results.summary import read_joined_steps
from trainfast_runner.running.follower import Follower


@pytest.fixture
def directory(tmp_path):
    """A copy in a home of its own."""
    home = Home(tmp_path).create()
    found = home.directory(RECORDED.name)
    shutil.copytree(RECORDED, found)
    return found


def test_its_records_are_readable_shown_as_they_ended_and_joined_to_its_gpu(directory):
    records = read_records(directory)
    assert (records.unreadable_lines, len(records.steps[0])) == (0, 24)
    assert [len(samples) for samples in records.device_samples.values()] == [11]
    assert len(records.host_samples) == 11
    ticks, unreadable = read_all(directory / "telemetry.jsonl", Tick)
    assert (len(ticks), unreadable) == (11, 0)
    assert all(tick.devices[0].temperature_c for tick in ticks)
    seen = Follower(directory).poll()
    assert (seen.state, seen.reason) == ("finished", "took all 24 steps")
    assert (len(seen.steps), len(seen.ticks), seen.unreadable_lines) == (24, 11, 0)
    assert any(event.kind == "throttle_on" for event in seen.events)
    assert seen.result == read_result(directory)
    assert seen.result.throttle.thermal_fraction == pytest.approx(0.27, abs=0.001)
    assert seen.result.conditions.start_temperature_c == 89
    assert seen.result.conditions.measured_from_temperature_c is None, "that version did not say"
    joined = read_joined_steps(directory)
    assert [step.step for step, _ in joined] == list(range(1, 25))
    thermal_ms = [conditions.throttled_ms["thermal"] for _, conditions in joined if conditions is not None]
    assert len(thermal_ms) == 24
    assert any(ms for ms in thermal_ms)
    lost = [device.lost_ms for _, conditions in joined if conditions for device in conditions.devices]
    assert [set(one.values()) for one in lost] == [{None}] * 24, "it trains on the CPU and loses nothing to a GPU"


PATIENCE_S = 30.0


def test_threads_that_write_one_path_do_not_share_a_temporary_file(tmp_path, monkeypatch):
    """Both reach the rename before either is renamed: with one name for both, the second rename found no file."""
    both_written = threading.Barrier(2, timeout=PATIENCE_S)
    rename = os.rename
    errors = []

    def rename_together(source, target):
        both_written.wait()
        rename(source, target)

    def write(content):
        try:
            write_atomically(tmp_path / "result.json", content)
        except OSError as error:
            errors.append(error)

    monkeypatch.setattr(os, "rename", rename_together)
    contents = [b"a" * 4096, b"b" * 8192]
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == []
    assert (tmp_path / "result.json").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
