"""The monitor's devices: each GPU with all its readings, and the host; or the CPU, and the reason for no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.throttle import causes_of
from trainfast_runner.records.tick import Tick
from trainfast_runner.results.device_conditions import DeviceConditions
from trainfast_runner.units import counted
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.painting.painted import PaintedWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, labelled, line_length, moved_cursor, paragraph
from trainfast_tui.text.shades import severity_rank, shade_of
from trainfast_tui.widgets.devices import gpu_line, host_line
from trainfast_tui.widgets.monitor.device_details import (
    Item,
    alarm_items,
    device_items,
    host_items,
    item_lines,
    missing_item,
)

INDENT = 6
ROW_HAS_CLOCK_FROM = 120
"""Columns from which a GPU's row has its highest clock; below, its details have it."""
RATE_TICKS = 5
"""Rates are taken over this many samples."""


class MonitorHead(PaintedWidget):
    """The throttled GPUs, and the cost of a sample."""

    _snapshot: Snapshot | None = None

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Show the newest sample of this snapshot."""
        self._snapshot = snapshot
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        snapshot = self._snapshot
        tick = snapshot.tick if snapshot is not None else None
        line: Line = [("monitor", "title")]
        if tick is None or snapshot is None:
            return [[*line, ("   looking…", "muted")]]
        if tick.devices:
            line += [(f"  {counted(len(tick.devices), 'GPU')}", "text")]
            worded = [*line, *_throttled(tick, with_words=True)]
            line = worded if line_length(worded) <= width else [*line, *_throttled(tick, with_words=False)]
        cost: Line = [(f"  {_microseconds(tick.sample_us)} a sample{_period(snapshot)}", "muted")]
        if (slowed := tick.missing.get("sampler.period")) is not None:
            cost.append((f"   {slowed}", "warning"))
        if line_length([*line, *cost]) <= width or slowed is not None:
            line += cost
        return [line]


class MonitorDevices(PaintedWidget):
    """A row for each GPU with as many readings as fit; the chosen GPU shows all."""

    DEFAULT_CSS = "MonitorDevices { height: 4; }"

    def __init__(self) -> None:
        super().__init__()
        self._snapshot: Snapshot | None = None
        self._used_uuids: frozenset[str] = frozenset()
        self._last_minute: Mapping[str, DeviceConditions] = {}
        self._chosen = 0
        self._view: _MachineView | None = None
        """The view of this snapshot; None until it is asked for."""

    def set_snapshot(
        self, snapshot: Snapshot, used_uuids: frozenset[str], last_minute: Mapping[str, DeviceConditions]
    ) -> None:
        """Take a snapshot without drawing it: `rows_wanted` comes first.

        `used_uuids` are the UUIDs of a live run's GPUs; `last_minute` is each GPU's last minute, by UUID.
        """
        self._snapshot, self._used_uuids, self._last_minute = snapshot, used_uuids, last_minute
        self._view = None

    def action_choose(self, by: int) -> None:
        """Show all readings of the next GPU, or of the one before."""
        tick = self._snapshot.tick if self._snapshot is not None else None
        count = len(tick.devices) if tick is not None else 0
        self._chosen = moved_cursor(self._chosen, by, count)
        self.repaint()

    def rows_wanted(self, width: int, max_rows: int) -> int:
        """Return the rows there is content for, at most `max_rows`."""
        return min(max_rows, len(self.lines(width, max_rows)))

    def lines(self, width: int, height: int) -> list[Line]:
        snapshot = self._snapshot
        tick = snapshot.tick if snapshot is not None else None
        if snapshot is None or tick is None:
            return [[("looking at the machine…", "muted")]]
        view = self._view
        if view is None or view.width != width:
            # Asked for twice a frame: for the rows wanted, and to paint.
            view = self._view = _MachineView(snapshot, tick, self._used_uuids, self._last_minute, width)
        host = view.host
        if not tick.devices:
            return [*host, *(line for words in _why_no_gpu(tick) for line in paragraph(words, width, "muted"))]
        heads = [*view.heads]
        details = view.all_details(height - len(heads) - len(host))
        if details is None:
            host, chosen = host[:1], min(self._chosen, len(heads) - 1)
            details = _most_important(view, chosen, height - len(heads) - len(host))
            heads[chosen] = view.head(chosen, is_chosen=True)
        return [line for head, rows in zip(heads, details, strict=True) for line in (head, *rows)] + host


class _MachineView:
    """The lines of `width` cells for the host and the GPUs of a sample; each is made once, when it is asked for."""

    def __init__(
        self,
        snapshot: Snapshot,
        tick: Tick,
        used_uuids: frozenset[str],
        last_minute: Mapping[str, DeviceConditions],
        width: int,
    ) -> None:
        """`used_uuids` are the GPUs of a live run; `last_minute` is each GPU's last minute, by UUID."""
        self.snapshot, self.tick, self.width = snapshot, tick, width
        self.used_uuids, self.last_minute = used_uuids, last_minute
        self._details: dict[int, list[Line]] = {}
        """The details made so far, by GPU."""

    @cached_property
    def before(self) -> tuple[Tick | None, float]:
        """An earlier sample and the seconds since it."""
        return _before(self.snapshot, self.tick)

    @cached_property
    def host(self) -> list[Line]:
        """The host's row and its rates."""
        before, seconds = self.before
        rates = host_items(self.tick.host, before.host if before is not None else None, seconds)
        head = host_line(self.tick.host, self.snapshot.cpu_percent, self.width, bool(self.tick.devices))
        return [head, *item_lines(rates, self.width, INDENT)]

    @cached_property
    def heads(self) -> list[Line]:
        """Each GPU's row."""
        return [self.head(index) for index in range(len(self.tick.devices))]

    @cached_property
    def alarms(self) -> list[list[Item]]:
        """Each GPU's readings that need a person."""
        return [alarm_items(device) if device.error is None else [] for device in self.tick.devices]

    @cached_property
    def _lost_s(self) -> Mapping[int, float]:
        """Seconds since the first sample in which each lost GPU did not answer, by its index."""
        return self.snapshot.lost_s()

    def head(self, index: int, *, is_chosen: bool = False) -> Line:
        """Return a GPU's row."""
        device = self.tick.devices[index]
        is_used, since_s = device.uuid in self.used_uuids, self._lost_s.get(device.index)
        return gpu_line(device, self.width, is_used, since_s, self.tick.missing, is_chosen=is_chosen)

    def items(self, index: int) -> list[Item]:
        """Return the readings of a GPU that its row does not have; empty for one that does not answer."""
        device = self.tick.devices[index]
        if device.error is not None:
            return []
        before, seconds = self.before
        readings = before.devices if before is not None else []
        earlier = next(
            (reading for reading in readings if (reading.uuid or reading.index) == (device.uuid or device.index)), None
        )
        last_minute, with_sm_clock = self.last_minute.get(device.uuid or ""), self.width < ROW_HAS_CLOCK_FROM
        items = device_items(device, earlier, seconds, last_minute, with_sm_clock=with_sm_clock)
        missing = missing_item(self.tick, device.index, self.width - INDENT)
        return items if missing is None else [*items, missing]

    def details(self, index: int) -> list[Line]:
        """Return the lines below a GPU's row: its readings, or its error if the row had no room for it."""
        if index not in self._details:
            error = self.tick.devices[index].error
            self._details[index] = (
                item_lines(self.items(index), self.width, INDENT)
                if error is None
                else _why_silent(error, self.heads[index], self.width)
            )
        return self._details[index]

    def all_details(self, room: int) -> list[list[Line]] | None:
        """Return the lines below each GPU's row; None once they are more than `room`."""
        all_lines: list[list[Line]] = []
        for index in range(len(self.tick.devices)):
            all_lines.append(self.details(index))
            room -= len(all_lines[-1])
            if room < 0:
                return None
        return all_lines


