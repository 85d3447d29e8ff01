"""The conditions of each GPU in the last minute, from its counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfast_runner.records.tick import Tick
from trainfast_runner.results.device_conditions import DeviceConditions, StepJoin

MINUTE_NS = 60_000_000_000
JOIN_EVERY_NS = 900_000_000
"""Shares of a minute in whole percent need no more than a sample a second."""
TICKS_KEPT = 300
"""More than the joined ticks of two minutes."""


class LastMinute:
    """Joins the newest ticks, about one a second."""

    def __init__(self) -> None:
        self._join: StepJoin | None = None
        self._uuids: tuple[str, ...] = ()
        self._joined_ns = 0
        """Time of the newest joined tick."""
        self._conditions: dict[str, DeviceConditions] = {}

    def update(self, ticks: Sequence[Tick]) -> dict[str, DeviceConditions]:
        """Return the conditions in the minute up to the last of these ticks, by UUID; empty without GPUs."""
        if not ticks or not ticks[-1].devices:
            return {}
        uuids = tuple(device.uuid for device in ticks[-1].devices if device.uuid)
        if self._join is None or not set(uuids) <= set(self._uuids):
            self._join, self._uuids, self._joined_ns = StepJoin(uuids, keep=TICKS_KEPT), uuids, 0
        if ticks[-1].t_ns - self._joined_ns < JOIN_EVERY_NS:
            return self._conditions
        for tick in reversed([*self._unjoined(ticks)]):
            if tick.t_ns - self._joined_ns >= JOIN_EVERY_NS:
                self._join.add_tick(tick.t_ns, tick.devices)
                self._joined_ns = tick.t_ns
        conditions = self._join.conditions_between(self._joined_ns - MINUTE_NS, self._joined_ns)
        self._conditions = {device.uuid: device for device in conditions if device.uuid is not None}
        return self._conditions

    def _unjoined(self, ticks: Sequence[Tick]) -> Iterator[Tick]:
        """Yield the ticks of the last two minutes that were not joined yet, newest first."""
        for tick in reversed(ticks):
            if tick.t_ns <= self._joined_ns or tick.t_ns < ticks[-1].t_ns - 2 * MINUTE_NS:
                return
            yield tick
