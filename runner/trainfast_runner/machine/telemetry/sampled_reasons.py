"""Throttled time of a GPU without duration counters, from its reasons read several times between two ticks."""

from __future__ import annotations

from collections.abc import Iterable

from trainfast_runner.machine.telemetry.throttle_causes import CAUSES

LONGEST_NS = 5_000_000_000
"""Two readings further apart are no measure of the time between them."""


class SampledReasons:
    """Sums, by cause, the time in which its reasons were shown; half of the time between a reading that shows them and
    one that does not. The sum grows as a counter of the driver would."""

    def __init__(self) -> None:
        self._held_ns = {cause.name: 0 for cause in CAUSES}
        self._last: tuple[int, frozenset[str]] | None = None

    def see(self, reasons: Iterable[str], t_ns: int) -> None:
        """Take the reasons at CLOCK_MONOTONIC `t_ns`."""
        now = frozenset(reasons)
        before, self._last = self._last, (t_ns, now)
        if before is None or not 0 < t_ns - before[0] <= LONGEST_NS:
            return
        for cause in CAUSES:
            ends = bool(cause.reasons & before[1]) + bool(cause.reasons & now)
            self._held_ns[cause.name] += (t_ns - before[0]) * ends // 2

    def held_ns(self) -> dict[str, int]:
        """Nanoseconds by cause, since the first reading."""
        return dict(self._held_ns)
