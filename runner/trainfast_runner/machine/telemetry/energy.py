"""The energy counter beside power times time: where the two are far apart, neither is a measurement."""

from __future__ import annotations

from collections.abc import Sequence

MAX_APART = 2.0
"""Chosen, not measured: from this factor between the counter's energy and power times time on, neither is believed."""
MIN_JOULES = 10.0
"""Least energy by which a counter is judged: half a second of a GPU at rest."""
STILL_S = 0.5
"""Seconds after which a counter that stands still is judged: the driver updates it several times as often."""
MIN_GROWING_S = 10.0
"""Least seconds over which a growing counter is judged: power is an average over a second at best, or a sample."""
_STILL_SAMPLED_S = 3.0
"""Chosen, not measured: seconds without growth after which the counter is judged."""
_BLOCK_S = 30.0
"""Chosen, not measured: seconds after which the counter is judged and a new sum begins."""


class EnergyBalance:
    """The energy counter's growth beside power times time, summed over consecutive readings that have both."""

    def __init__(self) -> None:
        self.counted_j = self.integrated_j = self.seconds = 0.0
        self._last: tuple[int, int, float] | None = None

    def add(self, t_ns: int, energy_mj: int | None, power_w: float | None) -> None:
        """Add a reading at `t_ns` (CLOCK_MONOTONIC); skip an interval in which the driver reset the counter."""
        previous = self._last
        self._last = None if energy_mj is None or power_w is None else (t_ns, energy_mj, power_w)
        if previous is None or self._last is None or self._last[1] < previous[1] or t_ns <= previous[0]:
            return
        seconds = (t_ns - previous[0]) / 1e9
        self.seconds += seconds
        self.counted_j += (self._last[1] - previous[1]) / 1e3
        self.integrated_j += (self._last[2] + previous[2]) / 2 * seconds

    def disagreement(self) -> str | None:
        """The reason to distrust the counter; None if it agrees with power, or too little was measured."""
        smaller_j, larger_j = sorted((self.counted_j, self.integrated_j))
        enough_s = STILL_S if self.counted_j == 0 else MIN_GROWING_S
        if self.seconds < enough_s or larger_j < MIN_JOULES or larger_j <= MAX_APART * smaller_j:
            return None
        return (
            f"the energy counter shows {self.counted_j:,.0f} J in {self.seconds:.1f} s,"
            f" but {self.integrated_j / self.seconds:,.0f} W over that time are {self.integrated_j:,.0f} J"
        )

    def clear(self) -> None:
        """Begin a new sum at the last reading."""
        self.counted_j = self.integrated_j = self.seconds = 0.0


def energy_distrust(samples: Sequence[tuple[int, object]]) -> str | None:
    """The reason to distrust one device's energy counter over these samples; None if it agrees with the power.

    A sample is its time in ns and a reading with `energy_mj` and `power_w`; either may be missing.
    """
    balance = EnergyBalance()
    for t_ns, reading in samples:
        balance.add(t_ns, getattr(reading, "energy_mj", None), getattr(reading, "power_w", None))
    return balance.disagreement()


class EnergyCounter:
    """Guards a GPU's energy counter as its readings come in; once distrusted it stays so."""

    def __init__(self) -> None:
        self.distrust: str | None = None
        """The reason to distrust the counter, or None."""
        self._balance = EnergyBalance()

    def accept(self, energy_mj: int, power_w: float | None, t_ns: int) -> int | None:
        """The counter's value, or None once it is distrusted."""
        balance = self._balance
        balance.add(t_ns, energy_mj, power_w)
        if (balance.counted_j == 0 and balance.seconds >= _STILL_SAMPLED_S) or balance.seconds >= _BLOCK_S:
            self.distrust = self.distrust or balance.disagreement()
        if balance.seconds >= _BLOCK_S:
            balance.clear()
        return None if self.distrust else energy_mj
