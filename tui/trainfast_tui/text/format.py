"""Numbers with their units, and untrusted text made safe to show.

An absent reading is `None` and reads as `ABSENT`, never as zero. A value that is not finite is absent too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

import rich.cells
from rich.cells import set_cell_size

from trainfast_runner import units

if TYPE_CHECKING:
    from trainfast_runner.records.result import Doubt
    from trainfast_runner.running.follower import RunSnapshot


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


def joules(value_j: float | None) -> str:
    """Return joules, or kJ and MJ when large: `12.3 kJ`."""
    if (value := _finite(value_j)) is None:
        return ABSENT
    for factor, unit in ((1e6, "MJ"), (1e3, "kJ")):
        if abs(value) >= factor * 0.9995:
            return f"{number(value / factor)} {unit}"
    return f"{number(value)} J"


def _whole(unit: str) -> Formatter:
    """Return a formatter to whole numbers with this unit."""
    return lambda value: ABSENT if _finite(value) is None else f"{value:.0f} {unit}"


watts, celsius, megahertz = _whole("W"), _whole("°C"), _whole("MHz")
"""Format watts, degrees Celsius and, without separators as nvidia-smi prints clocks, megahertz: `1980 MHz`."""


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
    return ABSENT if value is None else f"{value:,.{digits}f} %"


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
    text = units.plain(text)
    return text if width is None else truncate(text, width)


def cell_len(text: str) -> int:
    """Return the terminal cells of a text. Rich looks up every text, which is a twentieth of a monitor's frame."""
    return len(text) if text.isascii() and text.isprintable() else rich.cells.cell_len(text)


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


Side = Literal["left", "right"]


def to_width(text: str, width: int, align: Side = "left") -> str:
    """Return text of exactly `width` terminal cells: cut with `…`, or padded with spaces."""
    text = truncate(text, width)
    padding = " " * (width - cell_len(text))
    return text + padding if align == "left" else padding + text


_RIGHT_DOTS = 0xB8
"""The right column of a braille cell (Unicode 16.0, chapter 21.1)."""
_BRAILLE = {chr(0x2800 + mask): "*" if mask & _RIGHT_DOTS else "o" for mask in range(1, 256)}
"""A solid line has dots in both columns, a dotted one in the left column alone."""
_LIKENESS = str.maketrans(
    _BRAILLE
    | {
        **dict(zip("–…°µ×²·≥≤“”\u00a0", '-~ ux2.><"" ', strict=True)),
        **dict(zip("▸•●○■✓✗↑↓←→Δ±≈", ">*@O#vx^v<>d+~", strict=True)),
        **dict(zip("█▓▒░▚╱╲┊", "#%+:&/\\!", strict=True)),
        **dict(zip("▏▎▍▌▋▊▉▁▂▃▄▅▆▇", "...####__--==^", strict=True)),
        **dict(zip("─━╌┄┈│┃┤├└╭╮╰╯", "-=--_||||+++++", strict=True)),
    }
)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def to_ascii(text: str) -> str:
    """Replace every sign outside ASCII by its likeness, or by `?` where it has none; the width stays the same."""
    if text.isascii():
        return text
    return _NOT_ASCII.sub(lambda match: "?" * cell_len(match[0]), text.translate(_LIKENESS))


Tone = Literal[
    "text",
    "title",
    "muted",
    "primary",
    "secondary",
    "accent",
    "success",
    "warning",
    "error",
    "key",
    "cursor",
    "badge",
    "alarm",
]
"""The name of a style; `cursor`, `badge` and `alarm` have a background of their own."""
Piece = tuple[str, Tone]
"""A text with its tone."""
Line = list[Piece]
"""A line of text, in pieces from left to right."""
LabelledText = tuple[str, str, Tone]
"""A label, a text beside it, and the tone of the text."""


class Section(NamedTuple):
    """A titled part of a text; an entry is kept or left out as a whole."""

    title: str
    entries: list[list[Line]]


def rule(title: str, width: int, note: str = "") -> Line:
    """Return a section title with a line to the right edge, or to a note there."""
    end = f" {note}" if note else ""
    return [(f"{title} ", "title"), ("─" * max(0, width - cell_len(title) - 1 - cell_len(end)) + end, "muted")]


def wrap(text: str, width: int) -> list[str]:
    """Break one paragraph into lines of at most `width` cells; a longer path is broken, another longer word cut."""
    lines: list[str] = []
    line = ""
    for word in plain(text).split():
        # A path that is too long for a line may be broken after any slash.
        parts = re.findall("[^/]*/|[^/]+", word) if cell_len(word) > width else [word]
        for index, part in enumerate(parts):
            longer = f"{line}{'' if index or not line else ' '}{part}"
            if line and cell_len(longer) > width:
                lines.append(line)
                line = ""
            line = longer if line else truncate(part, width)
    return [*lines, line] if line else lines