def _most_important(view: _MachineView, chosen: int, room: int) -> list[list[Line]]:
    """Return a line of alarms for each GPU, and for the chosen one all its lines, or its alarms first."""
    rows: list[list[Line]] = []
    for index, alarms in enumerate(view.alarms):
        rows.append(item_lines(alarms, view.width, INDENT)[:1] if index != chosen and room > 0 else [])
        room -= len(rows[-1])
    chosen_lines = view.details(chosen)
    if len(chosen_lines) > room and (items := view.items(chosen)):
        chosen_lines = item_lines(sorted(items, key=lambda item: item.is_alarm, reverse=True), view.width, INDENT)
    rows[chosen] = chosen_lines[: max(0, room)]
    return rows


def _why_silent(error: str, head: Line, width: int) -> list[Line]:
    """Return the whole error with its cure if the GPU's row had no room for it."""
    is_whole = any(text == error for text, _ in head)
    return [] if is_whole else labelled((" " * INDENT, "text"), error, width, "error")


def _before(snapshot: Snapshot, tick: Tick) -> tuple[Tick | None, float]:
    """Return an earlier sample and the seconds since it."""
    ticks = snapshot.machine_ticks
    if len(ticks) < 2:
        return None, 0.0
    before = ticks[max(0, len(ticks) - 1 - RATE_TICKS)]
    return before, (tick.t_ns - before.t_ns) / 1e9


def _throttled(tick: Tick, *, with_words: bool) -> Line:
    """Return the throttled GPUs by cause, the worst first."""
    by_cause: dict[str, list[int]] = {}
    for device in tick.devices:
        for cause in causes_of(device.throttle_reasons):
            by_cause.setdefault(cause, []).append(device.index)
    line: Line = []
    for shade in sorted(map(shade_of, by_cause), key=severity_rank):
        gpu_numbers = ", ".join(map(str, by_cause[shade.cause]))
        line.append((f"  {shade.letter} GPU {gpu_numbers}{f' {shade.words}' if with_words else ''}", shade.tone))
    lost = ", ".join(str(device.index) for device in tick.devices if device.error is not None)
    return [*line, (f"  GPU {lost} {'does not answer' if with_words else 'lost'}", "error")] if lost else line


def _microseconds(value: int) -> str:
    return f"{value:,} µs" if value < 10_000 else fmt.milliseconds(value / 1e3)


def _period(snapshot: Snapshot) -> str:
    ticks = snapshot.machine_ticks
    if len(ticks) < 2:
        return ""
    return f", every {fmt.duration(round((ticks[-1].t_ns - ticks[-2].t_ns) / 1e9, 1))}"


def _why_no_gpu(tick: Tick) -> list[str]:
    failure = tick.missing.get("nvml", binding.NO_DEVICES)
    if binding.comes_from_a_driver(failure):
        return [f"no GPU: {failure}.", "devices=cpu trains without one; trainfast-tui doctor says more."]
    advice = (
        "Runs use the CPU; with an NVIDIA card in this machine they need devices=cpu. trainfast-tui doctor says more."
    )
    return [f"no GPU: {failure}.", advice]
