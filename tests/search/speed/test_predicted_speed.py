"""A run's speed before it: from its work alone, corrected by runs, and not shown where nobody can know it."""

import math

import msgspec
import pytest

from on_disk import run_file
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.timeline import Segment
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result, RunConditions, Spread, StepCount, Throttle, Throughput
from trainfast_runner.records.run_directory import RESULT_FILE, RUN_FILE
from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_runner.search import predicted_speed
from trainfast_runner.search.predicted_speed import SLOWDOWN, SpeedDevice, UnknownSpeed, step_time, traced_parts_s
from trainfast_runner.settings.spec import resolve

CPU = SpeedDevice("cpu")
CEILING = Ceiling(device="cpu", name="", tflops={"fp32": 0.1, "bf16": 0.8}, copy_gb_per_s=10.0, operation_us=10.0)
NO_BYTES = (0.0,) * 5
SAMPLE = (1000.0, 2e9, 1e8)
"""Calls, FLOPs and bytes of a sample's forward."""


def traced(spec):
    """A model whose forward does SAMPLE's work, and whose optimizer moves 100 MB in 500 calls."""
    lines = [(NO_BYTES, NO_BYTES)]
    work = ((SAMPLE[0], 0.0, 0.0), (0.0, *SAMPLE[1:]))
    segments = [Segment("forward", micro, "", lines, (NO_BYTES, NO_BYTES), work) for micro in (1, 2)]
    nothing = {"stacks": [], "before_optimizer": [], "optimizer_peak": []}
    work = {"segments": segments, "optimizer_work": (500.0, 0.0, 1e8)}
    return MemoryModel(device="cpu", parameter_sizes=[1], **nothing, **work)


def timed(*settings, devices=1):
    spec = resolve("tiny-llama", settings)
    time = step_time(spec, traced(spec), devices, 2, CEILING)
    assert time is not None
    return time


def predicted(runs, *settings, calibrated=True):
    """The prediction of these settings after runs, each `knob=value ...` with the factor that it was slower by."""
    measured = []
    for words, slower in runs:
        time = timed(*words.split())
        rate = math.log(time.samples / time.seconds / slower)
        measured.append((predicted_speed.EarlierSpeed(resolve("tiny-llama", words.split()), 1, rate, 1e-4), time))
    model = predicted_speed.DeviceSpeedModel(CEILING, 2, measured, calibrated)
    return model.predict_step(resolve("tiny-llama", settings), 1, timed(*settings))


def shown(runs, *settings):
    found = predicted(runs, *settings)
    assert isinstance(found, PredictedSpeed), found
    return found


def seconds_of(calls_s, flops_s, moved_s):
    """The step of these calibrated seconds, each by its factor."""
    return sum(factor * part_s for factor, part_s in zip(SLOWDOWN["cpu"], (calls_s, flops_s, moved_s), strict=True))


def test_the_time_of_a_step_is_its_work_by_the_calibrated_speeds_which_ranks_on_a_cpu_share():
    # 1500 calls of 10 us, 16 GFLOP at 0.1 TFLOP/s, 0.9 GB at 10 GB/s.
    time, whole = timed("batch_size=8"), seconds_of(0.015, 0.16, 0.09)
    assert time.seconds == pytest.approx(whole)
    parts = seconds_of(0.015, 0, 0), seconds_of(0, 0.16, 0), seconds_of(0, 0, 0.09)
    assert (time.shares, time.samples) == (pytest.approx([part / whole for part in parts]), 8)
    assert timed("batch_size=8", "grad_accum=3").seconds == pytest.approx(seconds_of(0.035, 0.48, 0.25))
    assert timed("batch_size=8", "precision=bf16").seconds == pytest.approx(seconds_of(0.015, 0.02, 0.09))
    two = timed("batch_size=8", "strategy=ddp", "devices=2", devices=2)
    assert (two.seconds, two.samples) == (pytest.approx(seconds_of(0.015, 0.32, 0.18)), 16)
    spec = resolve("tiny-llama", ["precision=fp16"])
    assert step_time(spec, traced(spec), 1, 2, CEILING) is None


def test_the_parts_of_a_candidate_are_its_calls_its_device_work_and_its_optimizer():
    """A bound by FLOPs needs a calibrated device, and ranks that do all the work of their samples."""
    spec, named = resolve("tiny-llama", ["batch_size=8"]), msgspec.structs.replace(CEILING, name="a CPU")
    parts = traced_parts_s(spec, traced(spec), 1, 2, CEILING)
    both = [factor * part_s for factor, part_s in zip(SLOWDOWN["cpu"], (0.01, 0.16, 0.08), strict=True)]
    update_s = seconds_of(0.005, 0.0, 0.01)
    assert parts == pytest.approx({"host_s": both[0], "device_s": both[1] + both[2], "optimizer_s": update_s})
    assert traced_parts_s(spec, traced(spec), 1, 2, named)["least_s_per_sample"] == pytest.approx(0.16 / 8 / 1.1)
    split = resolve("tiny-llama", ["strategy=tp", "devices=2"])
    assert "least_s_per_sample" not in traced_parts_s(split, traced(split), 2, 2, named)


