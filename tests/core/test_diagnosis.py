"""Each rule of the diagnosis on records that make it speak, and on ones next to them that do not."""

import string

import pytest
from diagnosed import GIB, Case, S, always

from on_disk import run_file
from trainfast_runner.records.run_directory import read_records, shared_lock
from trainfast_runner.records.run_file import ForeignProcess, LaunchThreads, ScriptAsked
from trainfast_runner.records.run_lines import Event
from trainfast_runner.results.bottleneck import MeasuredWindow, diagnose, figures_by_scope, foreign_processes
from trainfast_runner.results.bottleneck_rules import RULES, matching_rule
from trainfast_runner.results.device_conditions import Window
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict
from trainfast_runner.running.follower import Follower

STRATEGIES_THAT_WAIT = ("zero3-offload", "pp", "naive-mp", "dp")
NAMES = tuple(dict.fromkeys(rule.name for rule in RULES))
SPINNING, SLEEPING = LaunchThreads(wait="default"), LaunchThreads(wait="passive")

HOT = {"throttle_reasons": ["sw_thermal"], "sm_clock_mhz": 990, "temperature_c": 94}
DDP, NARROW = {"strategy": "ddp"}, {"pcie_width": 8}
PAIRS = {
    # rule: what triggers it, and what is next to it and does not
    "memory-thrashing": (Case(step=lambda n: {"alloc_retries": 7 + n}), Case(step=always(alloc_retries=7))),
    "data-bound": (Case(step=always(data_ms=300.0)), Case(step=always(data_ms=90.0))),
    "thermal": (Case(gpus={0: always(**HOT)}), Case(gpus={0: always(temperature_c=91)})),
    "power-brake": (
        Case(gpus={0: always(throttle_reasons=["hw_slowdown", "hw_power_brake"])}),
        Case(gpus={0: always(throttle_reasons=["hw_slowdown"])}),
    ),
    "power-capped": (
        Case(gpus={0: always(throttle_reasons=["sw_power_cap"], sm_clock_mhz=1500, power_w=399.0)}),
        Case(gpus={0: always(throttle_reasons=["sw_power_cap"], power_w=399.0)}),
    ),
    "sync-boost": [Case(gpus={0: always(throttle_reasons=[reason])}) for reason in ("sync_boost", "idle")],
    "foreign-process": (
        Case(run={"foreign_processes": [ForeignProcess(device=0, pid=7)]}),
        Case(run={"foreign_processes": [ForeignProcess(device=5, pid=7)]}),
    ),
    "straggler-rank": (
        Case(knobs=DDP, other_ranks={1: always(forward_ms=400.0), 2: always()}),
        Case(knobs=DDP, other_ranks={1: always(forward_ms=340.0), 2: always()}),
    ),
    "straggler-gpu": (
        Case(knobs=DDP, gpus={0: always(), 1: always(sm_clock_mhz=1600)}, other_ranks={1: always()}),
        Case(knobs=DDP, gpus={0: always(), 1: always(sm_clock_mhz=1900)}, other_ranks={1: always()}),
    ),
    "communication-bound": (
        Case(knobs=DDP, step=always(forward_ms=200.0, backward_ms=760.0), other_ranks={1: always()}),
        Case(step=always(forward_ms=200.0, backward_ms=760.0)),
    ),
    "launch-bound": (
        Case(gpus={0: always(gpu_utilization_percent=55)}),
        # An idle GPU that waits for data is no question of launching.
        Case(gpus={0: always(gpu_utilization_percent=55)}, step=always(data_ms=430.0)),
    ),
    "small-batch": (Case(step=always(tokens=128)), Case(step=always(tokens=128), knobs={"precision": "fp32"})),
    "pcie-width": (Case(gpus={0: always(**NARROW)}), Case(gpus={0: always(**NARROW, gpu_utilization_percent=0)})),
    "host-cpu": (
        Case(device="cpu", host=always(cpu_percent=95.0, own_percent=400.0)),
        Case(device="cpu", host=always(cpu_percent=95.0, own_percent=740.0)),
    ),
    "spinning-threads": (
        Case(device="cpu", run={"threads": SPINNING}, host=always(cpu_percent=95.0, own_percent=700.0)),
        Case(device="cpu", run={"threads": SLEEPING}, host=always(cpu_percent=95.0, own_percent=700.0)),
    ),
    "host-memory": (
        Case(host=always(memory_available_bytes=2 * GIB)),
        Case(host=always(memory_available_bytes=4 * GIB, swap_used_bytes=3 * GIB)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", NAMES)
def test_each_rule_speaks_when_it_should_and_only_then(rule):
    triggers, does_not = PAIRS[rule]
    assert rule in triggers.found()
    assert rule not in does_not.found()
    finding = triggers.of(rule)
    assert finding.line
    assert finding.advice
    assert matching_rule(rule, finding.figures) in RULES
    for figure, _, _ in next(r for r in RULES if r.name == rule).when[:1]:
        assert finding.figures[figure] is not None, "a verdict opens to the figures it rests on"
    for cost_ms, share in ((one.cost_ms_per_step, one.cost_fraction) for one in triggers.findings()):
        assert cost_ms is None or 0 < cost_ms <= 1000 == cost_ms / share, "milliseconds of a step"


def test_memory_between_allocations_asks_for_the_expandable_allocator_unless_it_is_set():
    def thrashing(reserved, **knobs):
        peaks = {"peak_allocated_bytes": 8 * GIB, "peak_reserved_bytes": reserved * GIB}
        return Case(step=lambda n: {"alloc_retries": n, **peaks}, knobs=knobs).of("memory-thrashing").advice

    assert thrashing(10).startswith("allocator=expandable, as 20 % of the reserved memory")
    assert "allocator" not in thrashing(8)
    assert "allocator" not in thrashing(10, allocator="expandable")


@pytest.mark.parametrize(
    ("checkpointing", "forwards"),
    [("off", 2), ("selective", 2), ("every-4", 2.25), ("every-2", 2.5), ("full", 3), ("offload", 3)],
)
def test_a_backward_takes_two_forwards_and_what_it_computes_again(checkpointing, forwards):
    figures = figures_by_scope(Case(knobs={"checkpointing": checkpointing}).window())["run"][0]
    assert figures["computed_backward_ms"] == pytest.approx(forwards * figures["forward_ms"])


SECOND = {
    # the other rule of the same name
    "host-cpu": (Case(host=always(cpu_percent=91.0)), Case(host=always(cpu_percent=89.0))),
    "host-memory": [Case(host=lambda n, mib=mib: {"swap_used_bytes": n * (mib << 20)}) for mib in (8, 7)],
}


@pytest.mark.parametrize("rule", SECOND)
def test_the_second_rule_of_a_name_speaks_when_it_should_and_only_then(rule):
    triggers, does_not = SECOND[rule]
    (finding,) = triggers.findings()
    assert (finding.rule, matching_rule(rule, finding.figures)) == (rule, [r for r in RULES if r.name == rule][1])
    assert does_not.found() == []


@pytest.mark.parametrize("rule", NAMES)
def test_the_result_of_a_run_directory_and_the_live_view_say_the_same(rule, tmp_path):
    for case, speaks in zip(PAIRS[rule], (True, False), strict=True):
        case.write(tmp_path)
        result = summarise(tmp_path, read_records(tmp_path), Verdict("finished", ""), 10 * S)
        (tmp_path / "alive.lock").touch()
        with shared_lock(tmp_path):
            seen = Follower(tmp_path).poll()
        assert seen.is_live
        for diagnosis in (result.diagnosis, seen.diagnosis):
            assert (rule in [finding.rule for finding in diagnosis]) is speaks
        for path in tmp_path.iterdir():
            path.unlink()


def test_a_script_whose_threads_spin_beside_load_gets_the_variable_as_advice():
    busy = always(cpu_percent=95.0, own_percent=700.0)
    script = ScriptAsked(command=["python", "train.py"], argv=["python", "train.py"])
    spinning = Case(device="cpu", run={"threads": SPINNING, "script": script}, host=busy)
    finding = spinning.of("spinning-threads")
    assert finding.advice.startswith("run again with OMP_WAIT_POLICY=PASSIVE, which lets the threads sleep")
    assert "spinning-threads" not in Case(device="cpu", run={"script": script}, host=busy).found(), "not known"


UNKNOWN = dict.fromkeys(("gpu_utilization_percent", "sm_clock_mhz", "pcie_width", "power_w"))
IDLE = {0: always(gpu_utilization_percent=40)}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(Case(device=device), id=f"healthy on {device}") for device in ("cuda", "cpu")),
        pytest.param(Case(gpus={0: always(**UNKNOWN)}), id="unknown readings fulfil nothing"),
        # Their GPUs wait for their turn, or for the CPU: no question of launching.
        *(pytest.param(Case(knobs={"strategy": name}, gpus=IDLE), id=name) for name in STRATEGIES_THAT_WAIT),
    ],
)
def test_nothing_holds_back(case):
    assert case.found() == []


