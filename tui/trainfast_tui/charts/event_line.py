"""The events under the charts, on their time axis, and the words of one of them."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_tui.charts.time_axis import TimeAxis, cell_axis
from trainfast_tui.painting.painted import PaintedWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.event_words import DescribedEvent
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.lines import Line, Piece, join_pieces

EARLIER_KEY = key_of("main", "ChartColumn.event(-1)")
TONES_BY_IMPORTANCE = ("error", "warning", "success", "accent", "primary", "muted")
"""Tones, the most important first: of several events in one cell its sign is shown."""


class EventLine(PaintedWidget):
    """Two rows: signs on the axis, and the words of the newest or chosen event; in one row only the words."""

    DEFAULT_CSS = "EventLine { height: 2; }"

    def __init__(self, *, gutter: int) -> None:
        super().__init__()
        self._gutter = gutter
        self._events: Sequence[DescribedEvent] = ()
        self._axis: TimeAxis | None = None
        self._chosen: DescribedEvent | None = None

    def show_events(self, events: Sequence[DescribedEvent], axis: TimeAxis) -> None:
        """Show these events; those before the axis have no sign but can be chosen."""
        self._axis = axis
        self._events = [event for event in events if event.t_ns <= axis.end_ns]
        if self._chosen not in self._events:
            self._chosen = None
        self.repaint()

    @property
    def chosen_ns(self) -> int | None:
        """The time of the chosen event (CLOCK_MONOTONIC); None while the newest is followed."""
        return self._chosen.t_ns if self._chosen is not None else None

    def move(self, by: int) -> str:
        """Choose an earlier (-1) or later (1) event, past the last none, and return its words."""
        events = self._events
        if not events:
            return "No events in this time."
        index = len(events) - 1 if self._chosen is None else events.index(self._chosen)
        index_after = index + by if self._chosen is not None or by > 0 else index
        if index_after >= len(events):
            self._chosen = None
            words = "The newest event is shown as it comes."
        else:
            self._chosen = events[max(0, index_after)]
            words = self._chosen.words
        self.repaint()
        return words

    def lines(self, width: int, height: int) -> list[Line]:
        axis = self._axis
        if axis is None:
            return []
        return [self._signs(axis, width), self._words(axis)] if height > 1 else [self._words(axis)]

    def _signs(self, axis: TimeAxis, width: int) -> Line:
        cells = cell_axis(width, self._gutter, axis)
        signs: list[Piece] = [("─", "muted")] * cells.count
        for event in sorted(self._events, key=lambda event: -TONES_BY_IMPORTANCE.index(event.tone)):
            cell = min(cells.cell_of(event.t_ns), cells.count - 1)
            if cell >= 0:
                signs[cell] = event.sign, event.tone
        if self._chosen is not None and 0 <= (cell := cells.cell_of(self._chosen.t_ns)) < cells.count:
            signs[cell] = self._chosen.sign, "cursor"
        label = fmt.to_width("events", cells.gutter - 2, "right") + " ├" if cells.gutter else ""
        return [(label, "muted"), *join_pieces(signs), ("", "text")]

    def _words(self, axis: TimeAxis) -> Line:
        indent = " " * (self._gutter - 6)
        if not self._events:
            return [(f"{indent}no events", "muted")]
        event = self._chosen or self._events[-1]
        ago = fmt.duration(max(0.0, (axis.end_ns - event.t_ns) / 1e9))
        time_words = f"{ago} ago" if axis.is_live else f"{ago} before the end"
        number = self._events.index(event) + 1
        return [
            (f"{indent}{event.sign}  ", event.tone),
            (f"{time_words}  ", "muted"),
            (event.words, "text"),
            (f"  {number} of {len(self._events)}, {EARLIER_KEY} earlier" if len(self._events) > 1 else "", "muted"),
        ]
