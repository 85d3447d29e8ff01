"""Records of a week read in bounded memory, those of an earlier version as they were, and files that several write."""

import json
import os
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from on_disk import RECORDED, put, run_file
from trainfast_runner.records import run_directory
from trainfast_runner.records.capped_file import capped_records
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import ENDS, even_share, read_all, write_atomically
from trainfast_runner.records.run_directory import rank_file, read_records, read_result
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.records.tick import Tick
from trainfast_runner.results.summary import read_joined_steps, summarise
from trainfast_runner.results.verdict import Verdict
from trainfast_runner.running.follower import RECENT_BYTES, Follower
from trainfast_tui.text.result_words import result_notes

S = 1_000_000_000
GPU = "GPU-0001"
KIB = 1 << 10


def step_line(number, ms=100.0, **fields):
    record = {"t_ns": number * S // 10, "step": number, "samples": 8, "tokens": 80, "step_ms": ms, **fields}
    return json.dumps(record).encode() + b"\n"


def write_run(directory, **fields):
    run = run_file(run_id="r", clock=ClockAnchor(monotonic_ns=0, wall_ns=7), **{"watch_uuids": [GPU], **fields})
    put(directory / "run.json", run)


def write_steps(directory, ranks, steps):
    """Every tenth step takes twice as long; step 1,234 of rank 1 has the highest peak."""
    for rank in range(ranks):
        with rank_file(directory, "steps", rank).open("wb") as file:
            for number in range(1, steps + 1):
                peak = {"peak_allocated_bytes": 900 if (rank, number) == (1, 1234) else 500}
                ms, loss = 200.0 if number % 10 == 0 else 100.0, 10.0 if number <= 5 else 2.0
                file.write(step_line(number, ms, warmup=number <= 3, loss=loss, **peak))


def write_ticks(directory, seconds):
    with (directory / "telemetry.jsonl").open("w") as file:
        for t in range(seconds):
            gpu = {"index": 0, "uuid": GPU, "memory_used_bytes": 9_000 if t == 700 else 5_000, "power_w": 300.0}
            gpu |= {"energy_mj": t * 300_000, "thermal_violation_ns": t * S // 4}
            file.write(json.dumps({"t_ns": t * S, "devices": [gpu], "host": {"cpu_percent": 30.0}}) + "\n")


def result_of(directory):
    records = read_records(directory)
    return summarise(directory, records, Verdict("finished", ""), None), records


def test_a_long_record_is_read_in_bounded_memory(tmp_path, monkeypatch):
    write_run(tmp_path, world_size=2, device_uuids=[GPU])
    write_steps(tmp_path, ranks=2, steps=12_000)
    write_ticks(tmp_path, seconds=1_200)
    whole, _ = result_of(tmp_path)
    assert whole.thinning is None

    bytes_of_all = sum(path.stat().st_size for path in tmp_path.glob("steps*.jsonl"))
    monkeypatch.setattr(run_directory, "MOST_STEP_BYTES", bytes_of_all // 12)
    result, records = result_of(tmp_path)
    kept = [len(steps) for steps in records.steps.values()]
    assert all(1_000 / 2 <= of_rank <= 1_000 + 2 * ENDS for of_rank in kept)
    assert [step.step for step in records.steps[0]] == [step.step for step in records.steps[1]]
    assert (result.thinning.steps_looked_at, result.thinning.steps_dropped) == (kept[0], 0)
    assert f"a long run: medians use {kept[0]:,} of its 12,000 steps" in list(result_notes(result))

    # Counts, peaks and what counters say stay exact; so does the median of steps that are mostly alike.
    assert (result.steps, result.loss) == (whole.steps, whole.loss)
    assert (result.memory.peak_allocated_bytes, result.memory.device_peak_used_bytes) == (900, 9_000)
    assert result.memory == whole.memory
    assert result.step_ms.p50 == whole.step_ms.p50 == 100
    assert result.step_ms.p99 == whole.step_ms.p99 == 200, "a tenth of the steps: not lost by taking every n-th"
    assert result.throughput.samples_per_s.median == whole.throughput.samples_per_s.median == 160
    assert result.energy.joules == pytest.approx(whole.energy.joules, rel=1e-3)
    assert result.energy.joules_per_step == pytest.approx(whole.energy.joules_per_step, rel=1e-3)
    assert result.energy.joules_per_sample == pytest.approx(whole.energy.joules_per_sample, rel=1e-3)
    assert result.throttle.thermal_fraction == pytest.approx(0.25, rel=1e-3)


def dropped_file(directory, steps=20_000, cap_bytes=256 * KIB):
    """Steps as a worker appends them, the supervisor's cap enforced meanwhile."""
    log = capped_records(directory / "steps.jsonl", cap_bytes)
    fd = log.open()
    for number in range(1, steps + 1):
        os.write(fd, step_line(number, warmup=number <= 3, loss=1.0))
        if number % 100 == 0:
            log.trim()
    os.close(fd)
    assert log.dropped_bytes
    assert log.path.stat().st_blocks * 512 < 2 * cap_bytes
    return log


@pytest.mark.parametrize("compacted", [False, True])
def test_the_hole_in_capped_steps_is_stepped_over_and_counted(tmp_path, compacted):
    write_run(tmp_path, watch_uuids=[])
    log = dropped_file(tmp_path)
    if compacted:
        log.compact()
        assert log.path.stat().st_size < 512 * KIB
        assert b"\0" not in log.path.read_bytes()
    result, records = result_of(tmp_path)
    assert records.unreadable_lines == 0
    numbers = [step.step for step in records.steps[0]]
    assert (numbers[0], numbers[-1], numbers) == (1, 20_000, sorted(set(numbers)))
    assert (result.steps.measured, result.steps.warmup) == (19_997, 3)
    assert result.thinning.steps_dropped == 20_000 - len(numbers) > 5_000
    text = f"the records of {result.thinning.steps_dropped:,} steps were dropped: steps.jsonl had reached its cap"
    assert text in list(result_notes(result))
    follower = Follower(tmp_path)
    follower.poll()
    seen = follower.poll()
    assert (seen.steps[-1].step, seen.unreadable_lines) == (20_000, 0)


def test_a_late_reader_sees_the_peak_of_the_first_steps(tmp_path):
    write_run(tmp_path, watch_uuids=[], device="cpu")
    with (tmp_path / "steps.jsonl").open("wb") as file:
        for number in range(1, 6_001):
            peak = {"peak_allocated_bytes": 900} if number <= 3 else {}
            file.write(step_line(number, **peak, loss_by_layer="." * (RECENT_BYTES // 5_000)))
    assert (tmp_path / "steps.jsonl").stat().st_size > RECENT_BYTES
    assert Follower(tmp_path).poll().peak_allocated_bytes == 900


def test_where_files_have_no_holes_the_steps_behind_the_head_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("trainfast_runner.records.capped_file._punch", lambda *_: False)
    write_run(tmp_path, watch_uuids=[])
    log = capped_records(tmp_path / "steps.jsonl", 64 * KIB)
    follower = Follower(tmp_path)
    shown = []
    fd = log.open()
    for number in range(1, 2_001):
        os.write(fd, step_line(number))
        if number % 100 == 0:
            shown = [step.step for step in follower.poll().steps]
            log.trim()
    os.close(fd)
    assert log.truncated
    assert shown == sorted(set(shown)), "a reader does not show the head a second time"
    assert shown[-1] == 2_000
    assert len(shown) > 1_980, "one line is lost at each cut"
    log.compact()
    result, records = result_of(tmp_path)
    assert records.unreadable_lines == 0
    assert result.thinning is not None
    assert result.steps.measured == records.steps[0][-1].step == 2_000


@given(st.integers(0, 3_000), st.integers(1, 50))
def test_an_even_share_keeps_the_ends_and_the_same_numbers_of_two_streams(count, one_in):
    numbers = list(range(count))
    kept = even_share(zip(numbers, numbers, strict=True), one_in)
    assert (kept, kept[:ENDS], kept[-ENDS:]) == (sorted(set(kept)), numbers[:ENDS], numbers[-ENDS:])
    assert len(kept) <= count / one_in + 3 * ENDS
    if one_in == 1:
        assert kept == numbers
    other = even_share(((number, number) for number in numbers if number % 7), one_in)
    assert set(other[ENDS:-ENDS]) - set(numbers[-2 * ENDS :]) <= set(kept)


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