def test_before_any_run_the_work_alone_is_shown_with_a_wide_interval():
    found, time = shown([], "batch_size=8"), timed("batch_size=8")
    assert found.median == pytest.approx(time.samples / time.seconds)
    assert 1.5 < found.high / found.low < predicted_speed.MAX_SHOWN_RATIO
    assert "calibrated" in found.basis


def test_without_a_calibration_nothing_is_shown_until_runs_tell():
    found = predicted([], calibrated=False)
    assert isinstance(found, UnknownSpeed)
    assert "within a factor of" in found.reason
    after = predicted([("", 3.0)], calibrated=False)
    assert isinstance(after, PredictedSpeed)
    assert after.median == pytest.approx(shown([]).median / 3, rel=0.02)
    found = predicted([], "strategy=ddp", "devices=2", "compile=default", "engine=trainer")
    assert isinstance(found, UnknownSpeed)
    assert "within a factor of" in found.reason


def test_runs_correct_their_own_settings_most_and_widen_the_interval_where_they_differ():
    before, slower = shown([], "batch_size=8"), [("batch_size=8", 1.4)]
    again, larger = shown(slower, "batch_size=8"), shown(slower, "batch_size=32")
    assert again.median == pytest.approx(before.median / 1.4, rel=0.02)
    assert again.high / again.low < larger.high / larger.low < before.high / before.low
    assert "1 of this model" in again.basis
    without = shown([("", 1.2)], "compile=default", "batch_size=16")
    with_it = shown([("", 1.2), ("compile=default", 0.9)], "compile=default", "batch_size=16")
    assert with_it.median > 1.2 * without.median
    assert with_it.high / with_it.low < without.high / without.low
    steady = [(f"batch_size={batch}", 1.2) for batch in (4, 8, 16, 32)] * 2
    noisy = [(settings, slower * (0.85, 1.15)[place % 2]) for place, (settings, slower) in enumerate(steady)]
    narrow, wide = shown(steady, "batch_size=12"), shown(noisy, "batch_size=12")
    assert wide.high / wide.low > 1.3 * narrow.high / narrow.low
    assert wide.median == pytest.approx(narrow.median, rel=0.1)


def recorded(home, number, rate=10.0, run=None, **changes):
    """A finished run of tiny-llama in the home."""
    run_id = f"20261122-1200{number:02}-tiny-llama-0000"
    directory = home.directory(run_id)
    directory.mkdir(parents=True)
    spec = resolve("tiny-llama")
    file = run_file(run_id=run_id, **{**spec.record_fields(), **(run or {})})
    speed = Throughput(samples_per_s=Spread(median=rate, mad=0.1), measured_under=changes.pop("under", None))
    result = Result(run_id=run_id, state="finished", throughput=speed, steps=StepCount(measured=20), **changes)
    (directory / RUN_FILE).write_bytes(msgspec.json.encode(file))
    (directory / RESULT_FILE).write_bytes(msgspec.json.encode(result))


def rates(home, device=CPU):
    return [
        round(math.exp(of.log_rate), 6) for of in predicted_speed.measured_speeds(home, resolve("tiny-llama"), device)
    ]


def test_finished_runs_on_the_same_device_count_the_newest_first(tmp_path):
    home = Home(tmp_path)
    recorded(home, 1, 11.0)
    recorded(home, 2, 12.0)
    recorded(home, 3, 13.0, run={"model": {"family": "gpt2"}})
    assert (rates(home), rates(home, SpeedDevice("cuda", "NVIDIA H100"))) == ([12.0, 11.0], [])


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"under": "strict malloc thresholds"}, False),
        ({"throttle": Throttle(thermal_fraction=0.5)}, False),
        ({"role": "trial"}, False),
        ({"throttle": Throttle(brake_fraction=0.5)}, False),
        ({"throttle": Throttle(thermal_fraction=0.0, power_fraction=0.9)}, True),
    ],
)
def test_a_run_counts_if_its_speed_is_that_of_its_settings(tmp_path, changes, counts):
    home = Home(tmp_path)
    recorded(home, 1, **changes)
    assert rates(home) == ([10.0] if counts else [])


def test_a_run_beside_others_counts_less(tmp_path):
    home = Home(tmp_path)
    recorded(home, 1, conditions=RunConditions(others_cpu_percent=40.0))
    recorded(home, 2)
    alone, beside = predicted_speed.measured_speeds(home, resolve("tiny-llama"), CPU)
    assert beside.variance > 0.1 > alone.variance
