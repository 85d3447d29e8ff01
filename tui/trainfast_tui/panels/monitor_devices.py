"""The monitor's devices: each GPU with all its readings, and the host; or the CPU, and the reason for no GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from trainfast_runner.machine.device_events import BUSY_PERCENT
from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.throttle import causes_of
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.tick import DeviceReading, HostReading, Tick
from trainfast_runner.results.device_conditions import DeviceConditions, StepJoin
from trainfast_runner.units import counted
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.device_lines import gpu_line, host_line
from trainfast_tui.text.event_words import SHADES, severity_rank, shade_of
from trainfast_tui.text.format import Line, Tone, labelled, line_length, moved_cursor, packed, paragraph
from trainfast_tui.text.topology import pcie_link

INDENT = 6
ROW_HAS_CLOCK_FROM = 120
"""Columns from which a GPU's row has its highest clock; below, its details have it."""
STANDBY_WORDS = " standby {"
"""In the command line of a process that waits for a run (`running.standby`)."""
RATE_TICKS = 5
"""Rates are taken over this many samples."""


class MonitorDevices(PaintedWidget):
    """The throttled GPUs, then a row for each GPU with as many readings as fit; the chosen GPU shows all."""

    _snapshot: Snapshot | None = None
    _used_uuids: frozenset[str] = frozenset()
    _chosen = 0
    _lines_for = (0, 0)
    """Columns and most rows that the lines were made for, once: they are asked for twice a frame."""
    _counted_ns = 0

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._last_minute: dict[str | None, DeviceConditions] = {}

    def set_snapshot(self, snapshot: Snapshot, used_uuids: frozenset[str]) -> None:
        """Take a snapshot without drawing it: the screen divides its rows first. `used_uuids` are a live run's GPUs."""
        self._snapshot, self._used_uuids, self._lines_for = snapshot, used_uuids, (0, 0)
        if (tick := snapshot.tick) is not None and abs(tick.t_ns - self._counted_ns) >= MINUTE_NS // 15:
            self._last_minute, self._counted_ns = _last_minute(snapshot, tick), tick.t_ns

    def action_choose(self, by: int) -> None:
        """Show all readings of the next GPU, or of the one before."""
        tick = self._snapshot.tick if self._snapshot is not None else None
        self._chosen = moved_cursor(self._chosen, by, len(tick.devices) if tick is not None else 0)
        self._lines_for = (0, 0)
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        snapshot = self._snapshot
        tick = snapshot.tick if snapshot is not None else None
        if snapshot is None or tick is None:
            return [[("monitor", "title"), ("   looking…", "muted")], [("looking at the machine…", "muted")]]
        if self._lines_for[0] != width or not len(self._lines) <= height <= self._lines_for[1]:
            head = _head_line(tick, snapshot.machine_xids, width)
            self._lines = [head, *self._device_lines(snapshot, tick, width, height - 1)]
            self._lines_for = (width, height)
        return self._lines

    def _device_lines(self, snapshot: Snapshot, tick: Tick, width: int, height: int) -> list[Line]:
        before, seconds = _before(snapshot, tick)
        host_head = host_line(tick.host, snapshot.cpu_percent, width, bool(tick.devices))
        items_of_host = host_items(tick.host, before.host if before is not None else None, seconds)
        host = [host_head, *item_lines([*items_of_host, _standby(snapshot)], width)]
        if not tick.devices:
            return [*host, *(line for words in _why_no_gpu(tick) for line in paragraph(words, width, "muted"))]
        items = [gpu_items(snapshot, device, self._last_minute, width) for device in tick.devices]
        chosen = min(self._chosen, len(tick.devices) - 1)

        def head(device: DeviceReading, *, is_chosen: bool = False) -> Line:
            return gpu_line(device, width, device.uuid in self._used_uuids, tick.missing, is_chosen=is_chosen)

        heads = [head(device) for device in tick.devices]
        details = [
            item_lines(own, width) if device.error is None else _why_silent(device.error, head, width)
            for device, head, own in zip(tick.devices, heads, items, strict=True)
        ]
        if sum(map(len, [heads, host, *details])) > height:
            # The chosen GPU shows all that fits, its alarms first, and each other one a line of its alarms.
            heads[chosen] = head(tick.devices[chosen], is_chosen=True)
            host, room = host[:1], height - len(heads) - 1
            for index, own in enumerate(items):
                if index != chosen:
                    alarms = [item for item in own if item.is_alarm]
                    details[index] = item_lines(alarms, width)[: 1 if room > 0 else 0]
                    room -= len(details[index])
            if len(details[chosen]) > room and items[chosen]:
                alarms_first = sorted(items[chosen], key=lambda item: item.is_alarm, reverse=True)
                details[chosen] = item_lines(alarms_first, width)
            details[chosen] = details[chosen][: max(0, room)]
        return [line for head, rows in zip(heads, details, strict=True) for line in (head, *rows)] + host