def test_heat_names_the_gpu_the_degrees_and_the_milliseconds_of_steps_alone():
    # Throttled from the sixth sample on, at half the clock: half of that part of a step is lost.
    case = Case(gpus={0: always(), 3: lambda n: HOT if n >= 5 else {"sm_clock_mhz": 1980}})
    finding = case.of("thermal")
    assert finding.device == 3
    assert finding.line == (
        "GPU 3 is throttled by heat for 500 of each 1,000 ms step, at 94 °C, 2 °C over the 92 °C at which it slows down"
        ": about 250 ms of the median step lost"
    )
    assert (finding.figures["slows_down_at_c"], finding.cost_fraction) == (92, pytest.approx(0.25))
    cool = {"throttle_reasons": ["hw_thermal"], "sm_clock_mhz": 990, "temperature_c": 55}
    finding = Case(gpus={0: always(**cool)}).of("thermal")
    assert "though its chip is at 55 °C, 37 °C under the 92 °C at which it slows down" in finding.line
    assert finding.advice.startswith("the chip itself is cool: look at the temperature of the memory")
    case = Case(gpus={0: always(**{**HOT, "sm_clock_mhz": 198})}, step=always(data_ms=700.0))
    costs = {finding.rule: finding.cost_ms_per_step for finding in case.findings()}
    assert (costs["data-bound"], costs["thermal"]) == (700, pytest.approx(300))
    case = Case(gpus={0: always(**HOT)}, step=always(step_ms=400.0, data_ms=4.0, forward_ms=130.0, backward_ms=250.0))
    finding = case.of("thermal")
    assert "is throttled by heat for 400 of each 400 ms step" in finding.line
    assert finding.figures["thermal_percent"] == pytest.approx(100)
    bursts = {"step": lambda n: {"step_ms": 1000.0 if n > 8 else 200.0, "data_ms": 0.0}}
    busy = Case(device="cpu", **bursts, host=always(cpu_percent=99.0, own_percent=100.0))
    hot = Case(**bursts, gpus={0: always(**{**HOT, "sm_clock_mhz": 100})})
    for case, rule in ((busy, "host-cpu"), (hot, "thermal")):
        finding = case.of(rule)
        assert 0 < (finding.cost_ms_per_step or 0) <= 200, rule
        assert finding.line.endswith("ms of the median step lost")


