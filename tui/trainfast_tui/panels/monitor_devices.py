"""The monitor's devices: each GPU with all its readings, and the host; or the CPU, and the reason for no GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from trainfast_runner.machine.device_events import BUSY_PERCENT
from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.throttle import causes_of
from trainfast_runner.records.tick import DeviceReading, HostReading, Tick
from trainfast_runner.results.device_conditions import DeviceConditions, StepJoin
from trainfast_runner.units import counted
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.panels.devices import gpu_line, host_line
from trainfast_tui.text import format as fmt
from trainfast_tui.text.event_words import SHADES, severity_rank, shade_of
from trainfast_tui.text.format import Line, Tone, labelled, line_length, moved_cursor, paragraph
from trainfast_tui.text.topology import pcie_link

INDENT = 6
ROW_HAS_CLOCK_FROM = 120
"""Columns from which a GPU's row has its highest clock; below, its details have it."""
RATE_TICKS = 5
"""Rates are taken over this many samples."""


class MonitorDevices(PaintedWidget):
    """The throttled GPUs, then a row for each GPU with as many readings as fit; the chosen GPU shows all."""

    def __init__(self) -> None:
        super().__init__()
        self._snapshot: Snapshot | None = None
        self._used_uuids: frozenset[str] = frozenset()
        self._chosen = 0
        self._items: list[list[Item]] | None = None
        """The readings of each GPU in this snapshot, made once: lines are asked for twice a frame."""

    def set_snapshot(self, snapshot: Snapshot, used_uuids: frozenset[str]) -> None:
        """Take a snapshot without drawing it: `rows_wanted` comes first. `used_uuids` are a live run's GPUs."""
        self._snapshot, self._used_uuids = snapshot, used_uuids
        self._items = None

    def action_choose(self, by: int) -> None:
        """Show all readings of the next GPU, or of the one before."""
        tick = self._snapshot.tick if self._snapshot is not None else None
        self._chosen = moved_cursor(self._chosen, by, len(tick.devices) if tick is not None else 0)
        self.repaint()

    def on_resize(self) -> None:
        self._items = None

    def rows_wanted(self, width: int, max_rows: int) -> int:
        """Return the rows there is content for, at most `max_rows`, without the head."""
        return min(max_rows, len(self.lines(width, 1 + max_rows)) - 1)

    def lines(self, width: int, height: int) -> list[Line]:
        snapshot = self._snapshot
        tick = snapshot.tick if snapshot is not None else None
        if snapshot is None or tick is None:
            return [[("monitor", "title"), ("   looking…", "muted")], [("looking at the machine…", "muted")]]
        return [_head_line(snapshot, tick, width), *self._device_lines(snapshot, tick, width, height - 1)]

    def _device_lines(self, snapshot: Snapshot, tick: Tick, width: int, height: int) -> list[Line]:
        before, seconds = _before(snapshot, tick)
        host_head = host_line(tick.host, snapshot.cpu_percent, width, bool(tick.devices))
        rates = host_items(tick.host, before.host if before is not None else None, seconds)
        host = [host_head, *item_lines(rates, width, INDENT)]
        if not tick.devices:
            return [*host, *(line for words in _why_no_gpu(tick) for line in paragraph(words, width, "muted"))]
        if self._items is None:
            minute = _last_minute(snapshot, tick)
            self._items = [gpu_items(snapshot, device, minute, width) for device in tick.devices]
        lost_s, items, chosen = snapshot.lost_s(), self._items, min(self._chosen, len(tick.devices) - 1)

        def head(device: DeviceReading, *, is_chosen: bool = False) -> Line:
            is_used, since_s = device.uuid in self._used_uuids, lost_s.get(device.index)
            return gpu_line(device, width, is_used, since_s, tick.missing, is_chosen=is_chosen)

        heads = [head(device) for device in tick.devices]
        details = [
            item_lines(own, width, INDENT) if device.error is None else _why_silent(device.error, head, width)
            for device, head, own in zip(tick.devices, heads, items, strict=True)
        ]
        if sum(map(len, [heads, host, *details])) > height:
            # The chosen GPU shows all that fits, its alarms first, and each other one a line of its alarms.
            heads[chosen] = head(tick.devices[chosen], is_chosen=True)
            host, room = host[:1], height - len(heads) - 1
            for index, own in enumerate(items):
                if index != chosen:
                    alarms = [item for item in own if item.is_alarm]
                    details[index] = item_lines(alarms, width, INDENT)[: 1 if room > 0 else 0]
                    room -= len(details[index])
            if len(details[chosen]) > room and items[chosen]:
                alarms_first = sorted(items[chosen], key=lambda item: item.is_alarm, reverse=True)
                details[chosen] = item_lines(alarms_first, width, INDENT)
            details[chosen] = details[chosen][: max(0, room)]
        return [line for head, rows in zip(heads, details, strict=True) for line in (head, *rows)] + host


