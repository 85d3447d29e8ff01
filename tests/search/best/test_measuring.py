"""When a trial has steps enough, which measurements are void, and what a start costs."""

from pathlib import Path

import msgspec
import pytest

from on_disk import put, run_file
from trainfast_runner.errors import UserError
from trainfast_runner.records.json_lines import Appender, read_all
from trainfast_runner.records.result import Actual, Doubt, Result, RunConditions, Spread, Throttle, Throughput
from trainfast_runner.records.run_directory import rank_file, read_records
from trainfast_runner.records.run_file import ForeignProcess
from trainfast_runner.records.worker_lines import WarmLine, WarmOrder
from trainfast_runner.results.device_conditions import Window
from trainfast_runner.results.summary import read_start_s
from trainfast_runner.search.best import conductor
from trainfast_runner.search.best.conductor import outcome_of, override_reason, steps_to_add, with_usual_disturbance
from trainfast_runner.search.best_journal import StepProfile, Trial, read_budget
from trainfast_runner.search.conductor import WarmProcess
from trainfast_runner.search.effects import StepRule
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.worker.shared.words import CONTROL_FILE

from .synthetic import trial as trial_of

RULE = StepRule(min_steps=4, max_steps=25, standard_error=0.012)
FINISHED = Result(run_id="r", state="finished", throughput=Throughput(samples_per_s=Spread(median=10.0, mad=0.1)))


def test_noisy_steps_ask_for_more_and_never_beyond_the_most():
    quiet = [100.0, 104.0, 97.0, 102.0]
    noisy = [100.0, 180.0, 60.0, 140.0]
    assert 2 <= steps_to_add(quiet, RULE) < steps_to_add(noisy, RULE) == 21
    assert steps_to_add(noisy * 6, RULE) == 1


def test_a_trial_whose_steps_all_compiled_goes_on_in_the_same_setting(tmp_path):
    compiled = WarmLine(t_ns=1, kind="trial", number=1, outcome="measured")
    timed = msgspec.structs.replace(compiled, number=2, step_ms=[100.0] * 8, losses=[1.0] * 8)
    answers = Appender(rank_file(tmp_path, "worker", 0))
    for line in (compiled, timed):
        answers.write(line)
    process = WarmProcess(tmp_path, 1, lambda: None)
    wanted = Trial(candidate_number=0, run_id="r", outcome="measured", warm=False, samples_per_step=8, seconds=0.0)
    trial = conductor.take_trial(process, wanted, {"compile": "default"}, RULE)
    assert trial.step_ms == timed.step_ms
    orders, _ = read_all(tmp_path / CONTROL_FILE, WarmOrder)
    assert [order.more for order in orders] == [False, True]


def test_an_order_that_a_full_disk_does_not_take_names_the_reason(tmp_path):
    (tmp_path / CONTROL_FILE).symlink_to("/dev/full")
    with pytest.raises(UserError, match="the disk is full"):
        WarmProcess(tmp_path, 1, lambda: None).probe(8, 2)


def test_a_run_beside_busy_processes_is_void_unless_the_machine_is_always_like_that():
    busy = msgspec.structs.replace(FINISHED, conditions=RunConditions(others_cpu_percent=40.0))
    assert outcome_of(FINISHED) == ("measured", "")
    reason = "shared the CPU: other processes took 40 % of it"
    assert outcome_of(busy) == ("void", reason)
    doubt = Doubt(kind="other_processes", text=reason)
    void = trial_of(0, outcome="void", step_ms=[100.0] * 5, reason=reason, doubts=[doubt])
    assert with_usual_disturbance(void, [void]).outcome == "void"
    assert with_usual_disturbance(void, [void, void]).outcome == "measured"
    lost = msgspec.structs.replace(void, reason="lost: its supervisor is gone")
    assert with_usual_disturbance(lost, [void, void]).outcome == "void"


