"""How long a GPU without duration counters was throttled: its reasons looked at several times between two ticks."""

from __future__ import annotations

from collections.abc import Iterable

from trainfast_runner.machine.telemetry.throttle_causes import CAUSES

LONGEST_NS = 5_000_000_000
"""Two looks further apart say nothing of the time between them."""


class SampledReasons:
    """Adds up, by cause, how long its reasons were shown; where one look shows them and the next does not, half of the
    time between. What it says grows as a counter of the driver would."""

    def __init__(self) -> None:
        self._held_ns = {cause.name: 0 for cause in CAUSES}
        self._last: tuple[int, frozenset[str]] | None = None

    def see(self, reasons: Iterable[str], t_ns: int) -> None:
        """Take a look at CLOCK_MONOTONIC `t_ns`."""
        now = frozenset(reasons)
        before, self._last = self._last, (t_ns, now)
        if before is None or not 0 < t_ns - before[0] <= LONGEST_NS:
            return
        for cause in CAUSES:
            ends = bool(cause.reasons & before[1]) + bool(cause.reasons & now)
            self._held_ns[cause.name] += (t_ns - before[0]) * ends // 2

    def held_ns(self) -> dict[str, int]:
        """Nanoseconds by cause, since the GPU was first looked at."""
        return dict(self._held_ns)
