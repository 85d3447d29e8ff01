"""Waiting for a GPU to cool, on readings that come one a look."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainfast_runner.cooling import STUCK_S, cooling
from trainfast_runner.problem import Problem
from trainfast_runner.telemetry.readings import DeviceReading


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


def test_a_gpu_that_is_cool_is_not_waited_for() -> None:
    assert list(cooling({"GPU-1"}, 60, looks(40), ticking(1))) == []


def test_a_gpu_that_cools_no_further_is_not_waited_for_for_ever() -> None:
    with pytest.raises(Problem, match=r"GPU 1 does not get below 58 °C, after \d+ min") as raised:
        list(cooling({"GPU-1"}, 55, looks(63, 58, 59, 58), ticking(STUCK_S / 10)))
    assert raised.value.advice == "--cool-to 59"


@pytest.mark.parametrize("uuids", [set(), {"GPU-7"}])
def test_without_a_temperature_it_says_so(uuids: set[str]) -> None:
    with pytest.raises(Problem, match="there is no temperature to wait for"):
        list(cooling(uuids, 55, looks(63), ticking(1)))


@pytest.mark.parametrize("below_c", [float("nan"), float("inf"), -5.0, 500.0])
def test_a_temperature_nobody_can_wait_for_is_refused(below_c: float) -> None:
    with pytest.raises(Problem, match="no temperature to wait for"):
        list(cooling({"GPU-1"}, below_c, looks(63), ticking(1)))
