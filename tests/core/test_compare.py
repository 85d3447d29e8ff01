"""Two runs compared: an interval that holds the truth as often as it claims, and conditions that may explain it."""

import random
import statistics

import msgspec
import pytest

from trainfast_runner.records.result import (
    STRICT_SPEED,
    CompileCost,
    Cpu,
    Energy,
    Losses,
    MemoryFigures,
    Result,
    RunConditions,
    Spread,
    StepCount,
    StepTime,
    Throttle,
    ThrottledDevice,
    Throughput,
)
from trainfast_runner.records.run_file import ForeignProcess, ScriptFigures
from trainfast_runner.records.run_lines import Actual
from trainfast_runner.results import comparison
from trainfast_runner.results.comparison import BETTER, DIFFERENT_MODEL, DIFFERENT_SCRIPT, NOISE, WORSE, compare, pooled
from trainfast_runner.results.distributions import spread
from trainfast_runner.results.doubts import doubts, qualifications, watched_text
from trainfast_tui.text.result_words import difference_text, value_text, verdict_reasons, verdict_words


def result(rate=100.0, mad=1.0, steps=40, **fields):
    return Result(
        run_id="r",
        state="finished",
        steps=StepCount(measured=steps, warmup=3),
        throughput=Throughput(samples_per_s=Spread(median=rate, mad=mad)),
        **{"step_ms": StepTime(p50=8e3 / rate), **fields},
    )


def taken(percent, device="cpu"):
    """A run beside others that took so much of the CPU."""
    return result(actual=Actual(device=device), conditions=RunConditions(others_cpu_percent=percent))


def row_of(label, a, b):
    return next(row for row in compare(a, b).rows if row.label == label)


def test_an_interval_agrees_with_the_verdict_a_rate_with_its_time_and_few_steps_have_none():
    (row, *_), same = compare(result(100), result(110)).rows, compare(result(100), result(101)).rows[0]
    low, high = row.interval_percent
    assert low < 10 < high
    assert low > 0
    assert same.verdict == NOISE
    assert same.interval_percent[0] < 0 < same.interval_percent[1]
    rows = {row.label: row for row in compare(result(100), result(110)).rows}
    rate, step = rows["throughput"].interval_percent, rows["step"].interval_percent
    assert 1 / (1 + rate[0] / 100) == pytest.approx(1 + step[1] / 100)
    assert compare(result(steps=3), result(110)).rows[0].interval_percent is None


@pytest.mark.parametrize(("ms", "batch", "end"), [(100, 8, "after 150 steps"), (30, 8, "never"), (100, 16, None)])
def test_compiling_pays_for_itself_beside_an_equal_run_that_was_not_compiled(ms, batch, end):
    compiled, eager = (
        result(step_ms=StepTime(p50=step_ms), knobs={"compile": mode, "batch_size": size, "steps": size}, compile=cost)
        for step_ms, mode, size, cost in ((40, "default", 8, CompileCost(cold_seconds=9)), (ms, "off", batch, None))
    )
    found = [note for note in compare(eager, compiled).notes if note.startswith("compiling")]
    assert found == ([] if end is None else [f"compiling took B 9.0 s, which its faster steps win back {end}"])


def simulated(draw, truth, steps, scatter, alike):
    """A run of a rate `truth`: steps scatter lognormally, each like the one before it, and runs by a percent."""
    run = truth * draw.lognormvariate(0, 0.01 / 2**0.5)
    rates, state = [], draw.gauss(0, 1)
    for _ in range(steps):
        state = alike * state + (1 - alike**2) ** 0.5 * draw.gauss(0, 1)
        rates.append(run * 2.718281828 ** (scatter * state))
    found = spread(rates)
    return result(found.median or 0, found.mad or 0, steps)


@pytest.mark.parametrize(("scatter", "alike"), [(0.005, 0.0), (0.05, 0.0), (0.1, 0.4)])
def test_the_interval_holds_the_true_difference_95_times_in_100(scatter, alike):
    draw, held, pairs = random.Random(7), 0, 300
    for _ in range(pairs):
        a, b = (simulated(draw, truth, 25, scatter, alike) for truth in (100, 107))
        low, high = compare(a, b).rows[0].interval_percent or (0, 0)
        held += low <= 7 <= high
    assert held / pairs >= 0.95 - 2 * statistics.NormalDist().stdev * (0.95 * 0.05 / pairs) ** 0.5


