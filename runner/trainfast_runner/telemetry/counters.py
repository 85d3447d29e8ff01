"""Duration counters of the driver, believed only while they behave like durations."""

_SLACK_NS = 1_000_000_000
"""The driver brings these counters up to date in steps, so one reading may catch up on an earlier one."""
_STUCK_NS = 5_000_000_000


class DurationCounter:
    """Guards a nanosecond counter whose field number means other things in other drivers, with SUCCESS.

    A counter that runs backwards, grows faster than the clock on the wall, or stands still while the throttle
    bits say that it must run, is not what it claims to be and is given up for good.
    """

    def __init__(self) -> None:
        self.distrust: str | None = None
        """Why the counter is no longer believed, or None."""
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None
        self._stuck_ns = 0

    def accept(self, value_ns: int, t_ns: int, throttled: bool) -> int | None:
        """The counter's value, or None once it is distrusted.

        `throttled` says whether the sampled bits show the policy this counter measures.
        """
        if self._first is None or self._last is None:
            self._first = self._last = (t_ns, value_ns)
            return value_ns
        grown, passed = value_ns - self._last[1], t_ns - self._last[0]
        self._stuck_ns = self._stuck_ns + passed if throttled and grown == 0 else 0
        if grown < 0:
            self.distrust = "this driver's counter runs backwards"
        elif value_ns - self._first[1] > t_ns - self._first[0] + _SLACK_NS:
            self.distrust = "this driver's counter grows faster than time passes"
        elif self._stuck_ns > _STUCK_NS:
            self.distrust = "this driver's counter stands still while the GPU says it is throttled"
        self._last = (t_ns, value_ns)
        return None if self.distrust else value_ns
