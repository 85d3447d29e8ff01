"""The figures of a result, from records whose right answers are known."""

import json
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.summarised import S, record, result_of, step, steps
from texts import any_text
from trainfast_runner.records.result import CompileCost, Result
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_file import ClockAnchor, ForeignProcess, RunFile, ScriptAsked
from trainfast_runner.results.distributions import percentile, spread
from trainfast_runner.results.doubts import doubts
from trainfast_runner.results.summary import read_joined_steps
from trainfast_runner.running.settling import recover_result
from trainfast_runner.search.batch_conductor import probe_of_run

GPU = "GPU-0001"


def test_medians_leave_the_warm_up_out(tmp_path):
    times = [9000, 9000, 100, 100, 100, 400]
    record(
        tmp_path,
        steps=[
            step(n, ms, warmup=n <= 2, data_ms=ms / 10, peak_allocated_bytes=100 - n, loss=None if n == 6 else n)
            for n, ms in enumerate(times, 1)
        ],
    )
    result = result_of(tmp_path)
    assert (result.steps.warmup, result.steps.measured) == (2, 4)
    assert (result.step_ms.p50, result.step_ms.p90) == (100, pytest.approx(310))
    assert (result.step_ms.data, result.step_ms.forward) == (10, None)
    assert (result.throughput.samples_per_s.median, result.throughput.samples_per_s.mad) == (80, 0)
    assert (result.throughput.tokens_per_s.median, result.loss.first, result.loss.last) == (800, 3, 3)
    assert result.memory.peak_allocated_bytes == 99  # the warm-up's peak is a peak too
    assert (result.seconds, result.started_wall_ns) == (60, 7)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # JSON has no NaN: such a loss is null and marked, and the mean of the finite ones before it would be a lie.
        ([step(n, 100, **{"loss": n} if n <= 5 else {"loss_not_finite": True}) for n in range(1, 8)], (3, None, 2, 7)),
        ([step(n, 100, loss=float(n)) for n in (1, 2)], (1.5, 1.5, 0, 2)),
    ],
)
def test_losses_are_means_of_five_or_of_fewer_and_none_if_one_is_not_finite(tmp_path, lines, expected):
    record(tmp_path, steps=lines)
    loss = result_of(tmp_path).loss
    assert (loss.first, loss.last, loss.not_finite, loss.recorded) == expected


def test_the_rate_of_a_scripts_trial_agrees_with_its_step(tmp_path):
    """The median of the two rates would be 12.9 samples a second beside a step of 0.9 s."""
    lines = [step(n, ms, peak_allocated_bytes=99) for n, ms in ((1, 400), (2, 1400))]
    record(tmp_path, steps=lines)
    result = result_of(tmp_path)
    probe = probe_of_run(tmp_path, result, 8, 1.0, None)
    assert (probe.step_ms, probe.samples_per_s) == (900, pytest.approx(8 / 0.9))
    assert result.throughput.samples_per_s.median == probe.samples_per_s, "one rate in the search and in the run"
    assert result.throughput.steps_per_s.median == pytest.approx(1 / 0.9)


def test_ranks_that_share_a_batch_are_counted_once(tmp_path):
    for rank in range(4):
        lines = [step(n, 100, peak_allocated_bytes=rank) for n in range(1, 5)]
        record(tmp_path, **{f"steps{f'.rank{rank}' if rank else ''}": lines})
    record(tmp_path, worker=[{"t_ns": 1, "kind": "actual", "mesh": {"dp": 2, "tp": 2}, "model_flops_per_sample": 1e12}])
    result = result_of(tmp_path, world_size=4)
    assert (result.throughput.samples_per_s.median, result.flops.model_tflops_per_device) == (160, pytest.approx(40))
    assert (result.flops.mfu, result.flops.peak_tflops) == (None, None)
    assert (result.memory.peak_allocated_bytes, result.actual.mesh) == (3, {"dp": 2, "tp": 2})


def test_the_peak_of_a_cpu_says_what_measured_it(tmp_path):
    record(tmp_path, steps=steps(4, 100), worker=[{"t_ns": 1, "kind": "actual", "model_flops_per_sample": 1e9}])
    calibration = {"tflops": {"fp32": 0.16}}
    flops = result_of(tmp_path, knobs={"precision": "fp32"}, calibration=calibration).flops
    assert (flops.peak_tflops, flops.peak_source) == (0.16, "measured by doctor --calibrate")
    assert flops.mfu == pytest.approx(0.5)


def device(t, **fields):
    return {"t_ns": round(t * S), "devices": [{"index": 0, "uuid": GPU, **fields}, {"index": 1, "uuid": "GPU-other"}]}


