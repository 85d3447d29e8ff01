"""A stream of records in bounded memory: all of them up to a bound, from there on an even share."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

ENDS = 100
"""Number of records at the start and at the end of a stream that are always kept."""
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: its multiples are spread evenly and share no period with the records."""


class Thinned(Generic[T]):
    """Keeps the `ENDS` first and last records of a stream, and at most `max_entries` of those between.

    Every time there are more than that, half of them go. Which ones stay depends on their numbers alone, so that
    streams thinned to the same `level` keep the same numbers: one in `2 ** level`.
    """

    def __init__(self, max_entries: int) -> None:
        self.total = 0
        self.level = 0
        self._max_entries = max_entries
        self._first: list[T] = []
        self._between: list[tuple[int, T]] = []
        self._last: deque[tuple[int, T]] = deque()

    def add(self, number: int, record: T) -> None:
        """Add the stream's next record."""
        self.total += 1
        if len(self._first) < ENDS:
            self._first.append(record)
            return
        self._last.append((number, record))
        if len(self._last) <= ENDS:
            return
        earlier = self._last.popleft()
        if _stays(earlier[0], self.level):
            self._between.append(earlier)
        while len(self._between) > self._max_entries:
            self.thin_to(self.level + 1)

    def thin_to(self, level: int) -> None:
        """Drop the records between the ends that this level does not keep."""
        if level > self.level:
            self.level = level
            self._between = [entry for entry in self._between if _stays(entry[0], level)]

    def records(self) -> list[T]:
        """The records that are left, in their order."""
        return [*self._first, *(record for _, record in (*self._between, *self._last))]


def _stays(number: int, level: int) -> bool:
    """True for one number in `2 ** level`: the top bits of its golden-ratio hash are zero, an even share everywhere."""
    return (number * _GOLDEN % 2**64) >> (64 - level) == 0
