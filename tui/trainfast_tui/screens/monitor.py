"""The machine, for a person about to train: devices, their throttling, users, last minutes, and connections."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace
from textual.app import ComposeResult
from textual.geometry import Size

from trainfast_runner.machine.processes import ProcessRow
from trainfast_runner.machine.telemetry.topology import Topology, read_topology
from trainfast_tui.charts.chart_column import ChartColumn
from trainfast_tui.control.messages import Message
from trainfast_tui.control.threads import start_thread
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.panels.header_footer import FilterLine, StatusLine
from trainfast_tui.panels.monitor_devices import MonitorDevices
from trainfast_tui.panels.sorted_table import Column, SortedTable
from trainfast_tui.screens.base import AppScreen, PageScreen, PostedMessage
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line, Piece, Tone, labelled, paragraph, rule
from trainfast_tui.text.topology import TopologySection, topology_sections

HEAD_AND_FOOTER_ROWS = 2
MIN_ROWS_FOR_CHARTS = 7
"""With fewer rows the charts make room for the table of processes."""
ROWS_KEPT_FOR_CHARTS = ((38, 15), (26, 8))
"""(rows of the screen, rows kept for charts before a GPU shows all its readings)."""
MIN_ROWS_FOR_PROCESSES, ROWS_LENT_BY_PROCESSES = 6, 2
CHARTS_EVERY_NS = 1_800_000_000
"""Time between two paintings of the charts, at least."""


class MonitorScreen(AppScreen):
    """Follows the newest snapshot; the reader looks at processes for as long as this is open."""

    SCOPE = "monitor"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._snapshot: Snapshot | None = None
        self._charts_ns = 0
        """The time of the charted snapshot."""
        self._reserved_rows: dict[tuple[Size, int], tuple[int, int]] = {}
        """The most rows that devices and processes wanted at this size with so many GPUs: fewer would move the rest."""

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
            charts.show_snapshot(replace(snapshot, run=None, ticks=tuple(snapshot.machine_ticks)))

    def _divide_rows(self) -> None:
        """Divide the rows: devices first, then a few processes, then charts."""
        lines_below = self.query_one(StatusLine).lines_wanted + self.query_one(FilterLine).has_class("-shown")
        # The processes make room for a notice, as a key's own notice must not hide the chart that it has changed.
        lent_rows = min(lines_below, ROWS_LENT_BY_PROCESSES)
        room = self.size.height - HEAD_AND_FOOTER_ROWS - lines_below + lent_rows
        if room <= lent_rows:
            return
        tick = self._snapshot.tick if self._snapshot is not None else None
        devices, table = self.query_one(MonitorDevices), self.query_one(ProcessTable)
        chart_rows_kept = next((rows for min_room, rows in ROWS_KEPT_FOR_CHARTS if room >= min_room), 0)
        most_rows = max(1, room - MIN_ROWS_FOR_PROCESSES - chart_rows_kept)
        device_rows = min(most_rows, len(devices.lines(self.size.width, 1 + most_rows)) - 1)
        # Readings and processes come and go: moving all the rest would send the whole screen again.
        size_and_gpus = self.size, len(tick.devices) if tick is not None else 0
        reserved = self._reserved_rows.get(size_and_gpus, (0, 0))
        device_rows, process_rows = max(device_rows, reserved[0]), max(table.rows_wanted, reserved[1])
        self._reserved_rows = {size_and_gpus: (device_rows, process_rows)}
        rows_left = room - device_rows
        chart_rows = rows_left - max(MIN_ROWS_FOR_PROCESSES, min(process_rows, rows_left // 2))
        chart_rows = 0 if chart_rows < MIN_ROWS_FOR_CHARTS else chart_rows
        devices.set_height(1 + device_rows)
        self.query_one(ChartColumn).set_class(not chart_rows, "-away")
        table.set_height(rows_left - chart_rows - lent_rows)

    def filter_rows(self, words: str) -> None:
        table = self.query_one(ProcessTable)
        table.filter_rows(words)
        self.query_one(FilterLine).show_count(fmt.count(len(table.listed)))
        self._divide_rows()


class ProcessTable(SortedTable[ProcessRow]):
    """The newest look at the processes, first by GPU memory on a machine with a GPU, else by CPU."""

    COLUMNS = (
        Column("pid", 9, 10, lambda row: row.pid, largest_first=False),
        Column("owner", 9, 12, lambda row: row.owner, largest_first=False),
        Column(
            "GPU memory", 18, 20, lambda row: (row.device_memory_bytes or 0) if row.devices else None, align="right"
        ),
        Column("CPU", 8, 9, lambda row: row.cpu_percent, align="right"),
        Column("memory", 10, 11, lambda row: row.memory_rss_bytes, align="right"),
        Column("age", 8, 13, lambda row: row.age_s),
    )
    FIRST_ORDERS = "GPU memory", "CPU"
    LAST_COLUMN, NOUN = "command", "processes"
    WIDE_FROM = 120

    _newest: tuple[ProcessRow, ...] | None = None
    """The newest look at the processes, as it was handed over."""
    _has_looked = False
    _has_gpu = False

    def show_rows(self, rows: tuple[ProcessRow, ...] | None, has_gpu: bool) -> None:
        """Show these rows; those that tie in the order are sorted by CPU. None before the first look."""
        if rows is not None and rows == self._newest:
            return
        self._newest, self._has_looked, self._has_gpu = rows, rows is not None, has_gpu
        self.all_rows = sorted(rows or (), key=lambda row: row.cpu_percent or 0.0, reverse=True)
        self.reorder()

    def text_of(self, row: ProcessRow) -> str:
        return f"{row.pid} {row.owner} {row.command}"

    @property
    def rows_wanted(self) -> int:
        """Rows for the heading and every process."""
        return 1 + max(1, len(self.listed))

    @property
    def empty_words(self) -> str:
        return "Nothing keeps this machine busy." if self._has_looked else "looking at the processes…"

    def identity(self, row: ProcessRow) -> object:
        # In a container a process of the host may have the pid of one here.
        return row.identity or row.pid

    def columns(self, width: int) -> list[tuple[Column[ProcessRow], int]]:
        return [one for one in super().columns(width) if self._has_gpu or one[0].name != "GPU memory"]

    def cells(self, row: ProcessRow) -> dict[str, Piece]:
        texts = {
            "pid": str(row.pid),
            "owner": fmt.plain(row.owner or fmt.ABSENT),
            "GPU memory": _gpu_memory_text(row),
            "CPU": fmt.percent(row.cpu_percent),
            "memory": fmt.size(row.memory_rss_bytes),
            "age": " ".join(fmt.duration(row.age_s).split()[:2]),
        }
        return {name: (text, "text" if row.is_own else "muted") for name, text in texts.items()}

    def rest(self, row: ProcessRow, width: int) -> Line:
        # On a narrow screen the bare name of the program stands for its path.
        command = row.command if self.size.width >= self.WIDE_FROM else re.sub(r"^[^ ]*/(?=[^ ])", "", row.command)
        return [(command if row.identity is not None else "not visible from here", "text" if row.is_own else "muted")]


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

    _topology: Topology | None = None
    """None until the driver has answered."""

    def on_mount(self) -> None:
        start_thread("topology", lambda: TopologyRead(read_topology()), self.post)

    def on_posted_message(self, message: PostedMessage) -> None:
        if isinstance(message.content, TopologyRead):
            self._topology = message.content.topology
            self.repaint()

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