def test_energy_and_throttling_come_from_counters_over_the_measured_window(tmp_path):
    # Measured: steps 3 to 10, from second 2 to second 10. 200 W; held back by heat a quarter of the time from 4 on.
    record(tmp_path, steps=steps(warmup=2))
    record(
        tmp_path,
        telemetry=[
            device(
                t + 0.5,
                energy_mj=5_000_000 + t * 200_000,
                thermal_violation_ns=max(0, round((t + 0.5 - 4) * S / 4)),
                power_violation_ns=123,
                memory_used_bytes=t,
                temperature_c=50 + t,
                sm_clock_mhz=1500,
                sm_clock_max_mhz=2000,
            )
            for t in range(13)
        ],
    )
    result = result_of(tmp_path, watch_uuids=[GPU], device_uuids=[GPU], start_temperature_c=47)
    assert (result.energy.joules, result.energy.joules_per_step) == (pytest.approx(1600), pytest.approx(200))
    assert result.throttle.clock_loss_fraction == 0.25
    assert result.throttle.devices[0].throttled_ms["thermal"] == pytest.approx(1500, rel=0.05)
    assert result.throttle.devices[0].temperature_c == 51
    # At launch, and when the first measured step began.
    assert (result.conditions.start_temperature_c, result.conditions.measured_from_temperature_c) == (47, 51)
    assert result.energy.joules_per_sample == pytest.approx(1600 / 64)
    assert result.throttle.thermal_fraction == pytest.approx(0.25 * 6 / 8, abs=0.01)
    assert (result.throttle.power_fraction, result.memory.device_peak_used_bytes) == (0, 12)


@pytest.mark.parametrize(("counted", "expected"), [(0, "0 J in 12.0 s"), (150, "1,800 J in 12.0 s"), (900, "10,800 J")])
def test_a_counter_far_from_power_times_time_is_no_energy(tmp_path, counted, expected):
    """A GPU that draws 400 W and whose counter stands still does not train for 0 J a step."""
    ticks = [device(t, energy_mj=7_000_000 + t * counted * 1000, power_w=400.0) for t in range(13)]
    record(tmp_path, steps=steps(12), telemetry=ticks)
    energy = result_of(tmp_path, watch_uuids=[GPU], device_uuids=[GPU]).energy
    assert (energy.joules, energy.joules_per_step, energy.joules_per_sample, energy.source) == (None,) * 4
    assert energy.reason.startswith("GPU 0: the energy counter shows ")
    assert expected in energy.reason
    joined = read_joined_steps(tmp_path)
    assert {conditions.energy_joules for _, conditions in joined if conditions} == {None}