def test_conditions_that_may_explain_a_difference_are_named():
    quiet = {"start_temperature_c": 41, "driver": "570.1", "still_warming": False}
    hot = {"start_temperature_c": 63, "driver": "580.2", "still_warming": True, "clean": False}
    shared = RunConditions(**hot, foreign_processes=[ForeignProcess(pid=1)])
    a = result(100, conditions=RunConditions(**quiet), throttle=Throttle(thermal_fraction=0.0, power_fraction=0.0))
    b = result(90, conditions=shared, throttle=Throttle(thermal_fraction=0.2, power_fraction=0.9))
    found = compare(a, b)
    assert [(row.label, row.a, row.b) for row in found.conditions if row.differs] == [
        ("start temperature", "41 °C", "63 °C"),
        ("throttled by heat", "0.0 % of the time", "20.0 % of the time"),
        ("throttled by the power limit", "0.0 % of the time", "90.0 % of the time"),
        ("other processes", "0", "1"),
        ("driver", "570.1", "580.2"),
        ("steady", "yes", "still warming up"),
    ]
    assert found.doubts[-1].text.startswith("the conditions differed (start temperature, throttled by heat,")
    assert [doubt.kind for doubt in found.doubts[:-1]] == ["memory_not_freed", "shared_gpu", "heat", "warming_up"]
    assert (verdict_words(found) or "").startswith("Doubtful: B has 10.0 % less throughput than A")


def test_on_a_cpu_what_others_take_of_it_is_a_condition():
    found = compare(taken(3, "cpu"), taken(40, "cpu"))
    assert [(row.a, row.b) for row in found.conditions if row.differs] == [("3 %", "40 %")]
    assert "`bench --repeat 3` runs two variants in turn" in verdict_reasons(found)[-1]
    assert any(note == "B shared the CPU: other processes took 40 % of it" for note in verdict_reasons(found))
    assert not any(row.differs for row in compare(taken(3, "cuda"), taken(40, "cuda")).conditions)

    def differs(a, b):
        return any(row.differs for row in compare(taken(a), taken(b)).conditions)

    assert differs(89, 85)
    assert not differs(3, 5)


def test_runs_in_turn_are_judged_by_their_own_spread_without_a_doubt():
    def in_turn(*pairs):
        return pooled([compare(result(a, steps=2), result(b, steps=2)) for a, b in pairs])

    found = in_turn((100, 120), (102, 122))
    row = found.rows[0]
    assert (row.a, row.b, row.verdict, found.doubts) == (101, 121, BETTER, [])
    low, high = row.interval_percent
    assert low < row.percent < high
    assert in_turn((100, 120), (120, 105)).rows[0].verdict == NOISE, "one setting differs by as much as the two"
    alone = compare(result(100, steps=2), result(120, steps=2))
    assert pooled([alone]) is alone
    assert alone.rows[0].verdict == comparison.DOUBTFUL


def test_a_page_or_two_of_memory_is_no_difference_and_more_for_a_larger_batch_no_worse():
    def peak(mib, **knobs):
        return result(memory=MemoryFigures(peak_allocated_bytes=int(mib * 2**20)), knobs={"batch_size": 8, **knobs})

    def verdict(a, b, **knobs):
        return row_of("peak allocated", peak(a), peak(b, **knobs)).verdict

    assert [verdict(200, 400, batch_size=size) for size in (16, 8)] == ["changed", "worse"]
    assert [verdict(24, 25), verdict(24, 28), verdict(4000, 4020), verdict(4000, 4200)] == [NOISE, WORSE, NOISE, WORSE]


def test_equal_conditions_and_those_not_known_of_one_run_are_not_blamed():
    alike = RunConditions(start_temperature_c=41, driver="580", still_warming=False)
    found = compare(result(conditions=alike), result(conditions=RunConditions(start_temperature_c=44, driver="580")))
    assert [row.label for row in found.conditions] == ["start temperature", "driver", "steady"]
    assert not any(row.differs for row in found.conditions)
    assert not found.notes
    assert not found.doubts
    found = compare(result(100), result(90, throttle=Throttle(thermal_fraction=0.2)))
    assert [(row.a, row.b, row.differs) for row in found.conditions if "heat" in row.label] == [
        (None, "20.0 % of the time", False)
    ]
    assert any("was throttled by heat for 20.0 %" in doubt.text for doubt in found.doubts)


