"""The table of the processes that use the machine: owner, share, age and command of each."""

from __future__ import annotations

from trainfast_runner.machine.process_list import ProcessRow
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Tone
from trainfast_tui.widgets.tables.sorted_table import Columns, SortedTable, SortOrder

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

    DEFAULT_CSS = "ProcessTable { height: 1fr; }"
    ORDERS = ORDERS
    RIGHT_ALIGNED = ("GPU memory", "CPU", "memory")
    LAST_COLUMN = "command"

    def __init__(self) -> None:
        super().__init__()
        self._has_looked = False
        self._has_gpu = False

    def show_rows(self, rows: tuple[ProcessRow, ...] | None, has_gpu: bool) -> None:
        """Show these rows; those that tie in the order are sorted by CPU. None before the first look."""
        self._has_looked, self._has_gpu = rows is not None, has_gpu
        self._listed_rows = sorted(rows or (), key=lambda row: row.cpu_percent or 0.0, reverse=True)
        self.reorder()

    def action_sort(self) -> None:
        """Order by the next column, with a notice."""
        super().action_sort()
        self.screen.notify(f"processes by {self.order.name}")

    @property
    def rows_wanted(self) -> int:
        """Rows for the heading and every process."""
        return 1 + max(1, len(self._ordered_rows))

    def lines(self, width: int, height: int) -> list[Line]:
        heading = self.heading(width)
        if not self._ordered_rows:
            words = "Nothing keeps this machine busy." if self._has_looked else "looking at the processes…"
            return [heading, [(words, "muted")]]
        heading.append((f"   of {fmt.count(len(self._ordered_rows))}" if width >= WIDE_COLUMNS_FROM else "", "muted"))
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