def _head_line(tick: Tick, xids: Sequence[Event], width: int) -> Line:
    """Return the throttled and the lost GPUs, and the newest Xid error."""
    line: Line = [("monitor", "title")]
    if tick.devices:
        line += [(f"  {counted(len(tick.devices), 'GPU')}", "text")]
        worded = [*line, *_throttled(tick, with_words=True)]
        line = worded if line_length(worded) <= width else [*line, *_throttled(tick, with_words=False)]
    return line + [(f"   GPU {xid.device}: Xid error {xid.detail}", "error") for xid in xids[-1:]]


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


def _why_no_gpu(tick: Tick) -> list[str]:
    failure = tick.missing.get("nvml", binding.NO_DEVICES)
    advice = "Runs use the CPU; with an NVIDIA card in this machine they need devices=cpu."
    if binding.comes_from_a_driver(failure):
        advice = "devices=cpu trains without one;"
    return [f"no GPU: {failure}.", f"{advice} trainfast-tui doctor says more."]


MIN_THROTTLED_SHARE = 0.005
"""A smaller share of throttled time prints as 0 %."""
NEAR_MAX_MEMORY_C = 5
"""Chosen, not measured: memory this near its highest temperature, in degrees Celsius, is a warning."""
MINUTE_NS, MINUTE_SAMPLES = 60_000_000_000, 6
"""The time over which throttling is counted, and the samples of it that are joined: counters have the rest."""
ITEM_GAP, ITEM_STOP = 3, 8
"""The least cells between two items, and the cells of a tab stop: a figure may grow to it and move no later item."""


class Item(NamedTuple):
    """A reading with its label; an empty or an absent one is not shown."""

    label: str
    text: str
    """The reading with its unit."""
    tone: Tone = "text"
    """The tone of the reading; in the tone of a warning or an error a person should see it even in little room."""

    @property
    def is_alarm(self) -> bool:
        """True for a warning or an error."""
        return self.tone in ("warning", "error")


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
    rates = partial(_rates, device, before, seconds)
    sm_clock = _of_max(fmt.megahertz, device.sm_clock_mhz, device.sm_clock_max_mhz)
    memory_c, memory_max_c = device.memory_temperature_c, device.memory_max_temperature_c
    is_hot = memory_c is not None and memory_max_c is not None and memory_c >= memory_max_c - NEAR_MAX_MEMORY_C
    powers = ((device.power_average_w, "averaged over 1 s"), (device.power_instant_w, "now"))
    corrected, uncorrected = device.ecc_corrected_errors, device.ecc_uncorrected_errors
    has_ecc = corrected is not None or uncorrected is not None
    remapped = [device.remapped_rows_corrected, device.remapped_rows_uncorrected]
    return [
        *_throttled_items(last_minute.get(device.uuid)),
        Item("slowdown", _limits(device)),
        Item("SM clock", sm_clock if width < ROW_HAS_CLOCK_FROM else ""),
        Item("memory clock", _of_max(fmt.megahertz, device.memory_clock_mhz, device.memory_clock_max_mhz)),
        Item("memory busy", fmt.percent(device.memory_utilization_percent)),
        Item("memory temp", _of_max(fmt.celsius, memory_c, memory_max_c), "warning" if is_hot else "text"),
        Item("fan", fmt.percent(device.fan_percent)),
        # The driver's counters of PCIe bytes wrap after 4 GiB, perhaps more than once between two samples.
        Item("PCIe at least", rates({"out ": "pcie_tx_bytes", "in ": "pcie_rx_bytes"})),
        Item("NVLink", rates({"out ": "nvlink_tx_bytes", "in ": "nvlink_rx_bytes"})),
        Item("power", ", ".join(f"{fmt.watts(value)} {words}" for value, words in powers if value is not None)),
        Item(
            "ECC errors",
            f"{fmt.count(uncorrected)} uncorrected, {fmt.count(corrected)} corrected" if has_ecc else "",
            "error" if uncorrected else "text",
        ),
        Item(
            "remapped rows",
            "" if remapped == [None, None] else fmt.count(sum(row or 0 for row in remapped)),
            "warning" if any(remapped) else "text",
        ),
        Item("rows to remap", "waiting for a reset of the GPU" if device.remapped_rows_pending else "", "error"),
        Item("remapping", "failed: replace this GPU" if device.remapped_rows_failed else "", "error"),
        Item("MIG", "on: some readings are unavailable" if device.mig_mode else "", "warning"),
        Item("energy since driver load", fmt.joules(None if device.energy_mj is None else device.energy_mj / 1e3)),
        # Last: the length of the link changes.
        _pcie(device),
    ]