def test_a_share_of_the_cpu_is_no_share_of_a_step_and_with_cores_to_spare_costs_nothing_known():
    """The CPU use of others is shown in its own unit; its cost leaves out the wait for data."""
    busy = {"step": always(data_ms=250.0), "host": always(cpu_percent=99.0, own_percent=144.0)}
    data, host = sorted(Case(device="cpu", **busy).findings(), key=lambda finding: finding.rule)
    assert (data.cost_ms_per_step, data.cost_fraction) == (250, 0.25)
    assert host.line == "other processes take 81 % of the CPU that trains: about 608 ms of the median step lost"
    assert host.figures["others_cpu_percent"] == 81
    assert (host.cost_ms_per_step, host.cost_fraction) == (pytest.approx(607.5), pytest.approx(0.6075))
    assert data.cost_fraction + host.cost_fraction < 1
    case = Case(device="cpu", host=always(cpu_percent=60.0, own_percent=80.0), step=always(data_ms=150.0))
    data, host = case.findings()
    assert host.line == "other processes take 50 % of the CPU that trains"
    assert (host.cost_ms_per_step, host.cost_fraction) == (None, None)
    assert data.rule == "data-bound", "a known cost comes before one that nothing tells"


def test_of_several_gpus_the_costliest_speaks_and_of_several_causes_the_first_is_the_line():
    case = Case(
        gpus={0: always(**{**HOT, "sm_clock_mhz": 1800}), 1: always(**HOT)},
        step=always(data_ms=150.0),
        host=always(memory_available_bytes=GIB),
    )
    findings = case.findings()
    rules = [finding.rule for finding in findings]
    assert rules[0] == "thermal"
    assert rules.index("data-bound") < rules.index("host-memory")
    assert findings[0].device == 1
    assert [finding.severity for finding in findings] == ["warning"] * len(findings)


def test_what_to_try_against_waiting_for_data_depends_on_the_loaders_where_known():
    slow = always(data_ms=300.0)
    tries = [Case(step=slow, knobs={"workers": workers}).findings()[0].advice for workers in (0, 2, 8)]
    assert tries[0].startswith("workers=2: loading now happens in the training process")
    assert tries[1].startswith("workers=4: 2 loader processes")
    assert tries[2].startswith("cheaper loading")
    (finding,) = Case(step=always(data_ms=300.0), knobs={"workers": None}).findings()
    assert finding.figures["workers"] is None
    assert finding.advice.endswith("faster storage, or more loader processes")
    assert not any(character.isdigit() for character in finding.advice)
    case = Case(step=lambda n: {"data_ms": 2000.0 if n == 10 else 0.0, "step_ms": 3000.0 if n == 10 else 1000.0})
    assert "data-bound" in case.found()


