"""The devices at the top of the screen, a row each: the GPUs and the host, or the CPU as the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len

from trainfast_runner.machine.telemetry import binding, throttle
from trainfast_runner.machine.telemetry.throttle import degrees_left
from trainfast_runner.units import counted
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line, Tone, line_length
from trainfast_tui.text.memory_words import no_memory_words

if TYPE_CHECKING:
    from trainfast_runner.records.tick import DeviceReading, HostReading, Tick


LONG_DEVICE_WORDS_FROM, GPU_NAMES_FROM = 120, 150
"""Columns from which words and bars are long, and from which a GPU's row has its name."""
NEARLY_FULL_SHARE = 0.93
"""Chosen, not measured: a bar of memory above this share is a warning."""
NEAR_SLOWDOWN_C = 5
"""Chosen, not measured: a GPU this near its slowdown temperature, in degrees Celsius, is a warning."""
LONG_HOST_BAR_CELLS, SHORT_HOST_BAR_CELLS = 18, 8
GPU_BAR_CELLS, LONG_GPU_BAR_CELLS, SHORT_GPU_BAR_CELLS = 16, 10, 6
"""Cells of a GPU's bar of memory: beside its name, on a wide screen without names, and on a narrow one."""
GPU_NAME_CELLS = 18
LONG_MEMORY_CELLS, SHORT_MEMORY_CELLS = 22, 10
PERCENT_CELLS, POWER_CELLS = 6, 12
LONG_CLOCK_CELLS, SHORT_CLOCK_CELLS = 18, 9
TEMPERATURE_CELLS, SLOWDOWN_CELLS = 7, 19
"""Cells of a GPU's temperature, and of the words on its slowdown."""
SHORT_WORDS = {
    "sw_power_cap": "power limit",
    "hw_slowdown": "hardware slowdown",
    "sw_thermal": "thermal slowdown",
    "hw_thermal": "hardware thermal",
    "hw_power_brake": "power brake",
    "application_clocks": "application clocks",
    "sync_boost": "sync boost",
    "display_clock": "display clock",
}
BADGE_TONES: dict[str, Tone] = {"warning": "alarm", "info": "badge", "none": "muted"}
"""The tone of each severity, the worst first."""


class DevicesPanel(PaintedWidget):
    """Shows the newest tick in as many rows as it needs."""

    _snapshot: Snapshot | None = None

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Show the devices of this snapshot."""
        self._snapshot, tick = snapshot, snapshot.tick
        self.set_height(1 + max(1, len(tick.devices) if tick is not None else 0))
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        snapshot = self._snapshot
        tick = snapshot.tick if snapshot is not None else None
        if snapshot is None or tick is None:
            return [[("devices: looking…", "muted")]]
        used, lost_s = used_uuids(snapshot.run), snapshot.lost_s()
        return [
            *(
                gpu_line(device, width, device.uuid in used, lost_s.get(device.index), tick.missing)
                for device in tick.devices
            ),
            *_host_lines(snapshot, tick, width),
        ]


def _host_lines(snapshot: Snapshot, tick: Tick, width: int) -> list[Line]:
    long_words, host, has_gpu = width >= LONG_DEVICE_WORDS_FROM, tick.host, bool(tick.devices)
    head = host_line(host, snapshot.cpu_percent, width, has_gpu)
    run = host.run
    if run is not None and snapshot.run is not None and snapshot.run.is_live:
        threads = fmt.ABSENT if run.threads is None else counted(run.threads, "thread")
        tail: Line = [
            (" this run: " if long_words else " run: ", "muted"),
            (f"{fmt.percent(run.cpu_percent)} of a core", "text"),
            ("  process memory ", "muted"),
            (fmt.size(run.memory_rss_bytes), "text"),
            # On a CPU a `memory_limit` beside this figure counts the training alone.
            (" with libraries  " if long_words and not has_gpu else "  ", "muted"),
            (counted(run.processes, "process", "processes"), "text"),
            (f", {threads}" if long_words and not has_gpu else "", "text"),
        ]
    elif has_gpu:
        tail = []
    else:
        tail = [(" no GPU", "muted"), *_driver_failure(tick)]
    if has_gpu:
        return [[*head, ("  ", "text"), *tail]]
    return [head, tail]


def _driver_failure(tick: Tick) -> Line:
    """Name the reason a driver shows no GPU; a machine without a driver has no problem."""
    without_driver = binding.LIBRARY_FAILURES[binding.LIBRARY_NOT_FOUND].sentence
    failure = tick.missing.get("nvml", without_driver)
    return [] if failure == without_driver else [(f": {failure}", "warning")]


def host_line(host: HostReading, cpu_percent: float | None, width: int, has_gpu: bool) -> Line:
    """Return the line of the machine's processor and memory."""
    cells = LONG_HOST_BAR_CELLS if width >= LONG_DEVICE_WORDS_FROM else SHORT_HOST_BAR_CELLS
    used, total = host.memory_used_bytes, host.memory_total_bytes
    cores = f" {host.cpu_count} cores" if host.cpu_count else ""
    line: Line = [(fmt.to_width("CPU", 4) if has_gpu else "CPU", "title"), (f"{cores} ", "muted")]
    line += _bar(_share(cpu_percent, 100), cells)
    line += [(fmt.to_width(fmt.percent(cpu_percent), PERCENT_CELLS, "right"), "text"), ("   memory ", "muted")]
    line += _bar(_share(used, total), cells, NEARLY_FULL_SHARE)
    line += [(f" {fmt.size(used)} of {fmt.size(total)}", "text")]
    return [*line, (f"   {fmt.celsius(host.temperature_c)}", "text")] if host.temperature_c is not None else line


