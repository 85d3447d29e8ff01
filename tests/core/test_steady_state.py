"""Whether a run was steady, and in which field it trained something else than was asked."""

import math
import random

import pytest

from on_disk import run_file
from trainfast_runner.records.result import SteadyState
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.worker_lines import ActualLine
from trainfast_runner.results.distributions import drift_text, steady_state
from trainfast_runner.results.verdict import first_difference

S = 1_000_000_000


def run(times_ms, temperature=None):
    """Steps one after the other from second 0 on, and one device's temperature a second."""
    end_ms, steps = 0.0, []
    for number, ms in enumerate(times_ms, 4):
        end_ms += ms
        steps.append(Step(step=number, t_ns=round(end_ms * 1e6), step_ms=ms))
    return steady_state(steps, [[(t * S, c) for t, c in enumerate(temperature)]] if temperature else [])


DRAW = random.Random(3)


@pytest.mark.parametrize(
    ("times_ms", "temperatures_c"),
    [
        pytest.param([DRAW.gauss(100, 8) for _ in range(300)], None, id="a scatter without a trend"),
        pytest.param([100.0] * 30 + [5000.0] + [100.0] * 30, None, id="one slow step"),
        pytest.param([100 + 60 * math.exp(-n / 10) for n in range(200)], None, id="warms up and settles"),
        pytest.param([100.0] * 600, [min(80, 50 + 3 * t) for t in range(61)], id="heats and then stays"),
        *(
            pytest.param([100 + 20 * math.sin(2 * math.pi * n / period + 1) for n in range(200)], None, id=f"{period}")
            for period in (4, 10, 37, 100)
        ),
    ],
)
def test_what_does_not_drift_is_steady(times_ms, temperatures_c):
    assert run(times_ms, temperatures_c).still_warming is False


@pytest.mark.parametrize(
    ("times_ms", "temperatures_c", "warming", "drift_percent", "slope_c_per_min"),
    [
        pytest.param([100.0] * 40, [70.0] * 5, False, 0, 0, id="equal steps"),
        pytest.param([100.0] * 300, [50 + t for t in range(31)], True, 0, 60, id="still heats, with equal steps"),
        pytest.param([100 + n for n in range(100)], None, True, 24, None, id="slower all the time"),
        pytest.param([100.0] * 300, [80 - t for t in range(31)], True, 0, -60, id="cools after harder work"),
    ],
)
def test_drift_and_slope_are_told(times_ms, temperatures_c, warming, drift_percent, slope_c_per_min):
    found = run(times_ms, temperatures_c)
    assert found.still_warming is warming
    assert found.step_drift_percent == pytest.approx(drift_percent, rel=0.5)
    assert found.temperature_slope_c_per_min == pytest.approx(slope_c_per_min, rel=0.1)


@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_a_handful_of_steps_tells_nothing(steps):
    assert run([100.0 + 9 * n for n in range(steps)]) == SteadyState()


def test_a_drift_is_warming_up_unless_the_temperature_falls_and_scatter_none():
    texts = [drift_text(slope) for slope in (-60, None, 5.0)]
    assert texts == ["still cooling down", "still warming up", "still warming up"]
    drifts = []
    for seed in range(40):
        draw = random.Random(seed)
        found = run([draw.choice([80.0, 100.0, 125.0]) for _ in range(24)])
        if found.still_warming is False:
            drifts.append(found.step_drift_percent)
    assert len(drifts) > 10
    assert all(drift is None or abs(drift) <= 2 for drift in drifts)


def asked(world_size, **knobs):
    given = {"precision": "fp32", "optimizer": "adamw", "tp_degree": 2, "reshard": "on", **knobs}
    given |= {"pp_degree": 2, "pp_schedule": "interleaved", "sequence_parallel": "on", "ep_degree": 2}
    return run_file(model={"family": "llama"}, knobs=given, device="cpu", world_size=world_size)


def ran(**fields):
    return {0: [ActualLine(t_ns=1, **fields)]}


@pytest.mark.parametrize(
    ("strategy", "ranks", "fields"),
    [
        ("fsdp", 2, {"wrapper": "FSDPModule", "mesh": {"dp": 2}, "reshard": "on"}),
        ("tp", 2, {"wrapper": "DTensor", "mesh": {"tp": 2}, "reshard": None}),
        ("ddp+tp", 4, {"wrapper": "DTensor+DistributedDataParallel", "mesh": {"dp": 2, "tp": 2}}),
        ("fsdp+tp", 4, {"wrapper": "FSDPModule+DTensor", "mesh": {"dp": 2, "tp": 2}, "reshard": "on"}),
        (
            "ddp+tp+pp",
            8,
            {
                "wrapper": "DTensor+DistributedDataParallel+ScheduleInterleaved1F1B",
                "mesh": {"dp": 2, "pp": 2, "tp": 2},
                "pipeline_stages": 4,
            },
        ),
    ],
)
def test_a_sharded_run_that_is_what_was_asked(strategy, ranks, fields):
    assert first_difference(asked(ranks, strategy=strategy), ran(world_size=ranks, **fields)) is None


@pytest.mark.parametrize(
    ("strategy", "fields", "expected"),
    [
        ("fsdp", {"wrapper": "DistributedDataParallel"}, "strategy=fsdp (wrapper): asked for FSDPModule, but rank 0"),
        ("fsdp", {"wrapper": "FSDPModule", "reshard": "off"}, "reshard: asked for on, but rank 0 ran off"),
        ("fsdp+tp", {"wrapper": "FSDPModule"}, "asked for DTensor+FSDPModule, but rank 0 ran FSDPModule"),
        ("tp", {"sequence_parallel": "off"}, "sequence_parallel: asked for on, but rank 0 ran off"),
        ("tp", {"ep_degree": 1}, "ep_degree: asked for 2, but rank 0 ran 1"),
        ("ddp+tp", {"mesh": {"dp": 4, "tp": 1}}, "mesh: asked for {'dp': 2, 'tp': 2}"),
        ("fsdp+tp+pp", {"mesh": {"dp": 1, "pp": 4}}, "mesh: asked for {'dp': 1, 'pp': 2, 'tp': 2}"),
        ("fsdp+tp+pp", {"wrapper": "DTensor+FSDPModule"}, "asked for DTensor+FSDPModule+ScheduleInterleaved1F1B"),
        ("naive-mp", {"wrapper": "none", "mesh": {"mp": 1}}, "mesh: asked for {'mp': 4}"),
    ],
)
def test_the_first_field_that_differs_is_named(strategy, fields, expected):
    difference = first_difference(asked(4, strategy=strategy), ran(**fields))
    assert expected in difference


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_every_kernel_is_what_auto_asked_for(kernel):
    assert first_difference(asked(1, attention="auto"), ran(attention=kernel)) is None
    named = first_difference(asked(1, attention="flash"), ran(attention=kernel))
    assert named == f"attention=flash: asked for flash_attention_2, but rank 0 ran {kernel}"
