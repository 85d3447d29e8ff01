"""Waiting for a GPU to cool, on readings that come one a look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import stand_in

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cooling import STUCK_S, cooling, stuck_text
from trainfast_runner.records.home import Home
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.conducting import search_runs
from trainfast_runner.search.conducting.cool_down import check_coolable, cool_down
from trainfast_runner.search.conducting.search_runs import SearchRuns
from trainfast_runner.search.journal.lines import CoolingDown
from trainfast_runner.search.options import SearchOptions


def looks(*temperatures: int | None) -> Callable[[], tuple[list[DeviceReading], dict[str, str]]]:
    """The watched GPU 1 at these temperatures, the last for ever, beside a GPU nobody watches."""
    left = list(temperatures)

    def look() -> tuple[list[DeviceReading], dict[str, str]]:
        now = left.pop(0) if len(left) > 1 else left[0]
        return [
            DeviceReading(index=0, uuid="GPU-0", temperature_c=99),
            DeviceReading(index=1, uuid="GPU-1", temperature_c=now),
        ], {}

    return look


def ticking(step_s: float) -> Callable[[], float]:
    now = [0.0]

    def clock() -> float:
        now[0] += step_s
        return now[0]

    return clock


def test_it_counts_down_until_every_watched_gpu_is_below() -> None:
    seen = list(cooling({"GPU-1"}, 60, looks(63, 61, 60, 59), ticking(1)))
    assert [(look.index, look.temperature_c, look.waited_s) for look in seen] == [(1, 63, 1), (1, 61, 2), (1, 60, 3)]


def test_a_temperature_that_stands_still_is_shown_from_twenty_seconds_on() -> None:
    seen = list(cooling({"GPU-1"}, 50, looks(61, 60, 61, 60, 49), ticking(15)))
    assert [look.stuck_s for look in seen] == [0, 0, 15, 30]
    assert [stuck_text(look.stuck_s) for look in seen] == [
        *("", "", ""),
        "; it has not fallen for 30 s; giving up after 180 s",
    ]


def test_a_gpu_that_is_cool_is_not_waited_for() -> None:
    assert list(cooling({"GPU-1"}, 60, looks(40), ticking(1))) == []


def test_a_gpu_that_cools_no_further_is_not_waited_for_for_ever() -> None:
    with pytest.raises(UserError, match=r"GPU 1 does not get below 58 °C, after \d+ min") as raised:
        list(cooling({"GPU-1"}, 55, looks(63, 58, 59, 58), ticking(STUCK_S / 10)))
    assert raised.value.line().endswith("; try --cool-to 59")
    assert raised.value.line().startswith("--cool-to 55: GPU 1 does not")
    screen = raised.value.line_without_option()
    assert (screen.startswith("GPU 1 does not"), screen.endswith("; try 59 °C or more")) == (True, True)


@pytest.mark.parametrize("uuids", [set(), {"GPU-7"}])
def test_without_a_temperature_it_says_so(uuids: set[str]) -> None:
    with pytest.raises(UserError, match="there is no temperature to wait for"):
        list(cooling(uuids, 55, looks(63), ticking(1)))


@pytest.mark.parametrize("below_c", [float("nan"), float("inf"), -5.0, 500.0])
def test_a_temperature_nobody_can_wait_for_is_refused(below_c: float) -> None:
    with pytest.raises(UserError, match="is not a temperature to wait for"):
        list(cooling({"GPU-1"}, below_c, looks(63), ticking(1)))


def a_plan(*uuids: str) -> RunPlan:
    return cast("RunPlan", SimpleNamespace(watched_uuids=set(uuids)))


def test_a_search_writes_each_degree_down_until_its_gpus_are_cool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfast_runner.machine.cooling.POLL_S", 0)
    gpu = stand_in.Gpu(uuid="GPU-0", temperature=57)
    lines: list[CoolingDown] = []

    def write(line: CoolingDown) -> None:
        lines.append(line)
        gpu.temperature -= 1

    with stand_in.installed(stand_in.Machine([gpu])):
        cool_down(a_plan("GPU-0"), 55, write, lambda: None)
        assert [(line.device, line.temperature_c, line.below_c) for line in lines] == [
            (0, 57, 55),
            (0, 56, 55),
            (0, 55, 55),
        ]
        cool_down(a_plan("GPU-0"), None, write, lambda: None)
    assert len(lines) == 3


def test_a_search_that_is_cancelled_waits_no_longer() -> None:
    class Cancelled(Exception):
        pass

    def check() -> None:
        raise Cancelled

    with stand_in.installed(stand_in.Machine(stand_in.gpus(1))), pytest.raises(Cancelled):
        cool_down(a_plan("GPU-0"), 30, lambda line: None, check)


def test_a_search_without_a_temperature_to_wait_for_is_refused_before_it_begins() -> None:
    with stand_in.installed(stand_in.Machine([])), pytest.raises(UserError, match="no temperature to wait for"):
        check_coolable(a_plan(), 55)
    check_coolable(a_plan(), None)


def test_the_clock_of_a_search_stands_still_while_gpus_cool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now_s = [0.0]

    def cool_for_a_minute(*args: object) -> None:
        now_s[0] += 60

    def launch_in_two_seconds(*args: object) -> Path:
        now_s[0] += 2
        return tmp_path

    monkeypatch.setattr(search_runs, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(search_runs, "cool_down", cool_for_a_minute)
    monkeypatch.setattr(search_runs, "replace", lambda plan, **fields: plan)
    monkeypatch.setattr(search_runs.launch, "start", launch_in_two_seconds)
    runs = SearchRuns(Home(tmp_path), SearchOptions(), lambda line: None, lambda: None)
    began_s = runs.clock_s()
    runs.start(cast(RunPlan, SimpleNamespace()), "trial")
    assert runs.clock_s() - began_s == 2
