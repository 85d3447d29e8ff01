"""Duration counters of the driver, believed only while they behave like durations."""

_SLACK_NS = 1_000_000_000
"""Nanoseconds that a counter may grow beyond the elapsed time: the driver updates these counters in steps."""
_ROUNDING_NS = 1_000_000
"""Chosen, not measured: nanoseconds that a counter may step back, kept in coarser units or in floating point."""
_STUCK_NS = 5_000_000_000
"""Chosen, not measured: time with the bit set and no growth after which a counter counts as standing still."""
_UNSEEN_NS = 10_000_000_000
_UNSEEN_SHARE = 0.9
"""Chosen, not measured: a counter that grows for this share of `_UNSEEN_NS` without its bit counts something else."""


class DurationCounter:
    """Guards a nanosecond counter whose field number means something else in other drivers.

    A counter is distrusted if it runs backwards, grows faster than time, stands still while the throttle bits are set,
    or (if `moved`) runs while they never are.
    """

    def __init__(self, *, moved: bool = False) -> None:
        """`moved`: the counter's number is one that other drivers use for other things."""
        self._moved = moved
        self.distrust: str | None = None
        """The reason to distrust the counter, or None."""
        self.suspect = False
        """True if the counter stood still while its throttle bits were set; growth clears it."""
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None
        self._was_throttled: bool | None = None
        self._stuck_ns = self._unseen_ns = self._unseen_grown_ns = 0

    def accept(self, value_ns: int, t_ns: int, throttled: bool | None) -> int | None:
        """The counter's value, or None once it is distrusted.

        `throttled` is True if the sampled bits show the counter's policy; None without bits.
        """
        if self._first is None or self._last is None:
            self._first = self._last = (t_ns, value_ns)
            self._was_throttled = throttled
            return value_ns
        if value_ns == self._last[1] and throttled is False and self._was_throttled is False:
            # The usual case, for every counter of every GPU once a second.
            self._unseen_ns += t_ns - self._last[0]
            self._last = (t_ns, value_ns)
            return None if self.distrust else value_ns
        if 0 < self._last[1] - value_ns < _ROUNDING_NS:
            value_ns = self._last[1]
        grown_ns, passed_ns = value_ns - self._last[1], t_ns - self._last[0]
        self._compare(grown_ns, passed_ns, throttled)
        if grown_ns < 0:
            self.distrust = "this driver's counter runs backwards"
        elif value_ns - self._first[1] > t_ns - self._first[0] + _SLACK_NS:
            self.distrust = "this driver's counter grows faster than time passes"
        elif self._stuck_ns > _STUCK_NS:
            self.distrust = "this driver's counter stands still while the GPU reports throttling"
        elif self._moved and self._unseen_ns > _UNSEEN_NS and self._unseen_grown_ns > _UNSEEN_SHARE * self._unseen_ns:
            self.distrust = "this driver's counter runs all the time although the GPU never reports throttling"
        self._last = (t_ns, value_ns)
        return None if self.distrust else value_ns

    def _compare(self, grown_ns: int, passed_ns: int, throttled: bool | None) -> None:
        """Sum the intervals whose bits at both ends contradict the counter."""
        both_on = throttled is True and self._was_throttled is True
        both_off = throttled is False and self._was_throttled is False
        self.suspect = grown_ns == 0 and (self.suspect or throttled is True or self._was_throttled is True)
        # Several short contradictions count together: only growth clears them.
        if grown_ns:
            self._stuck_ns = 0
        elif both_on:
            self._stuck_ns += passed_ns
        self._unseen_ns = self._unseen_ns + passed_ns if both_off else 0
        self._unseen_grown_ns = self._unseen_grown_ns + grown_ns if both_off else 0
        self._was_throttled = throttled
