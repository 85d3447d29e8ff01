"""A rate over time, constant between breakpoints, and its mean over any window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

MIN_COVERED = 0.5
"""Share of a window that samples must cover for a figure of the whole window."""


class Rate:
    """A rate over time, constant from one breakpoint to the next; None while it is unknown."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._rates: list[float | None] = []
        """The rate up to each of the breakpoints."""
        self._before: float | None = None
        self._after: float | None = None

    def begin(self, t_ns: int) -> None:
        """Set the first breakpoint."""
        self._ends.append(t_ns)
        self._rates.append(None)

    def grow(self, until_ns: int, rate: float | None) -> None:
        """Go on at `rate` up to this time."""
        if until_ns > self._ends[-1]:
            self._ends.append(until_ns)
            self._rates.append(rate)

    def extend_ends(self, rate: float | None, *, is_first: bool) -> None:
        """Set the rate after the newest sample, and before the first; None: as in the nearest interval."""
        self._before = rate if is_first else self._before
        self._after = rate

    def mean(self, begin_ns: int, end_ns: int, window_ns: int) -> float | None:
        """Mean over the known time between two moments; None if less than `MIN_COVERED` of the window is known."""
        if len(self._ends) < 2:
            return None
        known_ns, amount, at_ns = 0, 0.0, begin_ns
        for index in range(bisect_right(self._ends, begin_ns), bisect_left(self._ends, end_ns) + 1):
            until_ns = min(end_ns, self._ends[index]) if index < len(self._ends) else end_ns
            if (rate := self._rate(index)) is not None:
                known_ns += until_ns - at_ns
                amount += rate * (until_ns - at_ns)
            at_ns = until_ns
        return None if known_ns <= 0 or known_ns < MIN_COVERED * window_ns else amount / known_ns

    def forget(self, before_ns: int) -> None:
        """Drop all breakpoints before this one."""
        count = bisect_left(self._ends, before_ns)
        del self._ends[:count], self._rates[:count]
        self._before = None

    def _rate(self, index: int) -> float | None:
        """The rate up to a breakpoint; before the first and after the last one the `extend_ends` rates."""
        if 0 < index < len(self._ends):
            return self._rates[index]
        nearest, beyond = (self._rates[1], self._before) if index == 0 else (self._rates[-1], self._after)
        return nearest if nearest is None or beyond is None else beyond
