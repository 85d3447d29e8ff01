"""The machine, for a person about to train: devices, their throttling, their users, and their last minutes."""

from __future__ import annotations

import os
from functools import partial

from textual.app import ComposeResult
from textual.geometry import Size

from trainfast_runner.errors import UserError
from trainfast_runner.machine.process_list import ProcessRow, check_endable, end_process
from trainfast_runner.machine.processes import Identity, is_running
from trainfast_runner.running.process_membership import Membership, run_of_process
from trainfast_tui.charts.chart_column import ChartColumn
from trainfast_tui.live.last_minute import LastMinute
from trainfast_tui.live.search_kind import SearchKind
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.screens.base import AppScreen
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.lines import Tone
from trainfast_tui.widgets.dialogs.ask import ask_yes
from trainfast_tui.widgets.header_footer import StatusLine
from trainfast_tui.widgets.monitor.monitor_devices import MonitorDevices, MonitorHead
from trainfast_tui.widgets.tables.process_table import ProcessTable

HEAD_AND_FOOTER_ROWS = 2
MIN_ROWS_FOR_CHARTS = 7
"""With fewer rows the charts make room for the table of processes."""
ROWS_KEPT_FOR_CHARTS = ((38, 15), (26, 8))
"""(rows of the screen, rows kept for charts before a GPU shows all its readings)."""
MIN_ROWS_FOR_PROCESSES = 6
MIN_ROWS_WITH_EVENTS = 3
"""With fewer rows for processes and events, the processes take them all."""


