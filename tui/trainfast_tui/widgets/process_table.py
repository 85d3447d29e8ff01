"""The processes that use the machine: who, how much of it, since when. With a cursor, in an order of choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfast_tui.charts.painted import Painted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line

if TYPE_CHECKING:
    from trainfast_runner.machine.processes.listing import ProcessRow

Columns = tuple[tuple[str, int], ...]
NARROW: Columns = (("pid", 9), ("owner", 9), ("GPU memory", 18), ("CPU", 8), ("memory", 10), ("age", 8))
COLUMNS: Columns = (("pid", 10), ("owner", 12), ("GPU memory", 20), ("CPU", 9), ("memory", 11), ("age", 13))
"""Columns and their widths, the space behind them included; the command takes the rest."""
WIDE = 120
FIGURES = ("GPU memory", "CPU", "memory")


@dataclass(frozen=True, slots=True)
class Order:
    """A column to order by; None of `key` comes last."""

    name: str
    key: Callable[[ProcessRow], float | str | None]
    largest_first: bool = True


ORDERS = (
    Order("GPU memory", lambda row: (row.device_memory_bytes or 0) if row.devices else None),
    Order("CPU", lambda row: row.cpu_percent),
    Order("memory", lambda row: row.memory_rss_bytes),
    Order("age", lambda row: row.age_s),
    Order("owner", lambda row: row.owner, largest_first=False),
    Order("pid", lambda row: row.pid, largest_first=False),
)


def ordered(rows: tuple[ProcessRow, ...], order: Order, reverse: bool) -> list[ProcessRow]:
    """The rows by one column; rows without its figure last, equals by their processor time."""
    by_cpu = sorted(rows, key=lambda row: row.cpu_percent or 0.0, reverse=True)
    known = [row for row in by_cpu if order.key(row) is not None]
    unknown = [row for row in by_cpu if order.key(row) is None]
    return sorted(known, key=order.key, reverse=order.largest_first != reverse) + unknown  # type: ignore[arg-type]


class ProcessTable(Painted):
    """The cursor stays on its process while the rows change their places."""

    DEFAULT_CSS = "ProcessTable { height: 1fr; }"

    def __init__(self, *, ascii: bool) -> None:
        super().__init__(ascii=ascii)
        self.order: Order | None = None
        """None until a person has chosen: then the GPUs' memory where there is a GPU, else the CPU."""
        self.reverse = False
        self._processes: tuple[ProcessRow, ...] | None = None
        self._shown: list[ProcessRow] = []
        self._has_gpu = False
        self._pid: int | None = None
        self._top = 0

    @property
    def current(self) -> ProcessRow | None:
        """The process under the cursor."""
        return self._shown[self._at] if self._shown else None

    @property
    def shown_order(self) -> Order:
        """The order the rows have now."""
        if self.order is None or (self.order is ORDERS[0] and not self._has_gpu):
            return ORDERS[0 if self._has_gpu else 1]
        return self.order

    @property
    def _at(self) -> int:
        return next((at for at, row in enumerate(self._shown) if row.pid == self._pid), 0)

    def show(self, rows: tuple[ProcessRow, ...] | None, has_gpu: bool) -> None:
        """Show these; None while nobody has looked yet."""
        self._processes, self._has_gpu = rows, has_gpu
        self._shown = ordered(rows or (), self.shown_order, self.reverse)
        self.repaint()

    def move(self, by: int) -> None:
        """The cursor `by` rows further down, held at the ends."""
        if self._shown:
            self._pid = self._shown[max(0, min(len(self._shown) - 1, self._at + by))].pid
        self.repaint()

    def sort(self) -> str:
        """Order by the next column; in words."""
        orders = ORDERS if self._has_gpu else ORDERS[1:]
        self.order = orders[(orders.index(self.shown_order) + 1) % len(orders)]
        self.show(self._processes, self._has_gpu)
        return f"processes by {self.order.name}"

    def turn_around(self) -> None:
        """The other end of the order first."""
        self.order, self.reverse = self.shown_order, not self.reverse
        self.show(self._processes, self._has_gpu)

    @property
    def rows_wanted(self) -> int:
        """Rows for the heading and every process."""
        return 1 + max(1, len(self._shown))

    def lines(self, width: int, height: int) -> list[Line]:
        if self._processes is None:
            return [self._heading(width), [("looking at the processes…", "muted")]]
        if not self._shown:
            return [self._heading(width), [("Nothing keeps this machine busy.", "muted")]]
        room = max(1, height - 1)
        at = self._at
        self._top = max(0, min(self._top, at, len(self._shown) - room))
        self._top = max(self._top, at - room + 1)
        shown = self._shown[self._top : self._top + room]
        return [
            self._heading(width),
            *(self._process(row, place == at, width) for place, row in enumerate(shown, self._top)),
        ]

    def _heading(self, width: int) -> Line:
        order = self.shown_order
        arrow = "↓" if order.largest_first != self.reverse else "↑"
        line: Line = [("  ", "muted")]
        for name, room in self._columns(width):
            here = name == order.name
            line.append((_cell(name, name + (arrow if here else ""), room), "title" if here else "muted"))
        return [*line, ("command", "muted"), (f"   of {fmt.count(len(self._shown))}" if width >= WIDE else "", "muted")]

    def _columns(self, width: int) -> Columns:
        columns = COLUMNS if width >= WIDE else NARROW
        return columns if self._has_gpu else tuple(column for column in columns if column[0] != "GPU memory")

    def _process(self, row: ProcessRow, here: bool, width: int) -> Line:
        cells = {
            "pid": str(row.pid),
            "owner": fmt.plain(row.owner or fmt.ABSENT),
            "GPU memory": _held(row),
            "CPU": fmt.percent(row.cpu_percent),
            "memory": fmt.size(row.memory_rss_bytes),
            "age": fmt.duration(row.age_s) if width >= WIDE else " ".join(fmt.duration(row.age_s).split()[:2]),
        }
        tone = "text" if row.is_own else "muted"
        line: Line = [("▸ " if here else "  ", "accent")]
        line += [(_cell(name, cells[name], room), tone) for name, room in self._columns(width)]
        command = row.command if width >= WIDE else _without_folder(row.command)
        line.append((command if row.identity is not None else "not visible from here", tone))
        return [(text, "cursor") for text, _ in line] if here else line


def _without_folder(command: str) -> str:
    """The command with the bare name of its program."""
    program, space, rest = command.partition(" ")
    return (program.rpartition("/")[2] or program) + space + rest


def _held(row: ProcessRow) -> str:
    """The GPUs it is on, and what it holds there: `GPU 0 61.0 GiB`, on several the sum."""
    if not row.devices:
        return ""
    indexes = [index for index, _ in row.devices]
    which = f"{indexes[0]}-{indexes[-1]}" if len(indexes) > 2 else "+".join(map(str, indexes))
    return f"GPU {which} {fmt.size(row.device_memory_bytes)}"


def _cell(column: str, text: str, width: int) -> str:
    return fmt.fit(text, width - 2, "right" if column in FIGURES else "left") + "  "