def paragraph(text: str, width: int, tone: Tone, max_lines: int | None = None) -> list[Line]:
    """Return one paragraph in lines of `width` cells; the last of `max_lines` has a sign that more would follow."""
    lines = wrap(text, max(1, width))
    if max_lines is not None and len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], with_more(lines[max_lines - 1], width)]
    return [[(line, tone)] for line in lines]


def with_more(line: str, width: int) -> str:
    """Return the line, cut to `width` cells with a sign that more would follow."""
    return f"{set_cell_size(line, width - 2).rstrip()} …"


def clamp_scroll(first: int, count: int, room: int) -> int:
    """Return `first` clamped so that `room` of `count` lines can be shown.

    Counted from the end, `first` is the number of lines below.
    """
    return max(0, min(first, count - room))


def moved_cursor(cursor: int, by: int, count: int) -> int:
    """Return the cursor moved `by` of `count` entries, and not past the first or the last."""
    return max(0, min(cursor + by, count - 1))


def hidden_words(above: int, below: int) -> str:
    """Return how many lines are hidden: `4 above, 20 below`; empty if none is."""
    return ", ".join(f"{count} {side}" for count, side in ((above, "above"), (below, "below")) if count)


def scrolled_page(page: list[Line], top: int, height: int) -> tuple[int, list[Line]]:
    """Return `top` clamped, and the lines from it on that fit; with hidden lines the last one counts them."""
    if len(page) <= height:
        return 0, page
    room = max(1, height - 1)
    top = clamp_scroll(top, len(page), room)
    words = f"more lines: {hidden_words(top, len(page) - top - room)}  PgUp PgDn"
    return top, [*page[top : top + room], [(words, "key")]]


def labelled(label: Piece, text: str, width: int, tone: Tone = "text") -> list[Line]:
    """Return the text beside its label, in lines of `width` cells; empty without a text."""
    indent = cell_len(label[0])
    first, *rest = wrap(text, max(8, width - indent)) or [""]
    return [[label, (first, tone)], *([(" " * indent + line, tone)] for line in rest)] if text else []


def join_pieces(cells: Iterable[Piece]) -> Line:
    """Join neighbours of one tone into one piece."""
    return [("".join(text for text, _ in alike), tone) for tone, alike in groupby(cells, key=itemgetter(1))]


def packed(entries: Iterable[Line], width: int, *, indent: int = 0, gap: int = 2, stop: int = 1) -> list[Line]:
    """Lay entries out in lines of `width` cells, none broken, at least `gap` cells apart, each at a multiple of `stop`.

    `indent` is the blank start of each line, in cells.
    """
    lines: list[Line] = []
    end = width
    for entry in entries:
        begin, length = indent + math.ceil((end + gap - indent) / stop) * stop, line_length(entry)
        if begin + length > width:
            begin, end = indent, 0
            lines.append([])
        lines[-1] += [(" " * (begin - end), "text"), *entry]
        end = begin + length
    return lines


def has_all_words(text: str, words: str) -> bool:
    """True if the text contains every one of these words; case does not count."""
    lowered = text.lower()
    return all(word in lowered for word in words.lower().split())


def line_text(line: Line) -> str:
    """Return the line without its tones."""
    return "".join(text for text, _ in line)