def test_the_change_is_that_of_the_figures_and_the_sentence_says_which_way_and_how_sure():
    row = compare(result(1036.4), result(1049.6)).rows[0]
    assert difference_text(row) == "+13.2 samples/s"
    assert row.percent == pytest.approx(100 * 13.2 / 1036.4)
    text = verdict_words(compare(result(100), result(80)))
    assert text.startswith("B has 20.0 % less throughput than A (95 % CI: -2")
    text = verdict_words(compare(result(100), result(101))) or ""
    assert text.startswith("No significant difference in throughput (95")
    of_two_steps = compare(result(100), result(101, steps=2))
    assert verdict_words(of_two_steps) == "Doubtful: B has 1.0 % more throughput than A, but"
    assert verdict_reasons(of_two_steps) == ["B measured 2 steps: too few to tell a difference from noise"]


def test_the_energy_of_gpus_that_only_one_run_watched_is_no_difference_of_theirs():
    def watching(watch, gpus, joules):
        devices = [ThrottledDevice(index=gpu, uuid=f"GPU-{gpu}") for gpu in range(gpus)]
        energy = Energy(joules_per_sample=joules)
        return result(knobs={"watch": watch}, throttle=Throttle(devices=devices), energy=energy)

    def verdict(a, b):
        return next(row.verdict for row in compare(a, b).rows if row.unit == "J")

    assert verdict(watching("0", 1, 10), watching("0+1", 2, 20)) == comparison.DIFFERENT_DEVICES
    assert verdict(watching("auto", 1, 10), watching("0", 1, 20)) == WORSE
    assert verdict(watching("auto", 1, 10), watching("auto", 2, 20)) == WORSE


def test_a_field_of_the_model_or_data_is_a_setting_and_auto_is_the_kernel_it_ran():
    a = result(overrides={"model.num_hidden_layers": 1, "batch_size": 8}, knobs={"batch_size": 8})
    b = result(overrides={"model.num_hidden_layers": 2, "data.kind": "random"}, knobs={"batch_size": 8})
    found = compare(a, b)
    assert found.knobs == [("model.num_hidden_layers", 1, 2), ("data.kind", None, "random")]
    assert value_text("data.kind", None) == "the preset's"
    assert value_text("precision", None) == "not set", "it is left to the script"
    assert value_text("memory_limit", None) == "none"
    assert next(row.verdict for row in found.rows if row.label == "step") == DIFFERENT_MODEL
    old = result(knobs={"attention": "sdpa"}, actual=Actual(attention="sdpa"))
    assert compare(old, result(knobs={"attention": "auto"}, actual=Actual(attention="sdpa"))).knobs == []
    eager = result(knobs={"attention": "auto"}, actual=Actual(attention="eager"))
    assert compare(old, eager).knobs == [("attention", "sdpa", "auto")]


def of_script(*command, cwd="/a", rate=100):
    return result(rate, script=ScriptFigures(command=list(command), cwd=cwd))


ONE = of_script("python", "train.py", "--bs", "4")


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (of_script("python", "train.py", cwd="/b", rate=60), DIFFERENT_SCRIPT),
        (of_script("python", "other.py", rate=60), DIFFERENT_SCRIPT),
        (of_script("python", "-m", "train", rate=60), DIFFERENT_SCRIPT),
        (of_script("accelerate", "launch", "/a/train.py", cwd="/b", rate=60), WORSE),
        (of_script("python", "train.py", cwd=None, rate=60), WORSE),
        (result(60), comparison.SCRIPT_AND_PRESET),
    ],
)
def test_speeds_of_different_scripts_rank_against_each_other_nowhere(other, verdict):
    found = compare(ONE, other)
    rows = {row.label: row for row in found.rows}
    assert (rows["throughput"].verdict, rows["step"].verdict) == (verdict, verdict)
    assert (rows["throughput"].interval_percent is None) == (verdict != WORSE)
    words = verdict_words(found) or ""
    assert words.startswith("B has 40.0 % less") if verdict == WORSE else words == f"Speed is {verdict}."


@pytest.mark.parametrize(
    "launcher", ["-m", "-um", "-m torch.distributed.run --nproc-per-node=2 -m", "-m cProfile -m", "-m scalene -m"]
)
def test_modules_behind_one_launcher_are_different_scripts(launcher):
    a, b = (of_script("python", *launcher.split(), module, "--config", "sizes.py") for module in ("a.train", "b.train"))
    assert compare(a, a).rows[0].verdict != DIFFERENT_SCRIPT
    assert DIFFERENT_SCRIPT in {row.verdict for row in compare(a, b).rows}


