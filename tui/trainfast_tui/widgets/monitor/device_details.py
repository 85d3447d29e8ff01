"""The readings of one GPU beside its main row, each with its unit, and the host's rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from rich.cells import cell_len

from trainfast_runner.machine.gpus.health import BUSY_PERCENT
from trainfast_runner.records.tick import DeviceReading, HostReading, Tick
from trainfast_runner.results.device_conditions import DeviceConditions
from trainfast_tui.text import format as fmt
from trainfast_tui.text.lines import Line, Tone
from trainfast_tui.text.shades import SHADES
from trainfast_tui.text.topology import pcie_link

ReadingT = TypeVar("ReadingT")

MIN_THROTTLED_SHARE = 0.005
"""A smaller share of throttled time prints as 0 %."""
MAX_NAMED_READINGS = 4
"""At most this many of the readings that a GPU lacks are named."""
NEAR_MAX_MEMORY_C = 5
"""Chosen, not measured: memory this near its highest temperature, in degrees Celsius, is a warning."""
MINUTE_MS = 60_000
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


def device_items(
    device: DeviceReading,
    before: DeviceReading | None,
    seconds: float,
    last_minute: DeviceConditions | None,
    *,
    with_sm_clock: bool = False,
) -> list[Item]:
    """Return this GPU's readings; `before` is its reading `seconds` earlier, `last_minute` its last minute."""
    items = [
        *_throttled(last_minute),
        _limits(device),
        _clock("SM clock", device.sm_clock_mhz, device.sm_clock_max_mhz) if with_sm_clock else None,
        _clock("memory clock", device.memory_clock_mhz, device.memory_clock_max_mhz),
        _item("memory busy", fmt.percent(device.memory_utilization_percent), "100 %"),
        _memory_temperature(device),
        _item("fan", fmt.percent(device.fan_percent), "100 %"),
        # The driver's counters of PCIe bytes wrap after 4 GiB, perhaps more than once between two samples.
        _gpu_rates(
            "PCIe at least", device, before, seconds, lambda gpu: gpu.pcie_tx_bytes, lambda gpu: gpu.pcie_rx_bytes
        ),
        _gpu_rates("NVLink", device, before, seconds, lambda gpu: gpu.nvlink_tx_bytes, lambda gpu: gpu.nvlink_rx_bytes),
        _power(device),
        *_memory_health(device),
        _mig(device),
        _item(
            "energy since driver load",
            fmt.joules(None if device.energy_mj is None else device.energy_mj / 1e3),
            "99.9 MJ",
        ),
        # Last: its length changes with the link.
        _pcie(device),
    ]
    return [item for item in items if item is not None]


def alarm_items(device: DeviceReading) -> list[Item]:
    """Return the items of `device_items` that a person should see even in little room."""
    items = [_memory_temperature(device), *_memory_health(device), _mig(device), _pcie(device)]
    return [item for item in items if item is not None and item.is_alarm]


def host_items(host: HostReading, before: HostReading | None, seconds: float) -> list[Item]:
    """Return the host's load, free memory, swap, storage and network, which a data loader uses too."""
    items = [
        _item("load", fmt.number(host.load_1m), "99.9"),
        _item("available", fmt.size(host.memory_available_bytes), WIDEST_SIZE),
        None
        if host.swap_used_bytes is None
        else Item("swap", fmt.size(host.swap_used_bytes), "warning" if host.swap_used_bytes else "text", WIDEST_SIZE),
        _host_rate("storage read", host, before, seconds, lambda reading: reading.disk_read_bytes),
        _host_rate("written", host, before, seconds, lambda reading: reading.disk_write_bytes),
        _host_rate("network in", host, before, seconds, lambda reading: reading.network_received_bytes),
        _host_rate("out", host, before, seconds, lambda reading: reading.network_sent_bytes),
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


def _throttled(last_minute: DeviceConditions | None) -> list[Item]:
    """Return the throttled shares of the last minute, by cause."""
    if last_minute is None:
        return []
    items: list[Item] = []
    for shade in SHADES:
        share = (last_minute.throttled_ms.get(shade.cause) or 0.0) / MINUTE_MS
        if share >= MIN_THROTTLED_SHARE:
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


def _gpu_rates(
    label: str,
    device: DeviceReading,
    before: DeviceReading | None,
    seconds: float,
    sent: Callable[[DeviceReading], int | None],
    received: Callable[[DeviceReading], int | None],
) -> Item | None:
    """Return the rates of two of a GPU's counters; None if it has neither."""
    if sent(device) is None and received(device) is None:
        return None
    out, back = _per_second(device, before, seconds, sent), _per_second(device, before, seconds, received)
    text = f"out {fmt.bytes_per_second(out)}, in {fmt.bytes_per_second(back)}"
    return Item(label, text, "text", f"out {WIDEST_RATE}, in {WIDEST_RATE}")


def _host_rate(
    label: str,
    host: HostReading,
    before: HostReading | None,
    seconds: float,
    counter: Callable[[HostReading], int | None],
) -> Item | None:
    """Return the rate of one of the host's counters; None if it has no such counter."""
    if counter(host) is None:
        return None
    return Item(label, fmt.bytes_per_second(_per_second(host, before, seconds, counter)), "text", WIDEST_RATE)


def _per_second(
    newest: ReadingT, before: ReadingT | None, seconds: float, counter: Callable[[ReadingT], int | None]
) -> float | None:
    """Return a counter's growth per second; None until the next sample if it was reset or wrapped."""
    last, first = counter(newest), None if before is None else counter(before)
    if last is None or first is None or seconds <= 0 or last < first:
        return None
    return (last - first) / seconds