def test_a_watched_gpu_is_diagnosed_for_its_throttling_and_no_step_is_lost_to_it():
    shared = {"foreign_processes": [ForeignProcess(device=1, pid=7)], "device_uuids": ["GPU-0"]}
    case = Case(gpus={0: always(), 1: always(pcie_width=8, **HOT)}, run=shared)
    (finding,) = case.findings()
    assert finding.rule == "thermal"
    assert finding.line.startswith("watched GPU 1 is throttled")
    assert finding.line.endswith("; the run does not use it")
    case = Case(device="cpu", gpus={0: lambda n: HOT if n >= 9 else {}, 1: always(**HOT)})
    finding = case.of("thermal")
    assert finding.line == (
        "watched GPU 1 is throttled by heat for 1,000 of each 1,000 ms step, at 94 °C, 2 °C over the 92 °C at which it"
        " slows down; the run does not use it"
    )
    assert (finding.cost_ms_per_step, finding.cost_fraction) == (None, None)
    assert finding.figures["thermal_percent"] == pytest.approx(100)
    assert finding.figures["thermal_lost_ms_per_step"] is None
    shared = {"foreign_processes": [ForeignProcess(device=0, pid=7), ForeignProcess(device=0, pid=9)]}
    case = Case(device="cpu", gpus={0: always(pcie_width=8, **HOT)}, run=shared)
    assert case.found() == ["thermal", "foreign-process", "pcie-width"]
    assert case.findings()[1].line == "watched GPU 0 is used by 2 other processes (pid 7, 9)"


def test_ranks_that_take_turns_are_no_stragglers_and_a_slow_gpu_keeps_only_ranks_waiting():
    case = Case(
        knobs=DDP,
        step=lambda n: {"forward_ms": 520.0 if n % 2 else 320.0},
        other_ranks={1: lambda n: {"forward_ms": 320.0 if n % 2 else 560.0}},
    )
    assert "straggler-rank" not in case.found()
    gpus = {0: always(), 1: always(sm_clock_mhz=1600)}
    waits = "ranks that meet in every step wait for it"
    joined = Case(device="cpu", gpus=gpus).of("straggler-gpu")
    trained = Case(knobs=DDP, gpus=gpus, other_ranks={1: always()}).of("straggler-gpu")
    assert (joined.line.startswith("watched GPU 1 runs at"), waits in joined.line) == (True, False)
    assert (joined.cost_fraction, trained.cost_fraction) == (None, pytest.approx((1 - 1600 / 1950) * 0.99))
    assert (trained.line.startswith("GPU 1 runs at"), waits in trained.line) == (True, True)
    window = Case(step=always(data_ms=900.0)).window()
    assert diagnose(MeasuredWindow(run=window.run, steps={0: window.first_rank[:2]})) == []


def test_every_rule_speaks_only_of_figures_there_are_and_says_where_its_threshold_is_from():
    triggered = {rule: case for rule, (case, _) in PAIRS.items()}
    assert set(triggered) == set(NAMES)
    for rule in RULES:
        case = Case(knobs=DDP, other_ranks={1: always()}, gpus={0: always()})
        known = set(figures_by_scope(case.window())[rule.scope][0])
        templates = [name for of in (rule.line, rule.advice) for _, name, _, _ in string.Formatter().parse(of) if name]
        asked = [*templates, *rule.shown_figures, *(figure for figure, _, _ in rule.when), *filter(None, [rule.cost])]
        assert set(asked) <= known, rule.name
        assert rule.source


def test_who_shared_the_gpu_in_a_window():
    present = [ForeignProcess(device=0, pid=1, memory_used_bytes=9), ForeignProcess(device=0, pid=2)]
    run = run_file(foreign_processes=present)
    changes = ((3, 1, "left"), (5, 3, "appeared"), (6, 2, "left"), (7, 3, "left"), (9, 4, "appeared"))
    events = [Event(t_ns=t * S, kind="foreign_process", device=0, pid=pid, state=state) for t, pid, state in changes]
    assert foreign_processes(run, events, Window(0, 1 * S))[0] == run.foreign_processes[0]
    assert [process.pid for process in foreign_processes(run, events, Window(4 * S, 8 * S))] == [2, 3]
    assert [process.pid for process in foreign_processes(run, events, Window(8 * S, 10 * S))] == [4]
    came = Event(t_ns=S, kind="foreign_process", device=2, pid=5, state="appeared", memory_used_bytes=2 * GIB)
    assert foreign_processes(run, [came], Window(0, 2 * S))[-1] == ForeignProcess(
        device=2, pid=5, memory_used_bytes=2 * GIB
    )