def _head_line(snapshot: Snapshot, tick: Tick, width: int) -> Line:
    """Return the throttled GPUs, and the cost of a sample where there is room."""
    line: Line = [("monitor", "title")]
    if tick.devices:
        line += [(f"  {counted(len(tick.devices), 'GPU')}", "text")]
        worded = [*line, *_throttled(tick, with_words=True)]
        line = worded if line_length(worded) <= width else [*line, *_throttled(tick, with_words=False)]
    cost: Line = [(f"  {_microseconds(tick.sample_us)} a sample{_period(snapshot)}", "muted")]
    if (slowed := tick.missing.get("sampler.period")) is not None:
        cost.append((f"   {slowed}", "warning"))
    return [*line, *cost] if line_length([*line, *cost]) <= width or slowed is not None else line


def _last_minute(snapshot: Snapshot, tick: Tick) -> dict[str | None, DeviceConditions]:
    """Return the conditions of each GPU in the minute up to this sample, by UUID."""
    ticks, begin_ns = snapshot.machine_ticks, tick.t_ns - MINUTE_NS
    recent = ticks[max(0, bisect_left(ticks, begin_ns, key=lambda sample: sample.t_ns) - 1) :]
    join = StepJoin([device.uuid for device in tick.devices if device.uuid])
    for sample in (*recent[: -1 : max(1, len(recent) // MINUTE_SAMPLES)], *recent[-1:]):
        join.add_tick(sample.t_ns, sample.devices)
    return {device.uuid: device for device in join.conditions_between(begin_ns, tick.t_ns)}


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


MIN_THROTTLED_SHARE = 0.005
"""A smaller share of throttled time prints as 0 %."""
MAX_NAMED_READINGS = 4
"""At most this many of the readings that a GPU lacks are named."""
NEAR_MAX_MEMORY_C = 5
"""Chosen, not measured: memory this near its highest temperature, in degrees Celsius, is a warning."""
MINUTE_NS, MINUTE_SAMPLES = 60_000_000_000, 6
"""The time over which throttling is counted, and the samples of it that are joined: counters have the rest."""
WIDEST_SIZE, WIDEST_RATE = "1023 MiB", "1023 MiB/s"


class Item(NamedTuple):
    """A reading with its label."""

    label: str
    text: str
    """The reading with its unit."""
    tone: Tone = "text"
    """The tone of the reading."""
    widest: str = ""
    """The widest text of the reading: later items stay where they are while figures change."""
    is_throttling: bool = False
    """True for throttled time, which has its sign in the GPU's row too."""

    @property
    def is_alarm(self) -> bool:
        """True if a person should see the item even in little room."""
        return self.tone in ("warning", "error") and not self.is_throttling


def gpu_items(
    snapshot: Snapshot, device: DeviceReading, last_minute: Mapping[str | None, DeviceConditions], width: int
) -> list[Item]:
    """Return the readings of a GPU that its row does not have; empty for one that does not answer."""
    tick = snapshot.tick
    if device.error is not None or tick is None:
        return []
    before_tick, seconds = _before(snapshot, tick)
    readings = before_tick.devices if before_tick is not None else []
    key = device.uuid or device.index
    before = next((reading for reading in readings if (reading.uuid or reading.index) == key), None)
    with_sm_clock = width < ROW_HAS_CLOCK_FROM
    items = [
        *_throttled_items(last_minute.get(device.uuid)),
        _limits(device),
        _clock("SM clock", device.sm_clock_mhz, device.sm_clock_max_mhz) if with_sm_clock else None,
        _clock("memory clock", device.memory_clock_mhz, device.memory_clock_max_mhz),
        _item("memory busy", fmt.percent(device.memory_utilization_percent), "100 %"),
        _memory_temperature(device),
        _item("fan", fmt.percent(device.fan_percent), "100 %"),
        # The driver's counters of PCIe bytes wrap after 4 GiB, perhaps more than once between two samples.
        _rates("PCIe at least", device, before, seconds, {"out ": "pcie_tx_bytes", "in ": "pcie_rx_bytes"}),
        _rates("NVLink", device, before, seconds, {"out ": "nvlink_tx_bytes", "in ": "nvlink_rx_bytes"}),
        _power(device),
        *_memory_health(device),
        _mig(device),
        _item(
            "energy since driver load",
            fmt.joules(None if device.energy_mj is None else device.energy_mj / 1e3),
            "99.9 MJ",
        ),
        # Last: the length of the link changes, and that of the missing readings.
        _pcie(device),
        missing_item(tick, device.index, width - INDENT),
    ]
    return [item for item in items if item is not None]


def host_items(host: HostReading, before: HostReading | None, seconds: float) -> list[Item]:
    """Return the host's load, free memory, swap, storage and network, which a data loader uses too."""
    items = [
        _item("load", fmt.number(host.load_1m), "99.9"),
        _item("available", fmt.size(host.memory_available_bytes), WIDEST_SIZE),
        None
        if host.swap_used_bytes is None
        else Item("swap", fmt.size(host.swap_used_bytes), "warning" if host.swap_used_bytes else "text", WIDEST_SIZE),
        _rates("storage read", host, before, seconds, {"": "disk_read_bytes"}),
        _rates("written", host, before, seconds, {"": "disk_write_bytes"}),
        _rates("network in", host, before, seconds, {"": "network_received_bytes"}),
        _rates("out", host, before, seconds, {"": "network_sent_bytes"}),
    ]
    return [item for item in items if item is not None]


def missing_item(tick: Tick, index: int, width: int) -> Item | None:
    """Name the readings this GPU does not have, with the reason if it fits in `width`."""
    why = {key.partition(".")[2]: text for key, text in tick.missing.items() if key.startswith(f"gpu{index}.")}
    if not why:
        return None
    names = [name.replace("_", " ") for name in why]
    hidden_count = len(names) - MAX_NAMED_READINGS
    list_words = ", ".join(names[:MAX_NAMED_READINGS]) + (f" and {hidden_count} more" if hidden_count > 0 else "")
    label, reason = "no reading of", next(iter(why.values()))
    has_one_reason = all(text == reason for text in why.values())
    if has_one_reason and cell_len(f"{label} {list_words}: {reason}") <= width:
        return Item(label, f"{list_words}: {reason}", "muted")
    return Item(label, f"{list_words} (doctor says why)", "muted")


def item_lines(items: Sequence[Item], width: int, indent: int) -> list[Line]:
    """Lay the items out in lines of `width` cells; none is broken, and each has the room of its widest reading."""
    lines: list[Line] = []
    used_cells, gap = width + 1, 0
    for label, text, tone, widest, _ in items:
        length = cell_len(text)
        room = max(length, len(widest))
        if used_cells + gap + cell_len(label) + 1 + room > width:
            lines.append([(" " * indent, "text")])
            used_cells = indent
        else:
            lines[-1].append((" " * gap, "text"))
            used_cells += gap
        lines[-1] += [(f"{label} ", "muted"), (text, tone)]
        used_cells += cell_len(label) + 1 + length
        gap = 3 + room - length
    return lines


def _item(label: str, text: str, widest: str = "") -> Item | None:
    """Return the item; None if its text says that the reading is missing."""
    return None if text == fmt.ABSENT else Item(label, text, "text", widest)


def _throttled_items(last_minute: DeviceConditions | None) -> list[Item]:
    """Return the throttled shares of the last minute, by cause."""
    throttled_ms = {} if last_minute is None else last_minute.throttled_ms
    items: list[Item] = []
    for shade in SHADES:
        if (share := (throttled_ms.get(shade.cause) or 0.0) * 1e6 / MINUTE_NS) >= MIN_THROTTLED_SHARE:
            text = f"{fmt.fraction(share)} of the last minute"
            label, widest = f"{shade.letter} {shade.words}", "100 % of the last minute"
            items.append(Item(label, text, shade.tone, widest, is_throttling=True))
    return items


def _limits(device: DeviceReading) -> Item | None:
    """Return the slowdown temperatures: the driver's limit, then the hardware's."""
    limits = (("driver", device.gpu_max_temperature_c), ("hardware", device.slowdown_temperature_c))
    parts = [f"{fmt.celsius(limit)} ({source} limit)" for source, limit in limits if limit is not None]
    if device.degrees_to_slowdown_c is not None:
        left_c = device.degrees_to_slowdown_c
        parts.insert(0, f"in {left_c} °C" if left_c >= 0 else f"passed by {-left_c} °C")
        return Item("slowdown", ", ".join(parts), "text", ", ".join(["passed by 10 °C", *parts[1:]]))
    return Item("slowdown", ", ".join(parts)) if parts else None


def _clock(label: str, now_mhz: float | None, max_mhz: float | None) -> Item | None:
    if now_mhz is None:
        return None
    limit = fmt.megahertz(max_mhz)
    return Item(
        label, fmt.beside_limit(fmt.megahertz(now_mhz), limit), "text", fmt.beside_limit(fmt.megahertz(1000), limit)
    )


def _memory_temperature(device: DeviceReading) -> Item | None:
    if device.memory_temperature_c is None:
        return None
    max_c = device.memory_max_temperature_c
    is_hot = max_c is not None and device.memory_temperature_c >= max_c - NEAR_MAX_MEMORY_C
    limit = f" of {fmt.celsius(max_c)}" if max_c is not None else ""
    text = fmt.celsius(device.memory_temperature_c) + limit
    return Item("memory temp", text, "warning" if is_hot else "text", f"100 °C{limit}")


def _mig(device: DeviceReading) -> Item | None:
    return Item("MIG", "on: some readings are unavailable", "warning") if device.mig_mode else None


def _pcie(device: DeviceReading) -> Item | None:
    link = pcie_link(device)
    present = device.pcie_generation, device.pcie_width
    highest = device.pcie_generation_max, device.pcie_width_max
    is_old, is_narrow = (a is not None and b is not None and a < b for a, b in zip(present, highest, strict=True))
    if link == fmt.ABSENT or not (is_old or is_narrow):
        return _item("PCIe", link)
    if is_narrow or (device.gpu_utilization_percent or 0) >= BUSY_PERCENT:
        return Item("PCIe", f"{link}: below its maximum", "warning")
    return Item("PCIe", f"{link} while idle")


def _power(device: DeviceReading) -> Item | None:
    average, instant = device.power_average_w, device.power_instant_w
    readings = [
        (value, words) for value, words in ((average, "averaged over 1 s"), (instant, "now")) if value is not None
    ]
    text, widest = (
        ", ".join(f"{fmt.watts(value)} {words}" for value, words in parts)
        for parts in (readings, [(1000, words) for _, words in readings])
    )
    return Item("power", text, "text", widest) if text else None


def _memory_health(device: DeviceReading) -> list[Item]:
    """Return ECC errors and remapped rows; those that need a person are alarms."""
    corrected, uncorrected = device.ecc_corrected_errors, device.ecc_uncorrected_errors
    items: list[Item] = []
    if corrected is not None or uncorrected is not None:
        text = f"{fmt.count(uncorrected)} uncorrected, {fmt.count(corrected)} corrected"
        items.append(Item("ECC errors", text, "error" if uncorrected else "text"))
    rows = [device.remapped_rows_corrected, device.remapped_rows_uncorrected]
    if any(row is not None for row in rows):
        text = fmt.count(sum(row or 0 for row in rows))
        items.append(Item("remapped rows", text, "warning" if any(rows) else "text"))
    if device.remapped_rows_pending:
        items.append(Item("rows to remap", "waiting for a reset of the GPU", "error"))
    if device.remapped_rows_failed:
        items.append(Item("remapping", "failed: replace this GPU", "error"))
    return items


def _rates(
    label: str,
    newest: DeviceReading | HostReading,
    before: DeviceReading | HostReading | None,
    seconds: float,
    counters: Mapping[str, str],
) -> Item | None:
    """Return the growth a second of these counters, each after its word; None if none is read.

    `before` is the reading `seconds` earlier. A rate is absent until the next sample if its counter was reset or
    wrapped.
    """
    values = {word: getattr(newest, counter) for word, counter in counters.items()}
    if all(value is None for value in values.values()):
        return None
    rates: list[str] = []
    for word, last in values.items():
        first = getattr(before, counters[word], None)
        is_known = last is not None and first is not None and seconds > 0 and last >= first
        rates.append(word + fmt.bytes_per_second((last - first) / seconds if is_known else None))
    return Item(label, ", ".join(rates), "text", ", ".join(word + WIDEST_RATE for word in values))