class MonitorScreen(AppScreen):
    """Follows the newest snapshot; the reader looks at processes for as long as this is open."""

    SCOPE = "monitor"
    DEFAULT_CSS = "MonitorScreen .-away { display: none; }"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._snapshot: Snapshot | None = None
        self._last_minute = LastMinute()
        self._reserved_rows = (0, 0)
        """The most rows that devices and processes wanted so far: fewer would move the rest of the screen."""
        self._reserved_for: tuple[Size, int] | None = None
        """The size and the number of GPUs that `_reserved_rows` are for."""
        self._terminated: Identity | None = None
        """The process that SIGTERM was sent to last."""

    def compose(self) -> ComposeResult:
        yield MonitorHead()
        yield MonitorDevices()
        yield ChartColumn(with_run=False)
        yield ProcessTable()
        yield StatusLine(id="status")
        yield self.footer()

    def on_mount(self) -> None:
        self.session.reader.look_at_processes(True)
        if self.session.snapshot is not None:
            self.show_snapshot(self.session.snapshot)

    def on_unmount(self) -> None:
        self.session.reader.look_at_processes(False)

    def on_resize(self) -> None:
        self._divide_rows()

    def show_notice(self, text: str, tone: Tone = "text") -> None:
        """Show a notice, and leave it the rows it needs."""
        super().show_notice(text, tone)
        if self.children:
            self._divide_rows()

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the machine of this snapshot."""
        self._snapshot = snapshot
        tick = snapshot.tick
        run_uuids = used_uuids(snapshot.live_run)
        self.query_one(MonitorHead).show_snapshot(snapshot)
        devices = self.query_one(MonitorDevices)
        devices.set_snapshot(snapshot, run_uuids, self._last_minute.update(snapshot.machine_ticks))
        self.query_one(ProcessTable).show_rows(snapshot.processes, tick is not None and bool(tick.devices))
        self._divide_rows()
        devices.repaint()
        charts = self.query_one(ChartColumn)
        if charts.display:
            charts.show_snapshot(snapshot.without_run())
        self._notify_if_ended(snapshot.processes)

    def _divide_rows(self) -> None:
        """Divide the rows: devices first, then a few processes, then charts, whose line of events always stays."""
        room = self.size.height - HEAD_AND_FOOTER_ROWS - self.query_one(StatusLine).lines_wanted
        if room <= 0:
            return
        tick = self._snapshot.tick if self._snapshot is not None else None
        devices, table = self.query_one(MonitorDevices), self.query_one(ProcessTable)
        chart_rows_kept = next((rows for min_room, rows in ROWS_KEPT_FOR_CHARTS if room >= min_room), 0)
        device_rows = devices.rows_wanted(self.size.width, max(1, room - MIN_ROWS_FOR_PROCESSES - chart_rows_kept))
        size_and_gpus = self.size, len(tick.devices) if tick is not None else 0
        if size_and_gpus != self._reserved_for:
            self._reserved_rows, self._reserved_for = (0, 0), size_and_gpus
        # Readings and processes come and go: moving all the rest would send the whole screen again.
        device_rows = max(device_rows, self._reserved_rows[0])
        process_rows = max(table.rows_wanted, self._reserved_rows[1])
        self._reserved_rows = device_rows, process_rows
        rows_left = room - device_rows
        chart_rows = rows_left - max(MIN_ROWS_FOR_PROCESSES, min(process_rows, rows_left // 2))
        if chart_rows < MIN_ROWS_FOR_CHARTS:
            # The words of an event need one row.
            chart_rows = int(rows_left > MIN_ROWS_WITH_EVENTS)
        devices.set_height(device_rows)
        self.query_one(ChartColumn).set_class(not chart_rows, "-away")
        table.set_height(rows_left - chart_rows)

    def _notify_if_ended(self, rows: tuple[ProcessRow, ...] | None) -> None:
        """Show a notice once the process that was asked to end has ended."""
        process = self._terminated
        if process is not None and rows is not None and not is_running(process):
            self._terminated = None
            self.show_notice(f"Process {process.pid} has ended.", "success")

    def action_end_process(self) -> None:
        row = self.query_one(ProcessTable).current
        if row is None:
            return
        if row.identity is None:
            words = f"Process {row.pid} is not visible from here, so it cannot be identified."
            self.notify(words, severity="warning")
            return
        if row.pid == os.getpid():
            words = f"This is trainfast-tui itself: press {key_of('everywhere', 'quit')} to quit."
            self.notify(words, severity="warning")
            return
        try:
            check_endable(row.identity)
            member = run_of_process(self.session.home, row.identity)
        except UserError as error:
            self.notify(error.line_without_option(), severity="warning")
            return
        if member is not None:
            self._offer_stop(row, member)
            return
        kill = row.identity == self._terminated
        question = f"{'Kill' if kill else 'End'} process {row.pid}?\n{_described(row)}"
        if kill:
            question += "\nSIGTERM was sent to it and it still runs. SIGKILL gives it no chance to save anything."
        yes = "send SIGKILL" if kill else "send SIGTERM: it may save what it has, and end"
        ask_yes(self.app, question, yes, partial(self._end, row.identity, kill))

    def _offer_stop(self, row: ProcessRow, member: Membership) -> None:
        """Offer to stop the run of a process: ending the process alone would make the run a failed one."""
        run_id = member.directory.name
        if member.role is not None:
            words = f"Process {row.pid} works for a search ({run_id})"
            keys = f"{SearchKind.BATCH.key} or {SearchKind.BEST.key}"
            stop = key_of(SearchKind.BATCH, "cancel")
            self.notify(f"{words}: {keys} on the main screen shows it, {stop} there stops it.")
            return
        question = f"Stop the run {run_id}?\nProcess {row.pid} is {member.part}.\n{_described(row)}"
        yes = "stop the run: it is asked to end, and killed after a countdown"
        ask_yes(self.app, question, yes, partial(self.session.run_control.request_stop, member.directory))

    def _end(self, identity: Identity, kill: bool) -> None:
        try:
            words = end_process(identity, kill=kill)
        except UserError as error:
            self.notify(error.line_without_option(), severity="warning")
            return
        self._terminated = identity
        self.notify(words if kill else f"{words} If it stays, {key_of('monitor', 'end_process')} again offers SIGKILL.")


def _described(row: ProcessRow) -> str:
    device_words = f", {fmt.size(row.device_memory_bytes)} on GPU {'+'.join(str(index) for index, _ in row.devices)}"
    return (
        f"{fmt.plain(row.command, 200)}\n"
        f"of {row.owner}, for {fmt.duration(row.age_s)}, {fmt.size(row.memory_rss_bytes)} of memory"
        f"{device_words if row.devices else ''}"
    )
