"""The column of charts: throughput on top, then as many device readings as fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical

from trainfast_tui.charts.chart_data import DEFAULT_WINDOW, GUTTER, WINDOWS_S, TimeAxis, cell_axis, time_axis
from trainfast_tui.charts.charted import device_charts, reading_names, throughput_chart
from trainfast_tui.charts.strip_chart import StripChart
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.event_words import DescribedEvent, events_of_run
from trainfast_tui.text.format import Line, Piece, join_pieces, moved_cursor
from trainfast_tui.text.keys import key_of

MAX_DEVICE_CHARTS = 4
MIN_CHART_ROWS = 6
"""The least height of a chart, in rows."""
MIN_ROWS_WITH_READING = 8
"""The least height for throughput and one reading, both low."""
REDRAW_AFTER_NS = 2_000_000_000
"""Redraw at least this often, also where a cell is many seconds."""
EVENT_ROWS_FROM = (9, 20)
"""Heights from which there is one row of events, and from which there are two."""


class ChartColumn(Vertical):
    """Charts on one time axis."""

    def __init__(self, *, with_run: bool = True) -> None:
        """Without `with_run` leave out throughput and events, for a machine without a run."""
        super().__init__()
        self._with_run = with_run
        self._snapshot: Snapshot | None = None
        self._window = DEFAULT_WINDOW
        self._drawn_axis: TimeAxis | None = None
        self._first_reading = 0
        self._in_tokens = False

    def compose(self) -> ComposeResult:
        yield StripChart(time_labels=False, id="throughput")
        # The lowest chart has the time labels of all; the first reading stands right below throughput.
        for index in reversed(range(MAX_DEVICE_CHARTS)):
            yield StripChart(time_labels=index == 0, id=f"device{index}", classes="-away" if index else "")
        if self._with_run:
            yield EventLine()

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Draw this snapshot unless redrawing would change less than one column."""
        before, self._snapshot = self._snapshot, snapshot
        if before is None or not self._is_up_to_date(before, snapshot):
            self.repaint()

    def _is_up_to_date(self, before: Snapshot, snapshot: Snapshot) -> bool:
        """True if redrawing would change less than one column."""
        if snapshot.run is not None and not snapshot.run.is_live:
            return before.run is snapshot.run  # an ended run has one last snapshot, again and again
        drawn_axis, axis, width = self._drawn_axis, time_axis(snapshot, self._window), self.size.width
        if drawn_axis is None or before.taken_ns == snapshot.taken_ns:
            return False
        if _run_directory(before) != _run_directory(snapshot):
            return False
        is_recent = axis.end_ns - drawn_axis.end_ns < REDRAW_AFTER_NS
        return is_recent and cell_axis(width, axis) == cell_axis(width, drawn_axis)

    def repaint(self) -> None:
        """Draw as many charts as fit."""
        snapshot, height = self._snapshot, self.size.height
        if snapshot is None or not height or not self.children:
            return
        axis = self._drawn_axis = time_axis(snapshot, self._window)
        cursor_ns = None
        if self._with_run:
            height -= self._show_events(snapshot, axis, height)
            cursor_ns = self.query_one(EventLine).chosen_ns
        fitting = self._fitting_device_charts(snapshot, height)
        devices = device_charts(snapshot, axis, self._first_reading, fitting)
        top = self.query_one("#throughput", StripChart)
        top.set_class(not self._with_run, "-away")
        if self._with_run:
            throughput = throughput_chart(snapshot, axis, used_uuids(snapshot.run), in_tokens=self._in_tokens)
            top.show_chart(replace(throughput, cursor_ns=cursor_ns))
        for index in range(MAX_DEVICE_CHARTS):
            chart = self.query_one(f"#device{index}", StripChart)
            chart.set_class(index >= fitting, "-away")
            if index < fitting:
                chart.show_chart(replace(devices[fitting - 1 - index], cursor_ns=cursor_ns))

    def _fitting_device_charts(self, snapshot: Snapshot, height: int) -> int:
        """Return the number of charts of device readings that fit in `height` rows."""
        fitting = min(len(reading_names(snapshot)), height // MIN_CHART_ROWS - self._with_run, MAX_DEVICE_CHARTS)
        return fitting if fitting > 0 else int(height >= MIN_ROWS_WITH_READING)

    def _show_events(self, snapshot: Snapshot, axis: TimeAxis, height: int) -> int:
        """Show the events and return the rows they take."""
        rows = sum(height >= least_height for least_height in EVENT_ROWS_FROM)
        line = self.query_one(EventLine)
        line.set_class(not rows, "-away")
        if rows:
            line.set_height(rows)
            line.show_events(events_of_run(snapshot.run), axis)
        return rows

    def action_event(self, by: int) -> None:
        """Mark an earlier or later event on the charts and describe it on the status line."""
        words = self.query_one(EventLine).move(by)
        self.repaint()
        self.screen.notify(words)

    def on_click(self, event: events.Click) -> None:
        """Mark the event that is nearest to the clicked time."""
        if not self._with_run:
            return
        words = self.query_one(EventLine).choose_near(event.screen_x - self.region.x, self.size.width)
        self.repaint()
        self.screen.notify(words)

    def on_mouse_scroll_down(self) -> None:
        self.action_zoom(1)

    def on_mouse_scroll_up(self) -> None:
        self.action_zoom(-1)

    def on_resize(self) -> None:
        self.repaint()

    def action_zoom(self, by: int) -> None:
        """Show a longer (1) or shorter (-1) time; of a short run never more than its whole."""
        self._window = moved_cursor(self._window, by, len(WINDOWS_S))
        shown_s: float = WINDOWS_S[self._window]
        if self._snapshot is not None:
            axis = time_axis(self._snapshot, self._window)
            shown_s = (axis.end_ns - axis.start_ns) / 1e9
        self.repaint()
        self.screen.notify(f"The charts show {fmt.duration(shown_s)}.")

    def action_reading(self) -> None:
        """Put the next device reading first."""
        if self._snapshot is None:
            return
        readings = reading_names(self._snapshot)
        self._first_reading = (self._first_reading + 1) % len(readings)
        self.repaint()
        self.screen.notify(f"first reading: {readings[self._first_reading]}")

    def action_unit(self) -> None:
        """Chart throughput in tokens/s, or in samples/s again."""
        self._in_tokens = not self._in_tokens
        self.repaint()


def _run_directory(snapshot: Snapshot) -> Path | None:
    return None if snapshot.run is None else snapshot.run.directory


EARLIER_KEY = key_of("main", "ChartColumn.event(-1)")
TONES_BY_IMPORTANCE = ("error", "warning", "success", "accent", "primary", "muted")
"""Tones, the most important first: of several events in one cell its sign is shown."""


class EventLine(PaintedWidget):
    """Two rows: signs on the axis, and the words of the newest or chosen event; in one row only the words."""

    _events: Sequence[DescribedEvent] = ()
    _axis: TimeAxis | None = None
    _chosen: DescribedEvent | None = None

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

    def choose_near(self, x: int, width: int) -> str:
        """Choose the event nearest to the cell `x` of a chart of `width` cells, and return its words."""
        if self._axis is None or not self._events:
            return "No events in this time."
        cells = cell_axis(width, self._axis)
        self._chosen = min(self._events, key=lambda event: abs(cells.cell_of(event.t_ns) - (x - GUTTER)))
        self.repaint()
        return self._chosen.words

    def lines(self, width: int, height: int) -> list[Line]:
        axis = self._axis
        if axis is None:
            return []
        return [self._signs(axis, width), self._words(axis)] if height > 1 else [self._words(axis)]

    def _signs(self, axis: TimeAxis, width: int) -> Line:
        cells = cell_axis(width, axis)
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
        indent = " " * (GUTTER - 6)
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
