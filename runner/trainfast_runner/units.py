"""Bytes, counts, GPUs, durations and chances in the runner's sentences, and the grammar of the `devices` knob.

Bytes are in binary units, thousands separated.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterable, Sequence

from trainfast_runner.errors import UserError


def mebibytes(size_bytes: float) -> str:
    """Whole MiB, for sizes close to each other: `1,234 MiB`."""
    return f"{size_bytes / 2**20:,.0f} MiB"


def gibibytes(size_bytes: float) -> str:
    """Tenths of a GiB, for a whole device or host: `39.5 GiB`."""
    return f"{size_bytes / 2**30:,.1f} GiB"


def compared_size(size_bytes: float) -> str:
    """A size beside another that it may nearly equal, as a peak and its limit: `2,048 MiB`, `39.5 GiB`.

    Below 10 GiB a tenth of a GiB is over 1 % of it, too coarse for the difference.
    """
    return gibibytes(size_bytes) if size_bytes >= 10 * 2**30 else mebibytes(size_bytes)


def short_gibibytes(size_bytes: float) -> str:
    """Three digits of a GiB, for an estimate of a layer or a model: `0.0123 GiB`, `39.5 GiB`; tenths from 1,000 on."""
    return gibibytes(size_bytes) if size_bytes >= 1000 * 2**30 else f"{size_bytes / 2**30:.3g} GiB"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: `1 step`, `12,345 steps`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def gpus_text(indexes: Sequence[int]) -> str:
    """GPUs by their NVML indexes: `GPU 0`, `GPUs 0 and 1`, `GPUs 0, 1 and 2`; needs at least one."""
    *others, last = map(str, indexes)
    return f"GPUs {', '.join(others)} and {last}" if others else f"GPU {last}"


CPU = "cpu"
"""The value of the `devices` knob for the CPU. Others are `cpu:4`, a count (`2`), and GPU indexes (`0+1`, `0+`)."""
_PROCESSES = re.compile(rf"{CPU}:(\d{{1,9}})")
_INDEXES = re.compile(r"\d{1,4}(?:\+\d{1,4})*\+?")


def asks_for_cpu(devices: object) -> bool:
    """True if a value of the `devices` knob is `cpu` or `cpu:N`."""
    return isinstance(devices, str) and devices.startswith(CPU)


def cpu_processes(devices: object) -> int | None:
    """N of `cpu:N`; None for any other value of the `devices` knob."""
    match = _PROCESSES.fullmatch(devices) if isinstance(devices, str) else None
    return None if match is None else int(match[1])


def count_asked(devices: object) -> int | None:
    """N of a count N and of `cpu:N`; None for indexes, for `cpu` alone and for no value."""
    return devices if isinstance(devices, int) else cpu_processes(devices)


def gpu_indexes(devices: object) -> list[int] | None:
    """The indexes of a text such as `0+1`, `0+` or `0`; None for any other value."""
    if not isinstance(devices, str) or not _INDEXES.fullmatch(devices):
        return None
    return [int(part) for part in devices.split("+") if part]


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units: `4.2 s`, `45 s`, `2 min 05 s`, `1 h 02 min`, `3 d 04 h`.

    A second unit of zero is left out (`2 min`).
    """
    sign, value = ("-", -seconds) if seconds < 0 else ("", seconds)
    if value < 9.95:
        text = f"{value:.1f}"
        return f"{sign if float(text) else ''}{text.removesuffix('.0')} s"
    whole = round(value)
    if whole < 60:
        return f"{sign}{whole} s"
    for large, large_name, small, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{sign}{whole // large} {large_name}" + (f" {rest:02d} {small_name}" if rest else "")
    raise AssertionError("every whole number of seconds from 60 on has a unit")


def chance_text(chance: float, decimals: int = 0) -> str:
    """An estimated chance in percent, never 0 or 100: `31 %`, `over 99 %`, `under 1 %`."""
    least_percent = 10.0**-decimals
    percent = 100 * chance
    if percent < least_percent:
        return f"under {least_percent:g} %"
    if percent > 100 - least_percent:
        return f"over {100 - least_percent:g} %"
    return f"{percent:.{decimals}f} %"


_CONTROLS = "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f"
"""C0 and C1, save those that separate words."""
_INVISIBLE = "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff"
"""Bidirectional overrides and characters without width."""
# Strings, compiled by their first use: the first frame needs none of them.
# A whole sequence first, so that its parameters go with it; then every control that is left alone.
_UNSAFE = (
    r"(?:\x1b[\]P^_X]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # OSC DCS PM APC SOS
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[ -/]*[0-~]"  # two-character escapes and character set choices
    f"|[{_CONTROLS}{_INVISIBLE}]"
)
_SEPARATORS = r"[\n\r\v\f\x85\u2028\u2029]"
_SURROGATES = r"[\ud800-\udfff]"
_RAW_IN_STRINGS = f"[\x7f-\x9f{_INVISIBLE}]"
"""Characters that JSON and TOML may leave as they are in a string, and a terminal obeys."""
_NOT_IN_A_WORD = f"[{_CONTROLS}\v\f\r\x85{_INVISIBLE}]"
_CODING = r"coding(?=[:=])"
"""The name of an encoding, which Python looks for in the comments of a file's first two lines (PEP 263)."""


def plain(text: str) -> str:
    """Return untrusted text as one harmless line.

    Control sequences, C0 and C1 controls and bidirectional overrides go; tabs and line ends become spaces;
    a lone surrogate becomes U+FFFD, because a terminal's encoder would raise on it.
    """
    # Every removed character is unprintable (Unicode categories C and Z), and nearly all text is printable.
    if text.isprintable():
        return text
    text = re.sub(_UNSAFE, "", text)
    text = re.sub(_SEPARATORS, " ", text)
    return re.sub(_SURROGATES, "\ufffd", text).expandtabs(8)


def comments(sentences: Iterable[str]) -> list[str]:
    """Return each sentence as a comment line of Python, YAML, TOML or a shell: no text in it begins another line."""
    return [
        "# " + re.sub(_CODING, "coding ", "".join(sign if sign.isprintable() else " " for sign in plain(sentence)))
        for sentence in sentences
    ]


def escaped(text: str) -> str:
    """Return JSON or TOML with every character of a string that a terminal would obey as its number: `\\u009b`."""
    return re.sub(_RAW_IN_STRINGS, lambda match: f"\\u{ord(match[0]):04x}", text)


def shell_line(words: Sequence[str]) -> str:
    """Return the words as a shell reads them. Raises UserError for a control character, which no shell can quote."""
    for word in words:
        if match := re.search(_NOT_IN_A_WORD, word):
            raise UserError(
                f"{plain(word)[:40]!r} contains the control character U+{ord(match[0]):04X}, which no command can hold",
                key="--to",
                advice="--to preset",
            )
    return shlex.join(words)


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number in words if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def file_name(stem: str, ending: str) -> str:
    """Return a file's name, never a path, from a stem of any characters."""
    return (re.sub(r"[^\w.+-]+", "-", stem)[:64].strip(".-") or "run") + ending


def largest_fitting(fits: Callable[[int], bool], largest: int, step: int = 1) -> int:
    """The largest multiple of `step` up to `largest` that fits; 0 if there is none.

    `fits` holds up to some size and for none above it.
    """
    low, high = 0, 1
    while high * step <= largest and fits(high * step):
        low, high = high, 2 * high
    high = min(high, largest // step + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step