def test_a_run_that_shared_its_gpu_is_void(tmp_path):
    other = ForeignProcess(device=0, pid=1)
    shared = msgspec.structs.replace(FINISHED, conditions=RunConditions(foreign_processes=[other]))
    on_gpu = msgspec.structs.replace(shared, actual=Actual(device="cuda"))
    assert outcome_of(on_gpu) == ("void", "shared its device with 1 other process")
    # A process that was there before the first trial disturbs that one, too.
    put(tmp_path / "run.json", run_file(foreign_processes=[other]))
    sample = {"t_ns": 5, "devices": [{"uuid": "GPU-0", "index": 0, "temperature_c": 40.0}]}
    put(tmp_path / "telemetry.jsonl", sample)
    _, found = conductor.trial_conditions(tmp_path, ["GPU-0"], Window(0, 10))
    assert [doubt.kind for doubt in found] == ["shared_gpu"]


def test_a_trial_has_the_phases_of_its_steps_and_the_baselines_bottleneck(tmp_path):
    """Four steps of a second end at 9 s; the GPU is busy for half of the time from the second step on."""
    uuid = "GPU-0"
    put(tmp_path / "run.json", run_file(device="cuda", device_uuids=[uuid], watch_uuids=[uuid], knobs=defaults()))
    ticks = [
        {"t_ns": second * 10**9, "devices": [{"uuid": uuid, "index": 0, "gpu_utilization_percent": 50}]}
        for second in range(5, 10)
    ]
    put(tmp_path / "telemetry.jsonl", *ticks)
    answer = WarmLine(t_ns=9 * 10**9, kind="trial", step_ms=[1000.0] * 4, data_ms=[2.0] * 4, optimizer_ms=[90.0] * 4)
    steps = answer.steps()
    assert [step.t_ns for step in steps] == [second * 10**9 for second in (6, 7, 8, 9)]
    found = conductor.phases_of(tmp_path, steps, {})
    assert found["profile"] == StepProfile(data_ms=2.0, optimizer_ms=90.0, gpu_busy=0.5)
    assert any("the GPU is idle for 50 % of the time" in line for line in found["diagnosis"])
    assert conductor.phases_of(tmp_path, [], {}) == {}


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({}, "measured"),
        ({"throttle": Throttle(thermal_fraction=0.2, power_fraction=0.0)}, "void"),
        ({"throttle": Throttle(thermal_fraction=0.0, power_fraction=0.9)}, "measured"),
        ({"state": "lost"}, "void"),
        ({"state": "failed"}, "failed"),
    ],
)
def test_heat_and_a_lost_run_void_a_measurement_and_the_power_limit_does_not(fields, outcome):
    assert outcome_of(msgspec.structs.replace(FINISHED, **fields))[0] == outcome


RECORDED = next((Path(__file__).parents[2] / "recorded_runs").iterdir())


def test_a_trial_that_ran_other_settings_names_them_and_a_start_leaves_the_steps_out():
    assert override_reason(RECORDED, {"precision": "fp32", "optimizer": "adamw", "attention": "sdpa"}) is None
    words = override_reason(RECORDED, {"precision": "bf16"})
    assert words == "precision=bf16 (compute_dtype): asked for bfloat16, but rank 0 ran float32"
    assert "optimizer" in str(override_reason(RECORDED, {"optimizer": "sgd"}))
    assert "attention=eager" in str(override_reason(RECORDED, {"attention": "eager"}))
    records = read_records(RECORDED)
    first = records.steps[0][0]
    began_s = (first.t_ns - records.run.clock.monotonic_ns) / 1e9
    assert 0 < read_start_s(RECORDED) <= began_s + 3 * first.step_ms / 1e3


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("8760h", 31_536_000.0)]
)
def test_a_budget_is_read_as_it_is_typed(text, seconds):
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["8761h", "9" * 400])
def test_a_budget_of_more_than_a_year_is_refused(text):
    with pytest.raises(UserError, match=r"^must be at most 8760h, a year"):
        read_budget(text)
