"""The scenario file of the stand-in GPUs, read in Python: the truth at each moment, for tests to compare with.

`scenario.h` describes the file. The compiled library and the Python stand-in follow the same one, with the same times.
"""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

SW_POWER_CAP, SYNC_BOOST, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x4, 0x10, 0x20, 0x40, 0x80
THERMAL = SW_THERMAL | HW_THERMAL
IDLE_POWER_W = 80.0


@dataclass(frozen=True)
class Moment:
    """A line of a ramp: the readings from a second on."""

    at_s: float
    temperature_c: float
    reasons: int = 0x1
    power_w: float = IDLE_POWER_W
    sm_mhz: int = 345


@dataclass
class Scenario:
    """The ramps of the GPUs on one time base: seconds since `origin_ns` of CLOCK_MONOTONIC."""

    origin_ns: int
    period_s: float = 0.0
    ramps: dict[int, list[Moment]] = field(default_factory=dict)
    also: list[str] = field(default_factory=list)
    """Other statements of the file, as they stand in it."""

    def now_s(self) -> float:
        """The present second of the scenario."""
        return (time.monotonic_ns() - self.origin_ns) / 1e9

    def at(self, gpu: int, seconds: float) -> Moment:
        """The GPU's readings at that second: the temperature in between two lines, the rest of the earlier one."""
        seconds = self._in_ramp(seconds)
        now = Moment(0, 40 + gpu)
        for line, after in zip(self._ramp(gpu), [*self._ramp(gpu)[1:], None], strict=True):
            if line.at_s > seconds:
                break
            share = (seconds - line.at_s) / (after.at_s - line.at_s) if after else 0.0
            warmer = (after.temperature_c - line.temperature_c) * share if after else 0.0
            now = Moment(line.at_s, line.temperature_c + warmer, line.reasons, line.power_w, line.sm_mhz)
        return now

    def held_s(self, gpu: int, bits: int, seconds: float) -> float:
        """Seconds of the first `seconds` in which any of the throttle `bits` was set."""
        seconds = max(0.0, seconds)
        laps = round((seconds - self._in_ramp(seconds)) / self.period_s) if self.period_s else 0
        whole = laps * self._held_s(gpu, bits, self.period_s) if laps else 0.0
        return whole + self._held_s(gpu, bits, self._in_ramp(seconds))

    def fraction(self, gpu: int, bits: int, begin_ns: int, end_ns: int) -> float:
        """The share of the span between two CLOCK_MONOTONIC moments in which any of the bits was set."""
        begin, end = ((moment - self.origin_ns) / 1e9 for moment in (begin_ns, end_ns))
        return (self.held_s(gpu, bits, end) - self.held_s(gpu, bits, begin)) / (end - begin)

    def text(self) -> str:
        """The file for `NVML_STAND_IN_SCENARIO`."""
        lines = [f"origin {self.origin_ns}", f"period {self.period_s:g}"]
        lines += [
            f"ramp {gpu} {m.at_s:g} {m.temperature_c:g} {m.reasons:x} {m.power_w:g} {m.sm_mhz}"
            for gpu, ramp in self.ramps.items()
            for m in ramp
        ]
        return "\n".join([*lines, *self.also]) + "\n"

    def write(self, path: Path) -> Path:
        """The file at `path`."""
        # Renamed into its place, so that nobody reads half of it.
        half = path.with_name(f".{path.name}")
        half.write_text(self.text())
        half.rename(path)
        return path

    def _ramp(self, gpu: int) -> list[Moment]:
        return self.ramps.get(gpu, [])

    def _in_ramp(self, seconds: float) -> float:
        return math.fmod(seconds, self.period_s) if self.period_s and seconds > 0 else seconds

    def _held_s(self, gpu: int, bits: int, to_s: float) -> float:
        ramp = self._ramp(gpu)
        ends = [after.at_s for after in ramp[1:]] + [to_s]
        lengths = [(line, min(end, to_s) - max(0.0, line.at_s)) for line, end in zip(ramp, ends, strict=True)]
        return sum(length for line, length in lengths if length > 0 and line.reasons & bits)


def thermal_ramp(period_s: float = 8.0, gpu: int = 0) -> Scenario:
    """A GPU that heats up, is slowed down by software at 87 degrees for 3/8 of the time, and cools; again and again.

    The origin is now. 300 W and 1980 MHz while it is free, 220 W and 1200 MHz while it is slowed down.
    """
    eighth = period_s / 8
    return Scenario(
        origin_ns=time.monotonic_ns(),
        period_s=period_s,
        ramps={
            gpu: [
                Moment(0, 70, 0, 300, 1980),
                Moment(2 * eighth, 87, SW_THERMAL, 220, 1200),
                Moment(4 * eighth, 90, SW_THERMAL, 220, 1200),
                Moment(5 * eighth, 86, 0, 300, 1980),
                Moment(8 * eighth, 70, 0, 300, 1980),
            ]
        },
    )