def line_length(line: Line) -> int:
    """Return the cells that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def first_fitting(lines: Sequence[Line], width: int) -> Line:
    """Return the first of these lines that fits in `width` cells, else the last."""
    return next((line for line in lines if line_length(line) <= width), lines[-1])


SYNTHETIC_MARK = "synthetic data"
"""The mark of a run on data drawn at random, whose loss means nothing."""
SYNTHETIC_BADGE: Line = [("  ", "text"), (f" {SYNTHETIC_MARK} ", "badge")]
DOUBT_SIGN = "?"
"""The sign of a figure in doubt, in the tone `warning`."""
STRICT_MALLOC_NOTE = f"{DOUBT_SIGN} strict malloc: its speed is not comparable"
"""Explains the sign at the speeds of a search on a CPU."""
PHASE_TONES: dict[str, Tone] = {
    "data": "warning",
    "forward": "primary",
    "backward": "secondary",
    "optimizer": "accent",
    "other": "muted",
}
"""The tone of each phase of a step."""
_STATES_OF_SIGNS: dict[Piece, str] = {
    ("○", "secondary"): "starting",
    ("●", "success"): "running",
    ("●", "warning"): "stopping pausing",
    ("✓", "success"): "finished answered",
    ("✗", "error"): "oom failed failed_to_start nothing_fits",
    ("✗", "warning"): "killed lost interrupted",
    ("■", "warning"): "stopped paused cancelled",
    ("○", "warning"): "unreadable",
}
"""The states of a run or a search that each sign stands for, with its tone."""


def state_sign(state: str, doubts: Sequence[Doubt] | None = None) -> Piece:
    """Return the sign of a run's or search's state; that of doubt for a finished run whose figures are in doubt."""
    if doubts and state == "finished":
        return DOUBT_SIGN, "warning"
    signs = (sign for sign, states in _STATES_OF_SIGNS.items() if state in states.split())
    return next(signs, ("○", "text"))  # a state of a newer version


def followed_run_sign(run: RunSnapshot) -> Piece:
    """Return the sign of a followed run: a finished one looks live until its result says whether it is in doubt."""
    if run.result is None:
        return state_sign("running" if run.state == "finished" else run.state)
    return state_sign(run.state, run.result.doubts)


def doubt_words(doubts: Sequence[Doubt] | None) -> str:
    """Return the kinds of the doubts about a run's figures: `? other processes, few steps`; empty without a doubt."""
    kinds = dict.fromkeys(doubt.kind.replace("_", " ") for doubt in doubts or ())
    return f"{DOUBT_SIGN} {', '.join(kinds)}" if kinds else ""


GAP_CELLS = 2
"""Cells between two columns."""
MAX_COLUMN_CELLS = 120


class FigureHeading(str):
    """The heading of a column of figures, which tables align to the right."""

    __slots__ = ()


def figure_headings(*texts: str) -> tuple[FigureHeading, ...]:
    """Return the headings of neighbouring columns of figures."""
    return tuple(map(FigureHeading, texts))


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    max_cells: int = MAX_COLUMN_CELLS,
    width: int | None = None,
    drop: Sequence[str] = (),
    *,
    wraps: bool = False,
) -> list[str]:
    """Return aligned rows, the header first; no column is over `max_cells` wide, and no line over `width`.

    The columns named in `drop` are left out one by one until the rest fits in `width`, so that no figure is cut.
    With `wraps` a text that is too long for the last column goes on below, in a row of several lines.
    """
    columns = list(zip(header, *rows, strict=True))
    widths = {column: min(max_cells, max(map(cell_len, column))) for column in columns}
    for dropped in drop:
        if width is None or sum(widths[column] + GAP_CELLS for column in columns) - GAP_CELLS <= width:
            break
        columns = [column for column in columns if column[0] != dropped]
    sides: list[Side] = ["right" if isinstance(column[0], FigureHeading) else "left" for column in columns]
    cells_wide, gap = [widths[column] for column in columns], " " * GAP_CELLS
    lines = (gap.join(map(to_width, cells, cells_wide, sides)).rstrip() for cells in zip(*columns, strict=True))
    last_from = sum(cells_wide[:-1]) + GAP_CELLS * (len(cells_wide) - 1)
    if width is None or not wraps:
        return [line if width is None else truncate(line, width) for line in lines]
    break_and_indent, room = f"\n{' ' * last_from}", max(8, width - last_from)
    return [line[:last_from] + break_and_indent.join(wrap(line[last_from:], room)) for line in lines]


def toned_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], tones: Sequence[Tone], width: int, drop: Sequence[str] = ()
) -> list[Line]:
    """Return a table whose rows have these tones; a text that is too long for the last column goes on below."""
    cells = [[plain(cell) for cell in row] for row in rows]
    toned_rows = zip(table(header, cells, width=width, drop=drop, wraps=True), ("muted", *tones), strict=True)
    return [[(line, tone)] for row, tone in toned_rows for line in row.split("\n")]


def without_empty_columns(
    header: Sequence[str], rows: Iterable[Sequence[str]], empty: str = ""
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows without the columns in which each cell is `empty`; the first column stays."""
    all_rows = list(rows)
    columns = [column for column in range(len(header)) if column == 0 or any(row[column] != empty for row in all_rows)]
    return [header[column] for column in columns], [[row[column] for column in columns] for row in all_rows]


def pair_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return `label  value` lines with the values aligned."""
    listed_rows = list(rows)
    width = max((cell_len(label) for label, _ in listed_rows), default=0)
    return [f"{to_width(label, width)}  {value}".rstrip() for label, value in listed_rows]