def gpu_line(
    device: DeviceReading,
    width: int,
    is_used: bool,
    lost_s: float | None,
    missing: Mapping[str, str],
    *,
    is_chosen: bool = False,
) -> Line:
    """Return the row of a GPU.

    `lost_s` is the time in seconds since the first sample in which it did not answer, `missing` the reasons for absent
    readings (`Tick.missing`).
    """
    long_words = width >= LONG_DEVICE_WORDS_FROM
    line: Line = [("▸" if is_used else " ", "primary"), (f"GPU {device.index} ", "cursor" if is_chosen else "title")]
    if width >= GPU_NAMES_FROM:
        name = (device.name or "").removeprefix("NVIDIA ")
        line.append((fmt.to_width(fmt.plain(name), GPU_NAME_CELLS) + " ", "muted"))
    if device.error is not None:
        word = "silent" if binding.takes_long(device.error) else "lost"
        lost_words = f"{word} for {fmt.duration(lost_s)}: " if lost_s is not None else "not answering: "
        room = width - line_length(line) - cell_len(lost_words)
        return [*line, (lost_words, "error"), (_in_short(device.error, room), "error")]
    share = _share(device.memory_used_bytes, device.memory_total_bytes)
    bar_cells = LONG_GPU_BAR_CELLS if long_words else SHORT_GPU_BAR_CELLS
    line += _bar(share, GPU_BAR_CELLS if width >= GPU_NAMES_FROM else bar_cells, NEARLY_FULL_SHARE)
    line += _memory_pieces(device, long_words, missing)
    line.append((fmt.to_width(fmt.percent(device.gpu_utilization_percent), PERCENT_CELLS, "right"), "text"))
    line += _temperature_pieces(device, long_words)
    power = fmt.beside_limit(fmt.watts(device.power_w), fmt.watts(device.power_limit_w))
    line.append((fmt.to_width(power, POWER_CELLS, "right"), "text"))
    clock = fmt.megahertz(device.sm_clock_mhz)
    if long_words:
        clock_words = f"SM {fmt.beside_limit(clock, fmt.megahertz(device.sm_clock_max_mhz))}"
        line.append((fmt.to_width(clock_words, LONG_CLOCK_CELLS, "right"), "text"))
    else:
        line.append((fmt.to_width(clock, SHORT_CLOCK_CELLS, "right"), "text"))
    return line + _badges(device, width - line_length(line))


def _in_short(error: str, room: int) -> str:
    """Return the error in `room` cells, without its cure if both do not fit."""
    return error if cell_len(error) <= room else fmt.truncate(error.partition(". ")[0], room)