def test_a_mig_instance_has_its_memory_and_null_where_nvml_knows_only_the_whole_gpu(tmp_path):
    mig = "MIG-41a36bfc-73e2-5e3d-8b3a-2b7a4b0d0ac0"
    whole = {"index": 0, "uuid": GPU, "power_w": 300.0, "energy_mj": 5, "throttle_reasons": ["sw_thermal"]}
    part = {"index": 1, "uuid": mig, "name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "memory_total_bytes": 10}
    ticks = [{"t_ns": round((t + 0.5) * S), "devices": [whole, {**part, "memory_used_bytes": t}]} for t in range(13)]
    record(tmp_path, steps=steps(warmup=2), telemetry=ticks)
    result = result_of(tmp_path, watch_uuids=[mig], device_uuids=[mig], device_names=[part["name"]], device="cuda")
    assert (result.memory.device_peak_used_bytes, result.energy.joules) == (12, None)
    assert (result.throttle.thermal_fraction, result.throttle.power_fraction) == (None, None)
    assert result.throttle.clock_loss_fraction is None
    assert (result.flops.peak_tflops, result.flops.mfu) == (None, None)
    assert result.conditions.start_temperature_c is None


def test_steps_that_are_over_between_two_samples_have_no_energy_and_no_idle_gpu(tmp_path):
    # Ten steps of 60 ms on a GPU that idled until then: the sample among them still has the idle second in it.
    lines = [step(n, 60, t_ns=round((2.7 + 0.06 * n) * S), data_ms=0.1) for n in range(1, 11)]
    ticks = [device(t, energy_mj=t * 90_000, power_w=90.0, gpu_utilization_percent=4) for t in range(6)]
    record(tmp_path, steps=lines, telemetry=ticks)
    result = result_of(tmp_path, watch_uuids=[GPU], device_uuids=[GPU], device="cuda", knobs={"strategy": "single"})
    assert result.energy.joules is None
    assert result.diagnosed
    assert [finding.rule for finding in result.diagnosis] == []


def test_without_counters_the_sampled_reasons_count_and_one_within_twice_of_power_times_time_is_believed(tmp_path):
    record(tmp_path, steps=steps())
    record(tmp_path, telemetry=[device(t, throttle_reasons=["sw_power_cap"] if t < 5 else ["idle"]) for t in range(12)])
    result = result_of(tmp_path, watch_uuids=[GPU])
    # The reason held at second 4 and no more at second 5: until then.
    assert (result.throttle.thermal_fraction, result.throttle.power_fraction) == (0, 0.5)
    assert result.energy.joules is None
    ticks = [device(t, energy_mj=t * 250_000, power_w=400.0) for t in range(13)]
    record(tmp_path, steps=steps(12), telemetry=ticks)
    energy = result_of(tmp_path, watch_uuids=[GPU], device_uuids=[GPU]).energy
    assert (energy.joules_per_step, energy.source, energy.reason) == (pytest.approx(250), "energy counter", None)


def test_no_gpu_or_readings_that_cover_too_little_give_no_figure(tmp_path):
    record(tmp_path, steps=steps(), telemetry=[device(t, energy_mj=t, throttle_reasons=[]) for t in range(12)])
    result = result_of(tmp_path)
    assert (result.energy.joules, result.throttle.thermal_fraction, result.throttle.devices) == (None, None, [])
    assert result.memory.device_peak_used_bytes is None
    record(tmp_path, steps=steps(), telemetry=[device(t, energy_mj=t) for t in (8, 9)])
    assert result_of(tmp_path, watch_uuids=[GPU]).energy.joules is None


def test_a_gpu_that_was_lost_makes_the_conditions_doubtful(tmp_path):
    record(tmp_path, steps=steps())
    assert result_of(tmp_path, device_uuids=[GPU], versions={"driver": "580.82"}).conditions.clean
    record(tmp_path, events=[{"t_ns": 5 * S, "kind": "gpu_lost", "device": 0, "detail": "GPU is lost"}])
    conditions = result_of(tmp_path, device_uuids=[GPU], versions={"driver": "580.82"}).conditions
    assert (conditions.clean, conditions.driver) == (False, "580.82")
    assert conditions.still_warming is False


def test_a_silent_gpu_is_listed_with_its_seconds(tmp_path):
    lines = [device(t, temperature_c=60, power_violation_ns=(6 if t >= 9 else 0) * S) for t in (0, 1, 9, 10)]
    ticks = [*lines[:2], *(device(t) for t in range(2, 9)), *lines[2:]]
    told = (("xid", "79"), ("gpu_lost", "GPU is lost"))
    events = [{"t_ns": 2 * S, "kind": kind, "device": 0, "detail": detail} for kind, detail in told]
    record(tmp_path, steps=steps(), telemetry=ticks, events=events)
    result = result_of(tmp_path, watch_uuids=[GPU])
    (outage,) = result.conditions.outages
    assert (outage.device, outage.seconds, outage.measured_fraction, outage.back) == (0, 7, 0.7, True)
    assert (result.conditions.started_clean, result.conditions.clean, result.doubts) == (True, False, doubts(result))
    assert [doubt.text for doubt in doubts(result)] == [
        "had no reading of GPU 0 for 7 s, 70 % of the measured time",
        "saw an Xid error on GPU 0: 79",
    ]


def test_rows_of_another_versions_result_may_lack_fields_and_have_others(tmp_path):
    rows = {
        "absences": [{"device": 0, "cause": "bus"}, {"seconds": 7.0, "back": True}],
        "xid_errors": [{}],
        "foreign_processes": [{"name": "python"}],
    }
    written = {"run_id": "r", "state": "finished", "conditions": rows, "throttle": {"devices": [{"clock": 5}]}}
    (tmp_path / "result.json").write_text(json.dumps(written))
    result = read_result(tmp_path)
    assert [doubt.text for doubt in doubts(result)] == [
        "had no reading of GPU 0, to the end",
        "had no reading of a GPU for 7 s",
        "saw an Xid error on a GPU",
        "shared its device with 1 other process",
    ]


def test_who_came_to_the_gpu_while_it_was_measured_is_in_the_conditions(tmp_path):
    came = {"t_ns": 5 * S, "kind": "foreign_process", "device": 0, "pid": 42, "state": "appeared"}
    record(tmp_path, steps=steps(), events=[came])
    conditions = result_of(tmp_path, device_uuids=[GPU]).conditions
    assert conditions.foreign_processes == [ForeignProcess(device=0, pid=42)]
    assert not conditions.clean
    joined = result_of(tmp_path, watch_uuids=[GPU]).conditions
    assert joined.foreign_processes == conditions.foreign_processes, "as the diagnosis of a run on the CPU has it"
    record(tmp_path, telemetry=[device(t, temperature_c=60) for t in (0, 10)])
    beside = result_of(tmp_path, device_uuids=["GPU-other"], watch_uuids=["GPU-other", GPU]).conditions
    assert beside.foreign_processes == [], "a GPU that a run on others only watches"


def test_spread_and_percentiles():
    assert spread([]).median is None
    assert (spread([1, 2, 3, 100]).median, spread([1, 2, 3, 100]).mad) == (2.5, 1)
    assert percentile([], 0.5) is None
    assert (percentile([3.0], 0.99), percentile([1.0, 2.0], 0.25)) == (3, 1.25)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["t_ns", "kind", "step", "samples", "tokens", "step_ms", "loss", "warmup", "chain", "mesh", "devices", "uuid"]
)
NUMBERS = st.integers(-(2**63), 2**63) | st.floats()
WHOLE = st.integers(-(2**62), 2**62) | st.integers(0, 3)
DEVICE = st.fixed_dictionaries(
    {"uuid": st.just("u")},
    optional={"energy_mj": WHOLE, "thermal_violation_ns": WHOLE, "throttle_reasons": st.just(["sw_thermal"])},
)
LINES = st.lists(
    st.binary(max_size=40)
    | st.dictionaries(NAMES, JSON | NUMBERS, max_size=6).map(lambda record: json.dumps(record).encode())
    | st.fixed_dictionaries(
        {"t_ns": WHOLE, "step": WHOLE, "samples": WHOLE, "tokens": WHOLE, "step_ms": st.floats(allow_nan=False)},
        optional={"loss": st.floats(), "peak_allocated_bytes": WHOLE, "warmup": st.booleans()},
    ).map(lambda record: json.dumps(record).encode())
    | st.fixed_dictionaries(
        {"t_ns": WHOLE, "kind": st.sampled_from(["actual", "finished", "exception", "invalid"])},
        optional={
            "mesh": st.dictionaries(st.sampled_from(["dp", "tp"]), WHOLE),
            "model_flops_per_sample": st.floats(allow_nan=False, allow_infinity=False),
            "message": any_text(max_size=20),
        },
    ).map(lambda record: json.dumps(record).encode())
    | st.fixed_dictionaries({"t_ns": WHOLE, "devices": st.lists(DEVICE, max_size=2)}).map(
        lambda record: json.dumps(record).encode()
    ),
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(steps=LINES, rank1=LINES, worker=LINES, events=LINES, ticks=LINES)
def test_no_records_are_too_broken_for_a_result(steps, rank1, worker, events, ticks):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        files = {"steps": steps, "steps.rank1": rank1, "worker": worker, "events": events, "telemetry": ticks}
        for stem, lines in files.items():
            (directory / f"{stem}.jsonl").write_bytes(b"\n".join(lines))
        run = RunFile(run_id="r", preset="p", watch_uuids=["u"], clock=ClockAnchor(monotonic_ns=0, wall_ns=0))
        (directory / "run.json").write_bytes(msgspec.json.encode(run))
        result = recover_result(directory)
        assert result.state == "lost"
        assert msgspec.json.decode((directory / "result.json").read_bytes(), type=Result) is not None


def test_compiling_costs_what_its_steps_take_beyond_steady_ones_and_fp16_says_what_it_skipped(tmp_path):
    record(tmp_path, steps=[step(1, 9040, warmup=True, compiling=True), *(step(n, 40) for n in range(2, 6))])
    assert result_of(tmp_path, knobs={"compile": "default"}).compile == CompileCost(cold_seconds=9)
    assert result_of(tmp_path, knobs={"compile": "off"}).compile is None
    asked = ScriptAsked(command=["python", "a.py"], argv=["python", "a.py"])
    assert result_of(tmp_path, knobs={"compile": "default"}, script=asked).compile is None
    record(tmp_path, steps=[step(n, 100, loss_scale=scale) for n, scale in ((1, 32768.0), (2, 16384.0))])
    record(tmp_path, worker=[{"t_ns": n, "kind": "overflow", "step": n, "scale": 1.0} for n in (1, 2)])
    result = result_of(tmp_path)
    assert (result.precision.loss_scale, result.precision.skipped_steps) == (16384, 2)
