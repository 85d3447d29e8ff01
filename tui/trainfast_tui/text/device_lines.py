"""A device in one line: each GPU with the readings that there is room for, and the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainfast_runner.machine.telemetry import throttle
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line, Tone, cell_len, line_length
from trainfast_tui.text.memory_words import no_memory_words

if TYPE_CHECKING:
    from trainfast_runner.records.tick import DeviceReading, HostReading


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
PERCENT_CELLS = 6
LOST_WORDS = "does not answer: "
BADGE_TONES: dict[str, Tone] = {"warning": "alarm", "info": "badge", "none": "muted"}
"""The tone of each severity, the worst first."""


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
    device: DeviceReading, width: int, is_used: bool, missing: Mapping[str, str], *, is_chosen: bool = False
) -> Line:
    """Return the row of a GPU; `missing` has the reasons for absent readings (`Tick.missing`)."""
    is_wide = width >= LONG_DEVICE_WORDS_FROM
    line: Line = [("▸" if is_used else " ", "primary"), (f"GPU {device.index} ", "cursor" if is_chosen else "title")]
    if width >= GPU_NAMES_FROM:
        name = (device.name or "").removeprefix("NVIDIA ")
        line.append((fmt.to_width(fmt.plain(name), GPU_NAME_CELLS) + " ", "muted"))
    if device.error is not None:
        room = width - line_length(line) - len(LOST_WORDS)
        # Without its cure if both do not fit.
        error = device.error if cell_len(device.error) <= room else device.error.partition(". ")[0]
        return [*line, (LOST_WORDS, "error"), (fmt.truncate(error, room), "error")]
    bar_cells = GPU_BAR_CELLS if width >= GPU_NAMES_FROM else LONG_GPU_BAR_CELLS if is_wide else SHORT_GPU_BAR_CELLS
    line += _bar(_share(device.memory_used_bytes, device.memory_total_bytes), bar_cells, NEARLY_FULL_SHARE)
    for text, narrow_cells, wide_cells, side, tone in _gpu_cells(device, is_wide, missing):
        line.append((fmt.to_width(text, wide_cells if is_wide else narrow_cells, side), tone))
    return line + _badges(device, width - line_length(line))


def _gpu_cells(
    device: DeviceReading, is_wide: bool, missing: Mapping[str, str]
) -> Iterator[tuple[str, int, int, fmt.Side, Tone]]:
    """Yield each reading of a row with its cells on a narrow and on a wide screen, its side and its tone."""
    used, total = fmt.size(device.memory_used_bytes), fmt.size(device.memory_total_bytes)
    if used == total == fmt.ABSENT:
        yield f" {no_memory_words(device.index, missing)}", 10, 22, "left", "muted"
    else:
        yield f" {used} of {total}" if is_wide else f" {used}", 10, 22, "left", "text"
    yield fmt.percent(device.gpu_utilization_percent), PERCENT_CELLS, PERCENT_CELLS, "right", "text"
    left_c = device.degrees_to_slowdown_c
    is_near = left_c is not None and left_c <= NEAR_SLOWDOWN_C
    yield fmt.celsius(device.temperature_c), 7, 7, "right", "warning" if is_near else "text"
    if left_c is None:
        yield "", 0, 19, "left", "text"
    elif left_c > 0:
        yield f" {left_c:.0f} below slowdown", 0, 19, "left", "muted"
    else:
        yield f" {-left_c:.0f} over slowdown" if left_c else " at slowdown", 0, 19, "left", "error"
    yield fmt.beside_limit(fmt.watts(device.power_w), fmt.watts(device.power_limit_w)), 12, 12, "right", "text"
    clock, max_clock = fmt.megahertz(device.sm_clock_mhz), fmt.megahertz(device.sm_clock_max_mhz)
    yield f"SM {fmt.beside_limit(clock, max_clock)}" if is_wide else clock, 9, 18, "right", "text"


def _badges(device: DeviceReading, room: int) -> Line:
    """Return the throttle reasons in words, the worst first; where they do not fit, the worst and how many more."""
    by_severity = list(BADGE_TONES)
    reasons = sorted(device.throttle_reasons or (), key=lambda name: by_severity.index(throttle.severity(name)))
    badges: Line = []
    for name in reasons:
        tone, words = BADGE_TONES[throttle.severity(name)], throttle.cause_text(name)
        badges += [("  ", "text"), (words if tone == "muted" else f" {words} ", tone)]
    if len(reasons) < 2 or line_length(badges) <= room:
        return badges
    hidden = f" +{len(reasons) - 1}"
    (gap, _), (words, tone) = badges[:2]
    return [(gap, "text"), (fmt.truncate(words, room - len(gap + hidden)), tone), (hidden, tone)]


def _share(used: float | None, total: float | None) -> float | None:
    return None if used is None or not total else used / total


def _bar(share: float | None, width: int, warns_from: float = math.inf) -> Line:
    """Return a bar that warns from the share `warns_from` on; a busy CPU is no reason to warn."""
    tone: Tone = "warning" if share is not None and share >= warns_from else "primary"
    return bar(share, width, tone)


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