def test_samples_of_different_lengths_models_of_other_sizes_and_losses_of_other_steps_do_not_rank():
    def of_length(seq_len, rate):
        samples, tokens = Spread(median=rate, mad=1.0), Spread(median=rate * seq_len, mad=1.0)
        rates = Throughput(samples_per_s=samples, tokens_per_s=tokens)
        return msgspec.structs.replace(result(rate, knobs={"batch_size": 8, "seq_len": seq_len}), throughput=rates)

    found = compare(of_length(128, 100), of_length(256, 60))
    rows = {row.label: row for row in found.rows}
    assert rows["throughput"].verdict == rows["step"].verdict == comparison.DIFFERENT_SEQ_LEN
    assert (rows["throughput"].interval_percent, rows["step"].interval_percent) == (None, None)
    assert (rows["token throughput"].verdict, rows["token throughput"].percent) == (BETTER, pytest.approx(20))
    assert rows["token throughput"].interval_percent is not None
    assert verdict_words(found) == "Samples/s are not comparable: different seq_len; compare tokens/s."
    a, b = (result(rate, preset=name, actual=Actual(layers=n)) for rate, name, n in ((100, "s", 4), (60, "m", 8)))
    assert compare(a, b).rows[0].verdict == DIFFERENT_MODEL

    def verdict(steps, warmup):
        a, b = result(loss=Losses(last=8.0)), result(loss=Losses(last=4.0))
        return compare(a, msgspec.structs.replace(b, steps=StepCount(measured=steps, warmup=warmup))).rows[-1].verdict

    assert verdict(40, 3) == verdict(41, 2) == "changed"
    assert verdict(80, 3) == comparison.DIFFERENT_STEPS


def phase(ms, mad):
    """A run whose steps scatter by half of themselves, and whose loading by `mad`."""
    return result(100, 50, step_ms=StepTime(p50=80, data=ms, mad={"data": mad}))


def test_a_watched_gpu_is_named_as_one_and_its_memory_is_not_the_runs():
    row = ThrottledDevice(index=3, thermal_fraction=0.481)
    held = Throttle(thermal_fraction=0.481, devices=[ThrottledDevice(index=1, thermal_fraction=0.1), row])
    on_cpu, on_gpu = (result(actual=Actual(device=device), throttle=held) for device in ("cpu", "cuda"))
    assert [doubt.kind for doubt in doubts(on_gpu)] == ["heat"]
    assert "heat" not in [doubt.kind for doubt in doubts(on_cpu)], "a GPU that is only watched slows no CPU"
    assert [*qualifications(on_cpu), doubts(on_gpu)[0].text] == [
        f"was throttled by heat on {gpu} 3 for 48.1 % of the measured time" for gpu in ("watched GPU", "GPU")
    ]
    assert watched_text(result(actual=Actual(device="cpu"), throttle=held)) == "watched GPUs 1 and 3"


def test_speed_under_strict_malloc_thresholds_ranks_against_nothing():
    cpu = Actual(device="cpu")
    strict = Throughput(samples_per_s=Spread(median=60.0, mad=1.0), measured_under=STRICT_SPEED)
    limited = msgspec.structs.replace(result(actual=cpu, cpu=Cpu(thresholds="strict")), throughput=strict)
    free = result(100.0, actual=cpu, cpu=Cpu(thresholds="strict in warm-up"))
    found = compare(limited, free)
    rows = {row.label: row for row in found.rows}
    assert rows["throughput"].verdict == rows["step"].verdict == comparison.STRICT_THRESHOLDS
    assert rows["throughput"].interval_percent is None
    assert verdict_words(found) is not None
    assert "not comparable" in str(verdict_words(found))
    assert any("speed is not comparable" in doubt.text for doubt in found.doubts)
    assert compare(limited, limited).rows[0].verdict == comparison.STRICT_THRESHOLDS, "it ranks against nothing"


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    # Steps that scatter for another reason do not hide that loading takes a sixteenth.
    [
        ((83.1, 6), (5.32, 1), BETTER),
        ((10, 0.01), (10.1, 0.01), NOISE),
        ((10, 6), (14, 6), NOISE),
        ((0, 0), (0.2, 0), NOISE),
    ],
)
def test_a_phase_differs_by_its_own_spread_and_if_it_is_large_enough_to_matter(a, b, verdict):
    assert row_of("step: data", phase(*a), phase(*b)).verdict == verdict
