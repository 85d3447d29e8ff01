"""`--cool-to`: a run starts only when its GPUs are below a temperature, so that runs which are compared begin alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator
from contextlib import closing
from dataclasses import dataclass

from trainfast_runner.errors import UserError
from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.records.tick import DeviceReading

POLL_S = 1.0
"""Seconds between two readings."""
LONGEST_S = 1200.0
"""Chosen, not measured: seconds of the longest wait, also while the GPU still cools."""
STUCK_S = 180.0
"""Seconds without one degree less after which the GPU counts as getting no cooler."""
STUCK_NOTICE_S = 20.0
"""Seconds without one degree less after which the wait names the standstill."""
LOWEST_C, HIGHEST_C = 1.0, 120.0
"""Chosen, not measured: temperatures that `--cool-to` takes; no GPU runs outside of them."""

ReadDevices = Callable[[], tuple[list[DeviceReading], dict[str, str]]]
"""All readings now, and the reasons of the missing ones."""


@dataclass(frozen=True)
class Cooling:
    """One poll of GPUs that are still too warm: the hottest one, in degrees Celsius, and the seconds waited so far.

    `stuck_s` is the time since the temperature last fell.
    """

    index: int
    temperature_c: float
    below_c: float
    waited_s: float
    stuck_s: float = 0.0


def stuck_text(stuck_s: float) -> str:
    """A note if the temperature stands still; empty if it has fallen lately."""
    if stuck_s < STUCK_NOTICE_S:
        return ""
    return f"; it has not fallen for {stuck_s:.0f} s; giving up after {STUCK_S:.0f} s"


def cooling(
    uuids: Collection[str], below_c: float, read: ReadDevices | None = None, clock: Callable[[], float] = time.monotonic
) -> Generator[Cooling, None, None]:
    """One `Cooling` for each poll until every GPU is below `below_c`; wait `POLL_S` between two.

    Close it to give up. Raises UserError when there is no temperature to wait for, and when it does not fall any more.
    """
    if not (math.isfinite(below_c) and LOWEST_C <= below_c <= HIGHEST_C):
        raise UserError(
            f"{below_c:g} is not a temperature to wait for",
            key="--cool-to",
            where="--cool-to",
            allowed=[f"{LOWEST_C:g} to {HIGHEST_C:g} degrees Celsius"],
        )
    nvml = Nvml()
    read_devices = read or (lambda: nvml.sample(time.monotonic_ns()))
    began_s = best_since_s = clock()
    best_c = math.inf
    try:
        while True:
            readings, missing = read_devices()
            temperature_c, index = _hottest(uuids, readings, missing, below_c)
            now_s = clock()
            if temperature_c < below_c:
                return
            if temperature_c < best_c:
                best_c, best_since_s = temperature_c, now_s
            if now_s - best_since_s > STUCK_S or now_s - began_s > LONGEST_S:
                raise _does_not_cool(index, best_c, below_c, now_s - began_s)
            yield Cooling(index, temperature_c, below_c, now_s - began_s, now_s - best_since_s)
    finally:
        nvml.close()


def wait_until_cool(
    uuids: Collection[str],
    below_c: float,
    on_poll: Callable[[Cooling], None],
    wait: Callable[[float], bool | None] = time.sleep,
) -> bool:
    """Return True once every GPU is below `below_c`, False if `wait`, which gets seconds, returned True to give up.

    `on_poll` is called with each poll of a GPU that is still too warm. Raises UserError as `cooling`.
    """
    with closing(cooling(uuids, below_c)) as polls:
        for poll in polls:
            on_poll(poll)
            if wait(POLL_S):
                return False
    return True


def _hottest(
    uuids: Collection[str], readings: list[DeviceReading], missing: dict[str, str], below_c: float
) -> tuple[float, int]:
    """The highest temperature of these GPUs, and the index of its GPU. Raises UserError without a temperature."""
    temperatures = [
        (gpu.temperature_c, gpu.index) for gpu in readings if gpu.uuid in uuids and gpu.temperature_c is not None
    ]
    if not temperatures:
        reason = missing.get("nvml") or "the run watches no GPU that gives its temperature"
        raise UserError(
            f"there is no temperature to wait for: {reason}",
            key="--cool-to",
            where=f"--cool-to {below_c:g}",
            advice="starting without the wait",
            option="leaving --cool-to out, or naming a GPU with --set watch=0" if readings else "leaving --cool-to out",
        )
    return max(temperatures, key=lambda pair: pair[0])


def _does_not_cool(index: int, best_c: float, below_c: float, waited_s: float) -> UserError:
    return UserError(
        f"GPU {index} does not get below {best_c:g} °C, after {waited_s / 60:.0f} min",
        key="--cool-to",
        where=f"--cool-to {below_c:g}",
        advice=f"{best_c + 1:g} °C or more",
        option=f"--cool-to {best_c + 1:g}",
    )
