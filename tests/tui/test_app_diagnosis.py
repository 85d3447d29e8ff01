"""Bottlenecks of a run: one line on the main screen, and a key that opens it to its figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded import (
    HEAT,
    RAMP,
    SMALL_BATCH,
    START_NS,
    S,
    a_gpu,
    a_ramp_tick,
    a_run,
    a_step,
    a_thermal_ramp,
    own_supervisor,
    write_lines,
)
from still import Lock, a_snapshot, has, running

from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result, StepCount
from trainfast_runner.records.run_lines import Event
from trainfast_runner.results.device_conditions import DeviceConditions, StepConditions
from trainfast_runner.running.follower import Follower, RunSnapshot
from trainfast_tui.cli.runs import explained_bottlenecks
from trainfast_tui.panels.step_panel import conditions_line
from trainfast_tui.text.diagnosis_words import (
    cost_words,
    figure_name,
    figure_text,
    no_bottleneck_in_result,
    no_bottleneck_in_run,
    overlap_words,
)


async def test_a_line_says_it_and_a_key_opens_it_and_closes_it(home: Home) -> None:
    async with running(home, a_snapshot(a_thermal_ramp(home), second=38)) as (app, pilot):
        assert f"d {HEAT.line}" in app.text
        assert "throttled by heat, 16 % of a step" in await pilot.press("d")
        assert "next run" in await pilot.press("d")


def test_shares_that_overlap_are_shown_with_a_note() -> None:
    two = [msgspec.structs.replace(HEAT, cost_fraction=0.7, cost_ms_per_step=350.0), HEAT]
    assert [cost_words(one) for one in (*two, SMALL_BATCH)] == ["70 % of a step: 350 ms", "16 % of a step", ""]
    assert overlap_words(two) == ""
    assert overlap_words([two[0], two[0]]).startswith("The shares add up to more than a step")
    *_, last = explained_bottlenecks([two[0], two[0]], "nothing")
    assert last == overlap_words([two[0], two[0]])
    assert "throttled by heat, 70 % of a step: 350 ms" in explained_bottlenecks(two, "nothing")


async def test_nothing_found_is_shown_and_before_the_first_step_nothing(home: Home) -> None:
    async with running(home, size=(80, 24)) as (_, pilot):
        assert "No step was measured yet" in await pilot.press("d")
        assert "no bottleneck measured" in await pilot.show(a_snapshot(a_run(home)))


@pytest.mark.parametrize(("measured", "words"), [(2, "too few measured steps yet"), (3, "no bottleneck measured now")])
def test_nothing_found_in_a_live_run_is_distinguished_from_too_few_steps(measured: int, words: str) -> None:
    steps = tuple(a_step(number) for number in range(1, 3 + measured + 1))
    assert no_bottleneck_in_run(RunSnapshot(Path("run"), state="running", steps=steps)).startswith(words)


@pytest.mark.parametrize(
    ("measured", "diagnosed", "words"),
    [
        (2, False, "too few measured steps to find"),
        (3, False, "bottlenecks were not looked for"),
        (3, True, "no bottleneck measured"),
    ],
)
def test_nothing_found_is_distinguished_from_not_looked_for(measured: int, diagnosed: bool, words: str) -> None:
    result = Result(run_id="r", state="finished", steps=StepCount(measured=measured), diagnosed=diagnosed)
    assert no_bottleneck_in_result(result).startswith(words)
    ended = RunSnapshot(Path("run"), state="finished", result=result)
    assert no_bottleneck_in_run(ended) == no_bottleneck_in_result(result)


def live_ramp(home: Home, hold: Lock, until: int) -> Path:
    directory = a_thermal_ramp(home, with_result=False)
    hold(directory)
    write_lines(directory / "telemetry.jsonl", [a_ramp_tick(second) for second in range(until)])
    write_lines(directory / "events.jsonl", [own_supervisor(), Event(t_ns=START_NS + S, kind="state", state="running")])
    return directory


def conditions_text(directory: Path, width: int) -> str:
    run = Follower(directory).poll()
    return "".join(text for text, _ in conditions_line(run, width))


def test_the_newest_steps_say_what_heat_cost_them(home: Home, hold: Lock) -> None:
    text = conditions_text(live_ramp(home, hold, RAMP.stop), 110)
    assert re.match(r"watched GPU 0: T \d+ ms a step ", text), "a run on the CPU takes no energy of a GPU"
    assert text.split(" T ")[1].split(" ms")[0] > "400", "all of a step of half a second was throttled"
    has(text, "clock -3", "J/sample")
    assert "87 °C now" in text, "where the run began is another figure, and does not change"


def test_of_an_ended_run_all_its_steps_count_and_warming_up_is_shown(home: Home) -> None:
    text = conditions_text(a_thermal_ramp(home), 120)
    assert "T 2" in text
    assert "   55 °C at start" in text, "the run's start, not its last step's"
    assert text.endswith("still warming up at the end")
    narrow = conditions_text(home.directory("20261121-054455-tiny-llama-7f3a"), 47)
    assert narrow.startswith("T 210 ms")
    assert narrow.endswith("still warming")
    assert len(narrow) <= 47, "what has no room is left out whole"
    assert "36.0 J/sample (watched GPU 0)  " in conditions_text(home.directory("20261121-054455-tiny-llama-7f3a"), 70)


def two_gpus_in_step(number: int, *thermal_ms: float) -> StepConditions:
    """A step in which heat throttled GPU 0 and GPU 1 for so long."""
    devices = tuple(
        DeviceConditions(index=index, uuid=f"GPU-{index:08d}", throttled_ms={"thermal": ms})
        for index, ms in enumerate(thermal_ms)
    )
    throttled_ms = {"thermal": max(thermal_ms)}
    return StepConditions(step=number, t_ns=START_NS + number * S, throttled_ms=throttled_ms, devices=devices)


def test_the_gpu_that_is_named_was_throttled_most_over_all_steps_not_in_the_last(home: Home) -> None:
    run = Follower(a_run(home, gpus=2)).poll()
    conditions = (two_gpus_in_step(28, 90.0, 0.0), two_gpus_in_step(29, 90.0, 0.0), two_gpus_in_step(30, 0.0, 3.0))
    line = conditions_line(replace(run, conditions=conditions), 110)
    assert "T 61.0 ms (GPU 0) a step" in "".join(text for text, _ in line)


def test_a_cool_run_is_not_throttled(home: Home, hold: Lock) -> None:
    directory = live_ramp(home, hold, RAMP.start)
    assert "not throttled   clock at maximum" in conditions_text(directory, 110)


def test_of_a_gpu_that_is_lost_now_nothing_earlier_is_shown(home: Home, hold: Lock) -> None:
    directory = live_ramp(home, hold, RAMP.stop)
    lost = a_gpu(0, error="GPU is lost")
    blank: dict[str, Any] = dict.fromkeys(("throttle_reasons", "thermal_violation_ns", "energy_mj", "sm_clock_mhz"))
    blank |= dict.fromkeys(("power_w", "temperature_c", "power_violation_ns", "sync_boost_violation_ns"))
    ticks = [a_ramp_tick(second) for second in range(RAMP.stop)]
    ticks[-6:] = [
        msgspec.structs.replace(tick, devices=[msgspec.structs.replace(lost, uuid=tick.devices[0].uuid, **blank)])
        for tick in ticks[-6:]
    ]
    write_lines(directory / "telemetry.jsonl", ticks)
    text = conditions_text(directory, 110)
    assert text.startswith("no reading of GPU 0")
    assert "J/step" not in text


def test_readings_that_were_not_had_are_not_guessed(home: Home, hold: Lock) -> None:
    directory = live_ramp(home, hold, RAMP.stop)
    silent = {"throttle_reasons": None, "thermal_violation_ns": None, "energy_mj": None, "sm_clock_mhz": None}
    ticks = [a_ramp_tick(second) for second in range(RAMP.stop)]
    mute = [
        msgspec.structs.replace(
            tick, devices=[msgspec.structs.replace(tick.devices[0], power_w=None, temperature_c=None, **silent)]
        )
        for tick in ticks
    ]
    write_lines(directory / "telemetry.jsonl", mute)
    assert conditions_text(directory, 110).startswith("throttling unknown   steady so far")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("data_wait_fraction", 0.314, "31.4 %"),
        ("thermal_ms_per_step", 12.34, "12.3 ms a step"),
        ("foreign_memory_bytes", 2**30, "1.00 GiB"),
        ("temperature_c", 91, "91 °C"),
        ("workers", 2, "2"),
        ("link", "SYS", "SYS"),
        ("power_w", None, "–"),
    ],
)
def test_a_figure_is_shown_with_the_unit_of_its_name(name: str, value: float | str | None, text: str) -> None:
    assert figure_text(name, value) == text
    assert not figure_name(name).endswith(("_bytes", " ms"))