def host_items(host: HostReading, before: HostReading | None, seconds: float) -> list[Item]:
    """Return the host's load, free memory, swap, storage and network, which a data loader uses too."""
    rates = partial(_rates, host, before, seconds)
    return [
        Item("load", fmt.number(host.load_1m)),
        Item("available", fmt.size(host.memory_available_bytes)),
        Item("swap", fmt.size(host.swap_used_bytes), "warning" if host.swap_used_bytes else "text"),
        Item("storage read", rates({"": "disk_read_bytes"})),
        Item("written", rates({"": "disk_write_bytes"})),
        Item("network in", rates({"": "network_received_bytes"})),
        Item("out", rates({"": "network_sent_bytes"})),
    ]


def _standby(snapshot: Snapshot) -> Item:
    """Return the memory of the training process that waits for a run; a run that took it keeps its command line."""
    rows = snapshot.processes if snapshot.live_run is None else ()
    waiting_bytes = sum(row.memory_rss_bytes or 0 for row in rows or () if STANDBY_WORDS in row.command)
    return Item("standby", fmt.size(waiting_bytes) if waiting_bytes else "")


def item_lines(items: Sequence[Item], width: int) -> list[Line]:
    """Lay the items out in lines of `width` cells."""
    shown = [item for item in items if item.text not in ("", fmt.ABSENT)]
    entries: list[Line] = [[(f"{label} ", "muted"), (text, tone)] for label, text, tone in shown]
    return packed(entries, width, indent=INDENT, gap=ITEM_GAP, stop=ITEM_STOP)


def _throttled_items(last_minute: DeviceConditions | None) -> list[Item]:
    """Return the throttled shares of the last minute, by cause; the GPU's row has their signs."""
    throttled_ms = {} if last_minute is None else last_minute.throttled_ms
    shares = [(shade, (throttled_ms.get(shade.cause) or 0.0) * 1e6 / MINUTE_NS) for shade in SHADES]
    return [
        Item(f"{shade.letter} {shade.words}", f"{fmt.fraction(share)} of the last minute")
        for shade, share in shares
        if share >= MIN_THROTTLED_SHARE
    ]


def _limits(device: DeviceReading) -> str:
    """Return the slowdown temperatures: the driver's limit, then the hardware's."""
    left_c = device.degrees_to_slowdown_c
    limits = (("driver", device.gpu_max_temperature_c), ("hardware", device.slowdown_temperature_c))
    parts = [f"{fmt.celsius(limit)} ({source} limit)" for source, limit in limits if limit is not None]
    if left_c is not None:
        parts.insert(0, f"in {left_c} °C" if left_c >= 0 else f"passed by {-left_c} °C")
    return ", ".join(parts)


def _of_max(format_value: fmt.Formatter, now: float | None, maximum: float | None) -> str:
    """Return a reading beside its maximum; empty without a reading."""
    return "" if now is None else fmt.beside_limit(format_value(now), format_value(maximum))


def _pcie(device: DeviceReading) -> Item:
    link = pcie_link(device)
    present = device.pcie_generation, device.pcie_width
    highest = device.pcie_generation_max, device.pcie_width_max
    is_old, is_narrow = (a is not None and b is not None and a < b for a, b in zip(present, highest, strict=True))
    if is_narrow or (is_old and (device.gpu_utilization_percent or 0) >= BUSY_PERCENT):
        return Item("PCIe", f"{link}: below its maximum", "warning")
    return Item("PCIe", f"{link} while idle" if is_old else link)


def _rates(
    newest: DeviceReading | HostReading,
    before: DeviceReading | HostReading | None,
    seconds: float,
    counters: Mapping[str, str],
) -> str:
    """Return the growth a second of these counters, each after its word; empty if none is read.

    `before` is the reading `seconds` earlier. A rate is absent until the next sample if its counter was reset or
    wrapped.
    """
    rates: list[str] = []
    for word, counter in counters.items():
        last, first = getattr(newest, counter), getattr(before, counter, None)
        is_known = last is not None and first is not None and seconds > 0 and last >= first
        rates += [word + fmt.bytes_per_second((last - first) / seconds if is_known else None)] * (last is not None)
    return ", ".join(rates)