def _memory_pieces(device: DeviceReading, long_words: bool, missing: Mapping[str, str]) -> Line:
    used, total = fmt.size(device.memory_used_bytes), fmt.size(device.memory_total_bytes)
    cells = LONG_MEMORY_CELLS if long_words else SHORT_MEMORY_CELLS
    if used == total == fmt.ABSENT:
        return [(fmt.to_width(f" {no_memory_words(device.index, missing)}", cells), "muted")]
    return [(fmt.to_width(f" {used} of {total}" if long_words else f" {used}", cells), "text")]


def _temperature_pieces(device: DeviceReading, long_words: bool) -> Line:
    text = fmt.to_width(fmt.celsius(device.temperature_c), TEMPERATURE_CELLS, "right")
    left_c = degrees_left(device)
    tone: Tone = "warning" if left_c is not None and left_c <= NEAR_SLOWDOWN_C else "text"
    if left_c is None:
        return [(text, tone), (" " * (SLOWDOWN_CELLS if long_words else 0), "text")]
    if long_words:
        words = f" {abs(left_c):.0f} {'below' if left_c > 0 else 'over'} slowdown" if left_c else " at slowdown"
        return [(text, tone), (fmt.to_width(words, SLOWDOWN_CELLS), "muted" if left_c > 0 else "error")]
    return [(text, tone)]


def _badges(device: DeviceReading, room: int) -> Line:
    """Return the throttle reasons in words, the worst first; none for a GPU that is not throttled."""
    by_severity = list(BADGE_TONES)
    reasons = sorted(device.throttle_reasons or (), key=lambda name: by_severity.index(throttle.severity(name)))
    tones = [BADGE_TONES[throttle.severity(name)] for name in reasons]
    words = [throttle.cause_text(name) for name in reasons]
    if sum(cell_len(word) + 4 for word in words) > room:
        words = [SHORT_WORDS.get(name, word) for name, word in zip(reasons, words, strict=True)]
    line: Line = []
    for index, (word, tone) in enumerate(zip(words, tones, strict=True)):
        hidden = f" +{len(words) - index - 1}" if index + 1 < len(words) else ""
        badge = word if tone == "muted" else f" {word} "
        gap = " " * min(2, max(0, room - cell_len(badge) - cell_len(hidden)))
        if line and not gap:
            return [*line, (f" +{len(words) - index}", tone)]
        line += [(gap or " ", "text"), (badge, tone)]
        room -= cell_len(gap) + cell_len(badge)
    return line


def _share(used: float | None, total: float | None) -> float | None:
    return None if used is None or not total else used / total


def _bar(share: float | None, width: int, warns_from: float = math.inf) -> Line:
    """Return a bar that warns from the share `warns_from` on; a busy CPU is no reason to warn."""
    tone: Tone = "warning" if share is not None and share >= warns_from else "primary"
    return bar(share, width, tone)


MEASURED_SIGN = "━"
"""The sign of a measurement below the bar of its prediction."""
LONG_FORM_COLUMNS, LONG_FORM_LINES = 40, 34
"""The least columns of a panel in its long form, with title and legend, and the least lines of the screen."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float | None, width: int, tone: Tone = "primary") -> Line:
    """Return a bar of `width` cells, filled to a share that is clamped to 0..1; None fills none."""
    full, eighths = divmod(round(min(max(share or 0.0, 0.0), 1.0) * width * 8), 8)
    filled_cells = "█" * full + (_EIGHTHS[eighths] if eighths else "")
    return [(filled_cells, tone), ("·" * (width - len(filled_cells)), "muted")]


def stacked_cells(values: Sequence[float], width: int) -> list[int]:
    """Return the cells of each part of a stacked bar, `width` in sum.

    Every value above zero gets at least a cell while there is room; values that are all zero get none.
    """
    total = sum(values)
    if not total:
        return [0] * len(values)
    exact_cells = [value / total * width for value in values]
    cells = [max(1, int(part)) if part > 0 else 0 for part in exact_cells]
    by_rest = sorted(range(len(values)), key=lambda i: exact_cells[i] - cells[i], reverse=True)
    while sum(cells) < width:
        for index in by_rest:
            if exact_cells[index] > 0 and sum(cells) < width:
                cells[index] += 1
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    return cells


def has_long_form(width: int, screen_height: int) -> bool:
    """True if a panel of this width has room for its long form."""
    return width >= LONG_FORM_COLUMNS and screen_height >= LONG_FORM_LINES
