"""The machine, for a person about to train: devices, their throttling, users, last minutes, and connections."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from textual.app import ComposeResult
from textual.geometry import Size

from trainfast_runner.errors import UserError
from trainfast_runner.machine.process_list import ProcessRow, check_endable, end_process
from trainfast_runner.machine.processes import Identity, is_running
from trainfast_runner.machine.telemetry.topology import Topology, read_topology
from trainfast_runner.running.present_state import Membership, run_of_process
from trainfast_tui.charts.chart_column import ChartColumn
from trainfast_tui.control.messages import Message
from trainfast_tui.control.threads import start_thread
from trainfast_tui.live.snapshot import SearchKind, Snapshot, used_uuids
from trainfast_tui.panels.ask import ask_yes
from trainfast_tui.panels.header_footer import FilterLine, StatusLine
from trainfast_tui.panels.monitor_devices import MonitorDevices
from trainfast_tui.panels.sorted_table import Columns, SortedTable, SortOrder
from trainfast_tui.screens.base import AppScreen, PageScreen, PostedMessage
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line, Tone, labelled, paragraph, rule
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.topology import TopologySection, topology_sections

HEAD_AND_FOOTER_ROWS = 2
MIN_ROWS_FOR_CHARTS = 7
"""With fewer rows the charts make room for the table of processes."""
ROWS_KEPT_FOR_CHARTS = ((38, 15), (26, 8))
"""(rows of the screen, rows kept for charts before a GPU shows all its readings)."""
MIN_ROWS_FOR_PROCESSES = 6
CHARTS_EVERY_NS = 1_800_000_000
"""Time between two paintings of the charts, at least."""
MIN_ROWS_WITH_EVENTS = 3
"""With fewer rows for processes and events, the processes take them all."""


class ProcessIdentified(Message, frozen=True):
    """A process may be ended; or it belongs to a run, which is to be stopped instead."""

    row: ProcessRow
    member: Membership | None


def _identified(session: Session, row: ProcessRow) -> ProcessIdentified:
    """Raise UserError for a process that cannot be ended from here."""
    assert row.identity is not None
    check_endable(row.identity)
    return ProcessIdentified(row, run_of_process(session.home, row.identity))


class MonitorScreen(AppScreen):
    """Follows the newest snapshot; the reader looks at processes for as long as this is open."""

    SCOPE = "monitor"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._snapshot: Snapshot | None = None
        self._charts_ns = 0
        """The time of the charted snapshot."""
        self._reserved_rows = (0, 0)
        """The most rows that devices and processes wanted so far: fewer would move the rest of the screen."""
        self._reserved_for: tuple[Size, int] | None = None
        """The size and the number of GPUs that `_reserved_rows` are for."""
        self._terminated: Identity | None = None
        """The process that SIGTERM was sent to last."""

    def content(self) -> ComposeResult:
        yield MonitorDevices()
        yield ChartColumn(with_run=False)
        yield ProcessTable()

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
        devices = self.query_one(MonitorDevices)
        devices.set_snapshot(snapshot, used_uuids(snapshot.live_run))
        self.query_one(ProcessTable).show_rows(snapshot.processes, tick is not None and bool(tick.devices))
        self._divide_rows()
        devices.repaint()
        charts = self.query_one(ChartColumn)
        # Drawn for every cell of their two minutes, the charts would take a third of the screen's time.
        if charts.display and abs(snapshot.taken_ns - self._charts_ns) >= CHARTS_EVERY_NS:
            self._charts_ns = snapshot.taken_ns
            charts.show_snapshot(snapshot.without_run())
        self._notify_if_ended(snapshot.processes)

    def _divide_rows(self) -> None:
        """Divide the rows: devices first, then a few processes, then charts, whose line of events always stays."""
        room = self.size.height - HEAD_AND_FOOTER_ROWS - self.query_one(StatusLine).lines_wanted
        room -= self.query_one(FilterLine).has_class("-shown")
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
        devices.set_height(1 + device_rows)
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
        identify = partial(_identified, self.session, row)
        start_thread("process", identify, self.post)

    def on_posted_message(self, message: PostedMessage) -> None:
        """Ask about a process that was identified; leave other messages to the app."""
        match message.content:
            case ProcessIdentified(row, None):
                kill = row.identity == self._terminated
                question = f"{'Kill' if kill else 'End'} process {row.pid}?\n{_described(row)}"
                if kill:
                    question += "\nSIGTERM was sent to it and it still runs."
                    question += " SIGKILL gives it no chance to save anything."
                yes = "send SIGKILL" if kill else "send SIGTERM: it may save what it has, and end"
                ask_yes(self.app, question, yes, partial(self._end, row, kill))
            case ProcessIdentified(row, member) if member is not None:
                self._offer_stop(row, member)

    def filter_rows(self, words: str) -> None:
        table = self.query_one(ProcessTable)
        table.filter_rows(words)
        self.query_one(FilterLine).show_count(fmt.count(len(table.listed)))
        self._divide_rows()

    def _offer_stop(self, row: ProcessRow, member: Membership) -> None:
        """Offer to stop the run of a process: ending the process alone would make the run a failed one."""
        if member.role is not None:
            words = f"Process {row.pid} works for a search"
            keys = f"{SearchKind.BATCH.key} or {SearchKind.BEST.key}"
            stop = key_of(SearchKind.BATCH, "cancel")
            self.notify(f"{words}: {keys} on the main screen shows it, {stop} there stops it.")
            return
        run = self.session.run_words(member.directory.name)
        question = f"Stop {run}?\nProcess {row.pid} is {member.part}.\n{_described(row)}"
        yes = "stop the run: it is asked to end, and killed after a countdown"
        ask_yes(self.app, question, yes, partial(self.session.run_control.stop, member.directory))

    def _end(self, row: ProcessRow, kill: bool) -> None:
        assert row.identity is not None
        try:
            words = end_process(row.identity, kill=kill)
        except UserError as error:
            self.notify(error.line_without_option(), severity="warning")
            return
        self._terminated = row.identity
        self.notify(words if kill else f"{words} If it stays, {key_of('monitor', 'end_process')} again offers SIGKILL.")


def _described(row: ProcessRow) -> str:
    device_words = f", {fmt.size(row.device_memory_bytes)} on GPU {'+'.join(str(index) for index, _ in row.devices)}"
    return (
        f"{fmt.plain(row.command, 200)}\n"
        f"of {row.owner}, for {fmt.duration(row.age_s)}, {fmt.size(row.memory_rss_bytes)} of memory"
        f"{device_words if row.devices else ''}"
    )


NARROW_COLUMNS: Columns = (("pid", 9), ("owner", 9), ("GPU memory", 18), ("CPU", 8), ("memory", 10), ("age", 8))
WIDE_COLUMNS: Columns = (("pid", 10), ("owner", 12), ("GPU memory", 20), ("CPU", 9), ("memory", 11), ("age", 13))
WIDE_COLUMNS_FROM = 120
"""Width from which the columns are wide and commands have their folder."""

ORDERS: tuple[SortOrder[ProcessRow], ...] = (
    SortOrder("GPU memory", lambda row: (row.device_memory_bytes or 0) if row.devices else None),
    SortOrder("CPU", lambda row: row.cpu_percent),
    SortOrder("memory", lambda row: row.memory_rss_bytes),
    SortOrder("age", lambda row: row.age_s),
    SortOrder("owner", lambda row: row.owner, largest_first=False),
    SortOrder("pid", lambda row: row.pid, largest_first=False),
)


class ProcessTable(SortedTable[ProcessRow]):
    """The newest look at the processes, first by GPU memory on a machine with a GPU, else by CPU."""

    ORDERS = ORDERS
    RIGHT_ALIGNED = ("GPU memory", "CPU", "memory")
    LAST_COLUMN = "command"

    def __init__(self) -> None:
        super().__init__()
        self._newest: tuple[ProcessRow, ...] | None = None
        """The newest look at the processes, as it was handed over."""
        self._has_looked = False
        self._has_gpu = False

    def show_rows(self, rows: tuple[ProcessRow, ...] | None, has_gpu: bool) -> None:
        """Show these rows; those that tie in the order are sorted by CPU. None before the first look."""
        if rows is not None and rows == self._newest:
            return
        self._newest, self._has_looked, self._has_gpu = rows, rows is not None, has_gpu
        self.all_rows = sorted(rows or (), key=lambda row: row.cpu_percent or 0.0, reverse=True)
        self.reorder()

    def text_of(self, row: ProcessRow) -> str:
        return f"{row.pid} {row.owner} {row.command}"

    def action_sort(self) -> None:
        """Order by the next column, with a notice."""
        super().action_sort()
        self.screen.notify(f"processes by {self.order.name}")

    @property
    def rows_wanted(self) -> int:
        """Rows for the heading and every process."""
        return 1 + max(1, len(self.listed))

    def lines(self, width: int, height: int) -> list[Line]:
        heading = self.heading(width)
        if not self.listed:
            words = "Nothing keeps this machine busy." if self._has_looked else "looking at the processes…"
            return [heading, [(words, "muted")]]
        heading.append((f"   of {fmt.count(len(self.listed))}" if width >= WIDE_COLUMNS_FROM else "", "muted"))
        return [heading, *self.visible_rows(width, height - 1)]

    def identity(self, row: ProcessRow) -> object:
        # In a container a process of the host may have the pid of one here.
        return row.identity or row.pid

    def columns(self, width: int) -> Columns:
        columns = WIDE_COLUMNS if width >= WIDE_COLUMNS_FROM else NARROW_COLUMNS
        return columns if self._has_gpu else tuple(column for column in columns if column[0] != "GPU memory")

    def row_line(self, row: ProcessRow, width: int) -> Line:
        cells = {
            "pid": str(row.pid),
            "owner": fmt.plain(row.owner or fmt.ABSENT),
            "GPU memory": _gpu_memory_text(row),
            "CPU": fmt.percent(row.cpu_percent),
            "memory": fmt.size(row.memory_rss_bytes),
            "age": fmt.duration(row.age_s) if width >= WIDE_COLUMNS_FROM else _largest_unit(fmt.duration(row.age_s)),
        }
        tone: Tone = "text" if row.is_own else "muted"
        line: Line = [("  ", "accent")]
        line += [(self.cell(name, cells[name], column_width), tone) for name, column_width in self.columns(width)]
        command = row.command if width >= WIDE_COLUMNS_FROM else _without_folder(row.command)
        return [*line, (command if row.identity is not None else "not visible from here", tone)]


def _largest_unit(duration: str) -> str:
    """Return only the figure and the unit in front: `2 h` of `2 h 15 min`."""
    return " ".join(duration.split()[:2])


def _without_folder(command: str) -> str:
    """Return the command with the bare name of its program."""
    program, space, rest = command.partition(" ")
    return (program.rpartition("/")[2] or program) + space + rest


def _gpu_memory_text(row: ProcessRow) -> str:
    """Return the GPUs of a process and its memory on them: `GPU 0 61.0 GiB`."""
    if not row.devices:
        return ""
    indexes = [index for index, _ in row.devices]
    if len(indexes) <= 2:
        gpu_words = f"GPU {'+'.join(map(str, indexes))}"
    elif indexes[-1] - indexes[0] == len(indexes) - 1:
        gpu_words = f"GPU {indexes[0]}-{indexes[-1]}"
    else:
        gpu_words = f"{len(indexes)} GPUs"
    return f"{gpu_words} {fmt.size(row.device_memory_bytes)}"


class TopologyRead(Message, frozen=True):
    """NVML has answered."""

    topology: Topology


class TopoScreen(PageScreen):
    """The matrix and the sections below. NVML is read in a thread: the driver may take its time."""

    SCOPE = "topo"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._topology: Topology | None = None
        """None until the driver has answered."""

    def on_mount(self) -> None:
        self.action_reload()

    def on_posted_message(self, message: PostedMessage) -> None:
        if isinstance(message.content, TopologyRead):
            self._topology = message.content.topology
            self.repaint()

    def action_reload(self) -> None:
        start_thread("topology", lambda: TopologyRead(read_topology()), self.post)

    def body(self, width: int) -> list[Line]:
        if self._topology is None:
            return [rule("topology", width), [("Asking the driver…", "muted")]]
        body: list[Line] = []
        for section in topology_sections(self._topology):
            body += [[], rule(section.title, width), *_section_lines(section, width)]
        return body[1:]


def _section_lines(section: TopologySection, width: int) -> Iterator[Line]:
    for number, line in enumerate(section.lines):
        if section.kind == "prose":
            yield from labelled(("• ", "key"), line, width)
        elif section.kind == "errors":
            yield from paragraph(line, width, "error")
        else:
            yield [(line, "title" if section.kind == "table" and number == 0 else "text")]
