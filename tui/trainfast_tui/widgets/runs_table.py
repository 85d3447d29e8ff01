"""The table of runs: it draws only the rows in sight, so that ten thousand cost no more than ten."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len

from trainfast_runner.records.state_words import state_words
from trainfast_runner.running.history import RunRow
from trainfast_runner.settings.knobs import BY_NAME, defaults
from trainfast_tui.charts.painted import Painted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line
from trainfast_tui.text.overrides import brief, fields, settings
from trainfast_tui.widgets.small_parts import STATE_SIGNS

LEFT_OUT = ("steps", "timing_warmup", "devices", "watch", "seed")
"""Knobs that say little about what was tried."""

DEFAULTS = defaults()
SYNTHETIC = "synthetic data"
STRICT = "* strict malloc: no rank"
WIDE = 110
Columns = tuple[tuple[str, int], ...]
COLUMNS: Columns = (("started", 18), ("preset", 26), ("state", 17), ("samples/s", 12), ("peak memory", 14))
NARROW: Columns = (("started", 16), ("preset", 15), ("state", 17), ("samples/s", 12))
NARROWEST: Columns = (("preset", 15), ("state", 17), ("samples/s", 12))
"""Columns and their widths, the space behind them included."""
FULL_WIDTH = 80
FIGURES = ("samples/s", "peak memory")


@dataclass(frozen=True, slots=True)
class Order:
    """A column the runs can be ordered by; `key` gives None for a run without the figure, which comes last."""

    name: str
    key: Callable[[RunRow], float | str | None]
    newest_first: bool = True
    words: tuple[str, str] = ("most first", "least first")
    """The usual direction and the other one, as a person says them."""


def columns_of(width: int) -> Columns:
    """The columns there is room for; a column is there whole or not at all."""
    return COLUMNS if width >= WIDE else NARROW if width >= FULL_WIDTH else NARROWEST


def orders_of(width: int) -> tuple[Order, ...]:
    """The orders that can be seen: by a column that is there, and always by the start."""
    shown = {"started", *(name for name, _ in columns_of(width))}
    return tuple(order for order in ORDERS if order.name in shown)


ORDERS = (
    Order("started", lambda row: row.run_id, words=("newest first", "oldest first")),
    Order("samples/s", lambda row: row.samples_per_s if row.measured_under is None else None),
    Order("peak memory", lambda row: row.peak_allocated_bytes),
    Order("preset", lambda row: row.name, newest_first=False, words=("a to z", "z to a")),
    Order("state", lambda row: row.state, newest_first=False, words=("a to z", "z to a")),
)


def ordered(rows: list[RunRow], order: Order, reverse: bool) -> list[RunRow]:
    """The rows by one column, runs without its figure last."""
    known = [row for row in rows if order.key(row) is not None]
    unknown = [row for row in rows if order.key(row) is None]
    return sorted(known, key=order.key, reverse=order.newest_first != reverse) + unknown  # type: ignore[arg-type]


def fits(row: RunRow, words: str) -> bool:
    """Whether every word stands somewhere in the row: id, preset, state, reason or `knob=value`."""
    text = " ".join(
        [row.run_id, row.name, row.state, state_words(row.state), row.reason]
        + [f"{name}={value}" for name, value in row.knobs.items()]
        + settings(fields(row.changed))
        + ([SYNTHETIC] if row.synthetic_data else [])
    ).lower()
    return all(word in text for word in words.lower().split())


class RunsTable(Painted):
    """Rows with a cursor and marks."""

    DEFAULT_CSS = "RunsTable { height: 1fr; }"

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id)
        self.marked: list[str] = []
        """Ids of marked runs, first marked first; at most two."""
        self._shown: list[RunRow] | None = None
        self._at = 0
        self._top = 0
        self._order = ORDERS[0]
        self._reverse = False

    @property
    def current(self) -> RunRow | None:
        """The run under the cursor."""
        return self._shown[self._at] if self._shown else None

    @property
    def below(self) -> RunRow | None:
        """The run one row further down."""
        shown = self._shown or []
        return shown[self._at + 1] if self._at + 1 < len(shown) else None

    def show(self, rows: list[RunRow], order: Order, reverse: bool) -> None:
        """Show these rows; the cursor stays on its run."""
        here = self.current
        self._shown, self._order, self._reverse = rows, order, reverse
        ids = [row.run_id for row in rows]
        self._at = ids.index(here.run_id) if here is not None and here.run_id in ids else 0
        self.repaint()

    def move(self, by: int) -> None:
        """The cursor `by` rows further down, held at the ends."""
        self._at = max(0, min(len(self._shown or []) - 1, self._at + by))
        self.repaint()

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return max(1, self.size.height - 2)

    def mark(self) -> None:
        """Mark or unmark the run under the cursor; a third mark replaces the oldest."""
        row = self.current
        if row is None:
            return
        if row.run_id in self.marked:
            self.marked.remove(row.run_id)
        else:
            self.marked = [*self.marked, row.run_id][-2:]
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        if self._shown is None:
            return [[("listing the runs…", "muted")]]
        if not self._shown:
            return [[("No run fits.", "muted")]]
        room = max(1, height - 1)
        self._top = max(0, min(self._top, self._at, len(self._shown) - room))
        self._top = max(self._top, self._at - room + 1)
        shown = self._shown[self._top : self._top + room]
        columns = columns_of(width)
        return [
            _heading(columns, self._order, self._reverse),
            *(self._line(place, row, columns, width) for place, row in enumerate(shown, self._top)),
        ]

    def _line(self, place: int, row: RunRow, columns: Columns, width: int) -> Line:
        here = place == self._at
        sign, tone = STATE_SIGNS.get(row.state, ("○", "text"))
        state = state_words(row.state) + (" (alone)" if row.supervised is False else "")
        cells = {
            "started": (_started(row), "text"),
            "preset": (fmt.plain(row.name), "title"),
            "state": (f"{sign} {state}", tone),
            "samples/s": (_speed(row), "text"),
            "peak memory": (fmt.size(row.peak_allocated_bytes), "text"),
        }
        line: Line = [(f"{'▸' if here else ' '}{'●' if row.run_id in self.marked else ' '} ", "accent")]
        line += [(_cell(name, cells[name][0], room), cells[name][1]) for name, room in columns]
        changed = fmt.plain(brief(row.changed, width - sum(cell_len(text) for text, _ in line)))
        line.append((changed, "text"))
        gap = "  " if changed else ""
        doubts = [SYNTHETIC] * bool(row.synthetic_data) + [STRICT] * bool(_starred(row))
        line.append((f"{gap}{', '.join(doubts)}" if doubts else "", "warning"))
        line += [(f"  {row.reason}" if row.state != "finished" else "", "muted")]
        return [(text, "cursor") for text, _ in line] if here else line


def _speed(row: RunRow) -> str:
    """Samples a second, with a star where that ranks against no other run."""
    return fmt.number(row.samples_per_s) + ("*" if _starred(row) else "")


def _starred(row: RunRow) -> bool:
    return row.samples_per_s is not None and row.measured_under is not None


def _heading(columns: Columns, order: Order, reverse: bool) -> Line:
    arrow = "↓" if order.newest_first != reverse else "↑"
    line: Line = [("   ", "muted")]
    for name, width in columns:
        here = name == order.name
        line.append((_cell(name, f"{name}{arrow if here else ''}", width), "title" if here else "muted"))
    return [*line, ("changed", "muted")]


def _cell(column: str, text: str, width: int) -> str:
    return fmt.fit(text, width - 2, "right" if column in FIGURES else "left") + "  "


def turned_of(row: RunRow) -> list[str]:
    """What was changed of the preset, then the preset's own knobs that are not at their default, as they are typed."""
    return [fmt.plain(setting) for setting in settings(row.changed)] + [
        f"{name}={BY_NAME[name].show(value)}"
        for name, value in row.knobs.items()
        if name in BY_NAME and name not in LEFT_OUT and name not in row.changed and value != DEFAULTS[name]
    ]


def _started(row: RunRow) -> str:
    if row.started_wall_ns is None:
        return row.run_id[:15]
    return time.strftime("%m-%d %H:%M:%S", time.localtime(row.started_wall_ns / 1e9))
