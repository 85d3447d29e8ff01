"""A rate over time, constant between breakpoints, and its mean over any window."""

from __future__ import annotations

from bisect import bisect_left

MIN_COVERED = 0.5
"""Share of a window that samples must cover for a figure of the whole window."""


class Rate:
    """A rate over time, constant from one breakpoint to the next; None while it is unknown."""

    def __init__(self) -> None:
        self._breakpoints_ns: list[int] = []
        self._rates: list[float | None] = []
        """The rate up to each of the breakpoints."""
        self._known_ns: list[int] = []
        self._integrals: list[float] = []
        """Known time up to each of the breakpoints, and the rate times that time: a mean needs no sum over samples."""
        self._rate_before: float | None = None
        self._rate_after: float | None = None

    def begin(self, t_ns: int) -> None:
        """Set the first breakpoint."""
        self._append(t_ns, None, 0, 0.0)

    def grow(self, until_ns: int, rate: float | None) -> None:
        """Go on at `rate` up to this time."""
        if until_ns > self._breakpoints_ns[-1]:
            self._append(until_ns, rate, *self._until(until_ns, len(self._breakpoints_ns) - 1, rate))

    def extend_ends(self, rate: float | None, *, is_first: bool) -> None:
        """Set the rate after the newest sample, and before the first; None: as in the nearest interval."""
        self._rate_before = rate if is_first else self._rate_before
        self._rate_after = rate

    def mean(self, begin_ns: int, end_ns: int, window_ns: int) -> float | None:
        """Mean over the known time between two moments; None if less than `MIN_COVERED` of the window is known."""
        if len(self._breakpoints_ns) < 2:
            return None
        (known_before_ns, integral_before), (known_ns, integral) = map(self._integral, (begin_ns, end_ns))
        known_ns -= known_before_ns
        is_covered = known_ns > 0 and known_ns >= MIN_COVERED * window_ns
        return (integral - integral_before) / known_ns if is_covered else None

    def forget(self, before_ns: int) -> None:
        """Drop all breakpoints before this one."""
        count = bisect_left(self._breakpoints_ns, before_ns)
        for values in (self._breakpoints_ns, self._rates, self._known_ns, self._integrals):
            del values[:count]
        self._rate_before = None

    def _append(self, t_ns: int, rate: float | None, known_ns: int, integral: float) -> None:
        self._breakpoints_ns.append(t_ns)
        self._rates.append(rate)
        self._known_ns.append(known_ns)
        self._integrals.append(integral)

    def _integral(self, t_ns: int) -> tuple[int, float]:
        """Known ns up to `t_ns`, and the integral over them; only the difference of two calls has a meaning."""
        index = bisect_left(self._breakpoints_ns, t_ns)
        return self._until(t_ns, max(0, index - 1), self._rate(index))

    def _until(self, t_ns: int, index: int, rate: float | None) -> tuple[int, float]:
        """Known ns and integral at `t_ns`, continued at `rate` from the breakpoint `index`."""
        known_ns = 0 if rate is None else t_ns - self._breakpoints_ns[index]
        return self._known_ns[index] + known_ns, self._integrals[index] + (rate or 0.0) * known_ns

    def _rate(self, index: int) -> float | None:
        """The rate up to a breakpoint; before the first and after the last one the `extend_ends` rates."""
        if 0 < index < len(self._breakpoints_ns):
            return self._rates[index]
        nearest_rate, outer_rate = (
            (self._rates[1], self._rate_before) if index == 0 else (self._rates[-1], self._rate_after)
        )
        return nearest_rate if nearest_rate is None or outer_rate is None else outer_rate
