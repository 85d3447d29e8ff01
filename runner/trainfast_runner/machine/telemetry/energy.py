"""The energy counter beside power times time: where the two are far apart, neither is a measurement."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MOST_APART = 2.0
LEAST_JOULES = 10.0
"""Half a second of a GPU at rest."""
STILL_S = 0.5
"""The driver brings the counter up to date several times as often."""
LEAST_S = 10.0
"""Power is an average over a second at best, on some GPUs a sample: over less time it is no measure."""
_STILL_SAMPLED_S = 3.0
_BLOCK_S = 30.0


def disagreement(counted_j: float, integrated_j: float, seconds: float) -> str | None:
    """The reason to distrust the counter; None if it agrees with power, or for want of time or energy."""
    low, high = sorted((counted_j, integrated_j))
    enough_s = STILL_S if counted_j == 0 else LEAST_S
    if seconds < enough_s or high < LEAST_JOULES or high <= MOST_APART * low:
        return None
    return (
        f"the energy counter says {counted_j:,.0f} J in {seconds:.1f} s,"
        f" but {integrated_j / seconds:,.0f} W of power make {integrated_j:,.0f} J"
    )


def energy_doubt(samples: Sequence[tuple[int, object]]) -> str | None:
    """The reason to distrust one device's energy counter over these samples; None if it agrees with the power.

    A sample is its time in ns and a reading with `energy_mj` and `power_w`; older records lack either.
    """
    counted_j = integrated_j = seconds = 0.0
    for (t0_ns, before), (t1_ns, now) in itertools.pairwise(samples):
        mj0, mj1 = getattr(before, "energy_mj", None), getattr(now, "energy_mj", None)
        w0, w1 = getattr(before, "power_w", None), getattr(now, "power_w", None)
        if mj0 is None or mj1 is None or w0 is None or w1 is None:
            continue
        counted_j += max(0.0, mj1 - mj0) / 1e3
        integrated_j += (w0 + w1) / 2 * (t1_ns - t0_ns) / 1e9
        seconds += (t1_ns - t0_ns) / 1e9
    return disagreement(counted_j, integrated_j, seconds)


class EnergyCounter:
    """Guards a GPU's energy counter as its readings come in; once distrusted it stays so."""

    def __init__(self) -> None:
        self.distrust: str | None = None
        """Why the counter is no longer believed, or None."""
        self._last: tuple[int, int, float] | None = None
        self._counted_j = self._integrated_j = self._seconds = 0.0

    def accept(self, energy_mj: int, power_w: float | None, t_ns: int) -> int | None:
        """The counter's value, or None once it is distrusted."""
        if power_w is None:
            self._last = None
            return None if self.distrust else energy_mj
        before, self._last = self._last, (t_ns, energy_mj, power_w)
        if before is not None and energy_mj >= before[1] and t_ns > before[0]:
            seconds = (t_ns - before[0]) / 1e9
            self._seconds += seconds
            self._counted_j += (energy_mj - before[1]) / 1e3
            self._integrated_j += (power_w + before[2]) / 2 * seconds
            self._judge()
        return None if self.distrust else energy_mj

    def _judge(self) -> None:
        is_still = self._counted_j == 0 and self._seconds >= _STILL_SAMPLED_S
        if is_still or self._seconds >= _BLOCK_S:
            self.distrust = self.distrust or disagreement(self._counted_j, self._integrated_j, self._seconds)
        if self._seconds >= _BLOCK_S:
            self._counted_j = self._integrated_j = self._seconds = 0.0
