"""Numbers with their units, and untrusted text made safe to show.

An absent reading is `None` and reads as `ABSENT`, never as zero. A value that is not finite is absent too.
"""

import math
import re
from collections.abc import Callable
from typing import Literal

from rich.cells import cell_len, set_cell_size

from trainfast_runner import plain_text, units

Formatter = Callable[[float | None], str]
"""Turns a value, or None when absent, into text with its unit."""

ABSENT = "–"
"""The sign of a missing reading."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def number(value: float | None) -> str:
    """Return three significant digits, from 1,000 on whole numbers: `0.0123`, `12.0`, `1,234`; no unit.

    Below 0.0005 the figure has an exponent and two digits; from 1e15 on it has an exponent.
    """
    if (value := _finite(value)) is None:
        return ABSENT
    magnitude = abs(value)
    if magnitude < 0.0005:
        return "0" if magnitude == 0 else f"{value:.1e}"
    if magnitude < 99.95:
        return f"{value:#.3g}"
    return f"{value:,.0f}" if magnitude < 1e15 else f"{value:.2e}"


def interval(low: float, high: float) -> str:
    """Return the two ends of an interval: `120 to 126`; no unit."""
    return f"{number(low)} to {number(high)}"


def size(size_bytes: float | None) -> str:
    """Return bytes in the largest binary unit that keeps the figure at 1 or more: `39.5 GiB`."""
    if (value := _finite(size_bytes)) is None:
        return ABSENT
    unit = 0
    while abs(value) >= 1023.5 and unit < len(_BINARY_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.0f} B" if unit == 0 else f"{number(value)} {_BINARY_UNITS[unit]}"


_RAW_BYTES = re.compile(r"\b(\d{7,19}) bytes\b(?! \()")


def with_sizes(message: str) -> str:
    """Return the message with a size after each long byte count: `6442450944 bytes (6.00 GiB)`."""
    return _RAW_BYTES.sub(lambda match: f"{match[0]} ({size(int(match[1]))})", message)


def count(value: float | None) -> str:
    """Return a whole number with thousands separated: `12,345`."""
    value = _finite(value)
    return ABSENT if value is None else f"{value:,.0f}"


def per_second(value: float | None, noun: str) -> str:
    """Return a rate: `12.3 samples/s`."""
    return ABSENT if _finite(value) is None else f"{number(value)} {noun}/s"


def bytes_per_second(value: float | None) -> str:
    """Return bytes a second in binary units: `1.25 GiB/s`."""
    return ABSENT if _finite(value) is None else f"{size(value)}/s"


def milliseconds(value_ms: float | None) -> str:
    """Return milliseconds, kept in milliseconds so that a column of them can be compared: `12.3 ms`."""
    return ABSENT if _finite(value_ms) is None else f"{number(value_ms)} ms"


def watts(value_w: float | None) -> str:
    """Return whole watts: `251 W`."""
    value = _finite(value_w)
    return ABSENT if value is None else f"{value:.0f} W"


def joules(value_j: float | None) -> str:
    """Return joules, or kJ and MJ when large: `12.3 kJ`."""
    if (value := _finite(value_j)) is None:
        return ABSENT
    for factor, unit in ((1e6, "MJ"), (1e3, "kJ")):
        if abs(value) >= factor * 0.9995:
            return f"{number(value / factor)} {unit}"
    return f"{number(value)} J"


def celsius(value_c: float | None) -> str:
    """Return whole degrees Celsius: `64 °C`."""
    value = _finite(value_c)
    return ABSENT if value is None else f"{value:.0f} °C"


def megahertz(value_mhz: float | None) -> str:
    """Return whole megahertz without separators, as nvidia-smi prints clocks: `1980 MHz`."""
    value = _finite(value_mhz)
    return ABSENT if value is None else f"{value:.0f} MHz"


def beside_limit(reading: str, limit: str) -> str:
    """Return a reading beside its limit, with the unit once: `300/400 W`; alone if there is no limit or no reading."""
    if limit == ABSENT:
        return reading
    if reading == ABSENT:
        return f"{reading}/{limit}"
    value, _, unit = reading.partition(" ")
    return f"{value}/{limit}" if limit.endswith(f" {unit}") else f"{reading} / {limit}"


def percent(value_percent: float | None, digits: int = 0) -> str:
    """Return a figure that is already in percent: `98 %`."""
    value = _finite(value_percent)
    return ABSENT if value is None else f"{value:.{digits}f} %"


def fraction(value: float | None, digits: int = 0) -> str:
    """Return a share from 0 to 1 in percent: `98 %`."""
    return percent(None if value is None else 100 * value, digits)


def percent_change(new: float | None, old: float | None) -> float | None:
    """Return the change from `old` to `new` in percent; None if either is absent or `old` is zero."""
    after, before = _finite(new), _finite(old)
    return None if after is None or not before else 100 * (after - before) / abs(before)


def signed_percent(value_percent: float | None) -> str:
    """Return a change in percent with its sign: `+3.4 %`, `+13,197 %`; a change that rounds away reads `0.0 %`."""
    if (value := _finite(value_percent)) is None:
        return ABSENT
    text = f"{value:+.1f}" if abs(value) < 999.95 else f"{value:+,.0f}"
    return "0.0 %" if text in ("+0.0", "-0.0") else f"{text} %"


def signed_interval(low_percent: float, high_percent: float) -> str:
    """Return the two ends of a change in percent: `+1.4 to +5.5 %`."""
    return f"{signed_percent(low_percent).removesuffix(' %')} to {signed_percent(high_percent)}"


def delta(new: float | None, old: float | None, formatter: Formatter) -> str:
    """Return the difference of `new` to `old` in the formatter's unit and in percent: `-12.3 ms (-8.0 %)`.

    The percentage is left out if `old` is zero; the whole is `ABSENT` if either side is absent.
    """
    after, before = _finite(new), _finite(old)
    if after is None or before is None:
        return ABSENT
    change = after - before
    text = formatter(abs(change))
    if change:
        text = ("+" if change > 0 else "-") + text
    return f"{text} ({signed_percent(percent_change(after, before))})" if before else text


def elapsed(since_ns: int | None, now_ns: int) -> str:
    """Return the time from `since_ns` to `now_ns` in whole seconds; empty if `since_ns` is None."""
    return "" if since_ns is None else duration(max(0, now_ns - since_ns) // 1_000_000_000)


def duration(seconds: float | None) -> str:
    """Return a length of time in its two largest units, as `units.duration` does; `ABSENT` if unknown."""
    value = _finite(seconds)
    return ABSENT if value is None else units.duration(value)


def plain(text: str, width: int | None = None) -> str:
    """Return untrusted text as one harmless line, of at most `width` terminal cells if that is given.

    A cut is marked by `…`.
    """
    text = plain_text.plain(text)
    return text if width is None else truncate(text, width)


def truncate(text: str, width: int) -> str:
    """Return text of at most `width` terminal cells; a cut is marked by `…`."""
    if width <= 0:
        return ""
    if text.isascii() and text.isprintable():
        return text if len(text) <= width else text[: width - 1] + "…"
    if cell_len(text) <= width:
        return text
    cut = set_cell_size(text, width - 1)
    # A joiner at the cut counts one cell too few, and widths of pieces do not add up beside one.
    while cell_len(cut + "…") > width:
        cut = cut[:-1]
    return cut + "…"


def to_width(text: str, width: int, align: Literal["left", "right"] = "left") -> str:
    """Return text of exactly `width` terminal cells: cut with `…`, or padded with spaces."""
    text = truncate(text, width)
    padding = " " * (width - cell_len(text))
    return text + padding if align == "left" else padding + text
