"""Bottlenecks of a run: one line on the main screen, and a key that opens it to its figures."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded import HEAT, RAMP, START_NS, S, a_ramp_tick, a_run, a_thermal_ramp, write_lines
from still import a_live_ramp, a_snapshot, has, running

from trainfast_runner.records.result import Doubt, Result, StepCount
from trainfast_runner.results.device_conditions import DeviceConditions, StepConditions
from trainfast_runner.running.follower import Follower, RunSnapshot
from trainfast_tui.panels.step_panel import conditions_line, worst_bottleneck
from trainfast_tui.text.diagnosis_words import no_bottleneck_in_result, no_bottleneck_in_run


async def test_a_line_says_it_and_a_key_opens_it_and_closes_it(home):
    async with running(home, a_snapshot(a_thermal_ramp(home), second=38)) as (app, pilot):
        assert f"d {HEAT.line}" in app.text
        assert "throttled by heat, 16 % of a step" in await pilot.press("d")
        assert "next run" in await pilot.press("d")


async def test_nothing_found_is_shown_and_before_the_first_step_nothing(home):
    async with running(home, size=(80, 24)) as (_, pilot):
        assert "No step was measured yet" in await pilot.press("d")
        assert "no bottleneck measured" in await pilot.show(a_snapshot(a_run(home)))


def test_a_bottleneck_that_a_doubt_names_is_not_said_twice(home):
    run = Follower(a_thermal_ramp(home)).poll()
    result = Result(run_id=run.run_id, state="finished", doubts=[Doubt(kind="heat", text="was throttled by heat")])
    doubtful = replace(run, result=result, diagnosis=[HEAT])
    assert "".join(text for text, _ in worst_bottleneck(doubtful)) == "d what to try against the doubt"
    sure = replace(doubtful, result=msgspec.structs.replace(result, doubts=[]))
    assert HEAT.line in "".join(text for text, _ in worst_bottleneck(sure))


@pytest.mark.parametrize(
    ("measured", "diagnosed", "words"),
    [
        (2, False, "too few measured steps to find"),
        (3, False, "bottlenecks were not looked for"),
        (3, True, "no bottleneck measured"),
    ],
)
def test_nothing_found_is_distinguished_from_not_looked_for(measured, diagnosed, words):
    result = Result(run_id="r", state="finished", steps=StepCount(measured=measured), diagnosed=diagnosed)
    assert no_bottleneck_in_result(result).startswith(words)
    ended = RunSnapshot(Path("run"), state="finished", result=result)
    assert no_bottleneck_in_run(ended) == no_bottleneck_in_result(result)


def conditions_text(directory, width):
    run = Follower(directory).poll()
    return "".join(text for text, _ in conditions_line(run, width))


def test_the_newest_steps_say_what_heat_cost_them(home, hold):
    text = conditions_text(a_live_ramp(home, hold, RAMP.stop), 110)
    assert re.match(r"watched GPU 0: T \d+ ms a step ", text), "a run on the CPU takes no energy of a GPU"
    assert text.split(" T ")[1].split(" ms")[0] > "400", "all of a step of half a second was throttled"
    has(text, "clock -3", "J/sample")


def test_of_an_ended_run_all_its_steps_count_and_warming_up_is_shown(home):
    text = conditions_text(a_thermal_ramp(home), 120)
    assert "T 2" in text
    assert "   still warming up at the end" in text
    narrow = conditions_text(home.directory("20261121-054455-tiny-llama-7f3a"), 50)
    assert narrow.startswith("watched GPU 0: T 210 ms")
    assert narrow.endswith("still warming")
    assert len(narrow) <= 50, "what has no room is left out whole"
    assert "36.0 J/sample" in conditions_text(home.directory("20261121-054455-tiny-llama-7f3a"), 77)


def two_gpus_in_step(number, *thermal_ms):
    """A step in which heat throttled GPU 0 and GPU 1 for so long."""
    devices = tuple(
        DeviceConditions(index=index, uuid=f"GPU-{index:08d}", throttled_ms={"thermal": ms})
        for index, ms in enumerate(thermal_ms)
    )
    throttled_ms = {"thermal": max(thermal_ms)}
    return StepConditions(step=number, t_ns=START_NS + number * S, throttled_ms=throttled_ms, devices=devices)


def test_the_gpu_that_is_named_was_throttled_most_over_all_steps_not_in_the_last(home):
    run = Follower(a_run(home, gpus=2)).poll()
    conditions = (two_gpus_in_step(28, 90.0, 0.0), two_gpus_in_step(29, 90.0, 0.0), two_gpus_in_step(30, 0.0, 3.0))
    line = conditions_line(replace(run, conditions=conditions), 110)
    assert "T 61.0 ms (GPU 0) a step" in "".join(text for text, _ in line)


def test_a_cool_run_is_not_throttled(home, hold):
    directory = a_live_ramp(home, hold, RAMP.start)
    has(conditions_text(directory, 110), "not throttled   ", "   clock at maximum")


READ = ("throttle_reasons", "thermal_violation_ns", "energy_mj", "sm_clock_mhz", "power_w", "temperature_c")
UNREAD: dict[str, Any] = dict.fromkeys((*READ, "power_violation_ns", "sync_boost_violation_ns"))


def test_of_a_gpu_without_readings_nothing_is_guessed(home, hold):
    directory = a_live_ramp(home, hold, RAMP.stop)
    ticks = [a_ramp_tick(second) for second in range(RAMP.stop)]
    for place in range(RAMP.stop):
        silent = msgspec.structs.replace(ticks[place].devices[0], **UNREAD)
        ticks[place] = msgspec.structs.replace(ticks[place], devices=[silent])
    write_lines(directory / "telemetry.jsonl", ticks)
    text = conditions_text(directory, 110)
    assert text.startswith("watched GPU 0: throttling unknown   steady so far")
    assert "J/step" not in text
