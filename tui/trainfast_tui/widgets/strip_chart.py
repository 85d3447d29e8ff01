"""A strip chart on a time axis, drawn line by line: about 2 ms a frame at 120x16 with two series.

Charts of one width that are given one window share their time axis cell by cell. The columns are fixed to
absolute time, so a spike keeps its shape while it travels left. Nothing is told by colour alone: series
differ in texture, throttled time has letters below the plot, a limit has its own line and label.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from trainfast_tui.format import Formatter, duration, fit, number, plain, to_ascii, truncate
from trainfast_tui.widgets.braille import (
    BRAILLE,
    WHOLE_CELLS,
    Columns,
    Dots,
    YRange,
    changed_cells,
    draw,
    extremes,
    ink,
    runs,
    time_columns,
)

Tone = Literal["primary", "secondary", "accent", "success", "warning", "error"]
"""The theme colour of a series."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. The first of a chart is drawn solid and in front, the later ones dotted."""

    name: str
    times_ns: Sequence[int]
    """Ascending, on the clock of the chart's window. A list, tuple or array: it is sliced and bisected."""
    values: Sequence[float | None]
    """One for each time; None, NaN and infinities are absent readings."""
    tone: Tone = "primary"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of throttled time, drawn shaded and marked by the first letter of its kind."""

    start_ns: int
    end_ns: int | None
    """None while it lasts."""
    kind: str
    """For example `thermal` (T) or `power` (P)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line at `value`, in the unit of the series."""

    value: float
    label: str
    stretch: bool = True
    """Whether the y range reaches up to it; otherwise it shows only when the data comes near."""


@dataclass(frozen=True, slots=True)
class ChartData:
    """All that one frame of a chart shows."""

    title: str
    series: tuple[Series, ...]
    t_min_ns: int
    t_max_ns: int
    gap_ns: int
    """Two samples further apart than this are not joined."""
    unit: Formatter = number
    spans: tuple[Span, ...] = ()
    limits: tuple[Limit, ...] = ()
    y_min: float | None = 0.0
    """Where the y axis starts while the data stays above; None follows the data."""
    y_max: float | None = None
    """Where the y axis ends while the data stays below; None follows the data."""
    binary: bool = False
    """Round the ends of the y axis to powers of two, for bytes."""
    empty: str = "No samples yet."
    """The sentence shown while no series has a value in the window."""
    now_label: str = "now"
    """What the right end of the time axis is called."""


TONES: tuple[Tone, ...] = ("primary", "secondary", "accent", "success", "warning", "error")
PARTS = ("title", "axis", "limit", "empty", "mark", "shade")
Palette = Mapping[str, Style]
"""The style of every tone and part, by name."""

_ASCII_SYMBOLS = "*o+x"
_STRIDES = (1, 2, 4)
_MARK_LABEL = "throttle"


@dataclass(frozen=True, slots=True)
class _Frame:
    """The measures of one painting; x and y in cells of the widget, times in ns."""

    width: int
    height: int
    gutter: int
    has_title: bool
    has_marks: bool
    has_times: bool
    start_ns: int
    column_ns: int
    dots: Dots
    ascii: bool

    @property
    def plot_width(self) -> int:
        return self.width - self.gutter

    @property
    def plot_height(self) -> int:
        return self.height - self.has_title - self.has_marks - self.has_times

    @property
    def cell_ns(self) -> int:
        return self.column_ns << self.dots.x_bits

    def clean(self, text: str) -> str:
        text = plain(text)
        return to_ascii(text) if self.ascii else text


def _frame(data: ChartData, width: int, height: int, *, ascii: bool, time_labels: bool, gutter: int) -> _Frame:
    dots = WHOLE_CELLS if ascii else BRAILLE
    gutter = gutter if width >= gutter + 10 else 0
    plot_width = width - gutter
    columns = plot_width << dots.x_bits
    column_ns = max(1, -(-(data.t_max_ns - data.t_min_ns) // columns))
    # Whole cells of absolute time: the picture then moves by whole characters and not by dots.
    cell_ns = column_ns << dots.x_bits
    start_ns = (data.t_max_ns // cell_ns - plot_width + 1) * cell_ns
    return _Frame(
        width=width,
        height=height,
        gutter=gutter,
        has_title=height >= 2,
        has_marks=height >= 3,
        has_times=time_labels and height >= 6,
        start_ns=start_ns,
        column_ns=column_ns,
        dots=dots,
        ascii=ascii,
    )


def paint(
    data: ChartData,
    width: int,
    height: int,
    y_range: YRange,
    palette: Palette,
    *,
    ascii: bool = False,
    time_labels: bool = True,
    gutter: int = 10,
) -> list[list[Segment]]:
    """The chart as `height` rows of segments, each exactly `width` cells wide.

    `gutter` cells at the left hold the y labels and the axis; where less than 10 cells would be left for the
    plot it is dropped. `y_range` is updated. A low chart gives up rows: time labels below a height of 6,
    throttle marks below 3, the title below 2.
    """
    if width <= 0 or height <= 0:
        return [[] for _ in range(height)]
    frame = _frame(data, width, height, ascii=ascii, time_labels=time_labels, gutter=gutter)
    strides = [1 if ascii else _STRIDES[min(i, len(_STRIDES) - 1)] for i in range(len(data.series))]
    drawn = [
        _series_columns(frame, series, data.gap_ns, stride) for series, stride in zip(data.series, strides, strict=True)
    ]
    held = [found for _, columns in drawn if (found := extremes(columns)) is not None]
    marks = _throttle_marks(frame, data)
    rows: list[list[Segment]] = []
    if frame.has_title:
        rows.append(_title_row(frame, data, strides, palette))
    if held:
        reach = [limit.value for limit in data.limits if limit.stretch and abs(limit.value) < 1e300]
        low, high = y_range.fit(
            min([found[0] for found in held] + reach),
            max([found[1] for found in held] + reach),
            data.t_max_ns,
            y_min=data.y_min,
            y_max=data.y_max,
            binary=data.binary,
        )
        rows += _plot_rows(frame, data, drawn, strides, (low, high), marks, palette)
    else:
        rows += _empty_rows(frame, data, palette)
    if frame.has_marks:
        rows.append(_mark_row(frame, marks, palette))
    if frame.has_times:
        rows.append(_time_row(frame, data, palette))
    if ascii:
        # What was cut carries an ellipsis by now; every likeness here is one cell for one cell.
        return [[Segment(to_ascii(text), style) for text, style, _ in row] for row in rows]
    return rows


def _series_columns(frame: _Frame, series: Series, gap_ns: int, stride: int) -> tuple[int, Columns]:
    """The dot column of the first column, and the series in columns of `stride` dots."""
    column_ns = frame.column_ns * stride
    start_ns = frame.start_ns // column_ns * column_ns
    count = -(-(frame.plot_width << frame.dots.x_bits) // stride) + (start_ns < frame.start_ns)
    columns = time_columns(series.times_ns, series.values, start_ns, column_ns, count, gap_ns)
    return (start_ns - frame.start_ns) // frame.column_ns, columns


def _throttle_marks(frame: _Frame, data: ChartData) -> list[str]:
    """The letter of the throttled time of each cell of the plot; empty where there was none."""
    marks = [""] * frame.plot_width
    for span in data.spans:
        letter = to_ascii(plain(span.kind))[:1].strip().upper() or "#"
        end_ns = data.t_max_ns if span.end_ns is None else min(span.end_ns, data.t_max_ns)
        first = max(0, (span.start_ns - frame.start_ns) // frame.cell_ns)
        last = (end_ns - frame.start_ns) // frame.cell_ns
        for cell in range(first, min(last + 1, frame.plot_width)):
            marks[cell] = letter
    return marks


def _title_row(frame: _Frame, data: ChartData, strides: list[int], palette: Palette) -> list[Segment]:
    """The title at the left; at the right the key and newest value of as many series as there is room for."""
    title = frame.clean(data.title)
    room = frame.width
    legend: list[Segment] = []
    used = 0
    for index, (series, stride) in enumerate(zip(data.series, strides, strict=True)):
        value = frame.clean(data.unit(_newest(series, data)))
        name = frame.clean(series.name)
        named = len(data.series) > 1 or (name not in ("", title))
        key = f"{_key(frame, index, stride)} {name} " if named else ""
        spacing = "  " if legend else ""
        length = cell_len(spacing) + cell_len(key) + cell_len(value)
        if index and used + length + 1 > room:
            break
        legend.append(Segment(spacing + key, palette.get(series.tone)))
        legend.append(Segment(value, palette.get("title")))
        used += length
    if used > room:
        value = fit(value, room, "right")
        return [Segment(value, palette.get("title"))]
    left = truncate(title, max(0, room - used - 1))
    padding = " " * (room - used - cell_len(left))
    return [Segment(left + padding, palette.get("title")), *(part for part in legend if part.text)]


def _key(frame: _Frame, index: int, stride: int) -> str:
    """The texture of a series, as it looks in the plot."""
    if frame.ascii:
        return _ASCII_SYMBOLS[index % len(_ASCII_SYMBOLS)]
    return {1: "⠤⠤", 2: "⠄⠄", 4: "⠄ "}[stride]


def _newest(series: Series, data: ChartData) -> float | None:
    """The value of the latest sample in the window; None when that is absent or older than the gap."""
    for time_ns, value in zip(reversed(series.times_ns), reversed(series.values), strict=False):
        if time_ns <= data.t_max_ns:
            return value if data.t_max_ns - time_ns <= data.gap_ns else None
    return None


def _plot_rows(
    frame: _Frame,
    data: ChartData,
    drawn: list[tuple[int, Columns]],
    strides: list[int],
    y_range: tuple[float, float],
    marks: list[str],
    palette: Palette,
) -> list[list[Segment]]:
    width, height = frame.plot_width, frame.plot_height
    layers: list[bytearray] = []
    for (first, columns), stride in zip(drawn, strides, strict=True):
        cells = bytearray(width * height)
        draw(cells, width, height, columns, y_range, frame.dots, first=first, stride=stride)
        layers.append(cells)
    limits = {
        _row_of(limit.value, y_range, frame): limit for limit in data.limits if y_range[0] <= limit.value <= y_range[1]
    }
    labels = _axis_labels(frame, data, y_range, limits)
    styles = [Style.null(), palette.get("limit"), palette.get("mark")]
    styles += [palette.get(series.tone) for series in data.series]
    shade = palette.get("shade") or Style.null()
    shaded_styles = [(style or Style.null()) + shade for style in styles]
    shaded = bytes(1 if mark else 0 for mark in marks)
    rows = []
    for row in range(height):
        text, keys = _merge(frame, layers, row)
        if (limit := limits.get(row)) is not None:
            _overlay_limit(frame, text, keys, limit)
        if not frame.has_marks and row == height - 1:
            # Too low for a row of marks: they take the free cells of the last row.
            for cell, mark in enumerate(marks):
                if mark and not keys[cell]:
                    text[cell], keys[cell] = mark, _MARK
        is_limit = limit is not None
        gutter = _gutter(frame, labels.get(row, ""), palette, is_limit)
        rows.append(gutter + runs(text, keys, shaded, styles, shaded_styles))
    return rows


_BLANK, _LIMIT, _MARK, _FIRST_SERIES = range(4)


def _merge(frame: _Frame, layers: list[bytearray], row: int) -> tuple[list[str], bytearray]:
    """The characters of one row, and of each the key of its style; the first series is in front."""
    width = frame.plot_width
    keys = bytearray(width)
    masks = 0
    for index in range(len(layers) - 1, -1, -1):
        cells = layers[index][row * width : (row + 1) * width]
        if not any(cells):
            continue
        masks |= int.from_bytes(cells, "big")
        key = _FIRST_SERIES + index
        for cell, mask in enumerate(cells):
            if mask:
                keys[cell] = key
    if frame.ascii:
        symbols = [" ", " ", " "] + [_ASCII_SYMBOLS[i % len(_ASCII_SYMBOLS)] for i in range(len(layers))]
        return [symbols[key] for key in keys], keys
    if not masks:
        return [" "] * width, keys
    return list(map(frame.dots.glyphs.__getitem__, masks.to_bytes(width, "big"))), keys


def _row_of(value: float, y_range: tuple[float, float], frame: _Frame) -> int:
    """The row of the plot in which `value` is drawn."""
    bottom_dot = (frame.plot_height << frame.dots.y_bits) - 1
    dot = int((value - y_range[0]) * (bottom_dot / (y_range[1] - y_range[0])) + 0.5)
    return (bottom_dot - min(max(dot, 0), bottom_dot)) >> frame.dots.y_bits


def _overlay_limit(frame: _Frame, text: list[str], keys: bytearray, limit: Limit) -> None:
    """Draw the limit's line in the free cells of its row, and its label where it fits first."""
    line = "-" if frame.ascii else "╌"
    for cell, key in enumerate(keys):
        if not key:
            text[cell], keys[cell] = line, _LIMIT
    label = frame.clean(limit.label)
    # Wide characters would need two cells for one entry of the row.
    if not label or cell_len(label) != len(label):
        return
    at = keys.find(bytes([_LIMIT]) * (len(label) + 2))
    if at >= 0:
        text[at + 1 : at + 1 + len(label)] = label


def _axis_labels(
    frame: _Frame, data: ChartData, y_range: tuple[float, float], limits: Mapping[int, Limit]
) -> dict[int, str]:
    """The y label of each row that has one. A limit's own value goes before a tick's."""
    if not frame.gutter:
        return {}
    low, high = y_range
    ticks = {0: high}
    if frame.plot_height >= 2:
        ticks[frame.plot_height - 1] = low
    if frame.plot_height >= 5:
        middle = low + (high - low) / 2
        ticks[_row_of(middle, y_range, frame)] = middle
    ticks.update((row, limit.value) for row, limit in limits.items())
    texts = {row: frame.clean(data.unit(value)) for row, value in sorted(ticks.items())}
    # A range narrower than the unit's precision would otherwise print one figure twice.
    for above, below in pairwise(list(texts)):
        if texts[above] == texts[below] and below not in limits:
            texts[below] = ""
    return texts


def _gutter(frame: _Frame, label: str, palette: Palette, is_limit: bool = False) -> list[Segment]:
    if not frame.gutter:
        return []
    axis = "|" if frame.ascii else ("┤" if label else "│")
    text = fit(label, frame.gutter - 2, "right")
    return [Segment(f"{text} {axis}", palette.get("limit" if is_limit and label else "axis"))]


def _empty_rows(frame: _Frame, data: ChartData, palette: Palette) -> list[list[Segment]]:
    """The owner's sentence in the middle of an otherwise empty plot."""
    room = frame.plot_width
    sentence = truncate(frame.clean(data.empty), room)
    left = (room - cell_len(sentence)) // 2
    right = room - left - cell_len(sentence)
    rows = []
    for row in range(frame.plot_height):
        line = " " * left + sentence + " " * right if row == (frame.plot_height - 1) // 2 else " " * room
        rows.append([*_gutter(frame, "", palette), Segment(line, palette.get("empty"))])
    return rows


def _mark_row(frame: _Frame, marks: list[str], palette: Palette) -> list[Segment]:
    """The line under the plot, with a letter for each cell of throttled time."""
    line = "-" if frame.ascii else "─"
    segments = []
    if frame.gutter:
        label = _MARK_LABEL if any(marks) else ""
        corner = "+" if frame.ascii else "└"
        text = fit(label, frame.gutter - 2, "right")
        segments = [Segment(text, palette.get("mark")), Segment(f" {corner}", palette.get("axis"))]
    keys = bytearray(_MARK if mark else _LIMIT for mark in marks)
    styles = [palette.get("axis"), palette.get("axis"), palette.get("mark")]
    plain_cells = bytes(len(marks))
    return segments + runs([mark or line for mark in marks], keys, plain_cells, styles, styles)


def _time_row(frame: _Frame, data: ChartData, palette: Palette) -> list[Segment]:
    """How long ago the left edge was, and the name of the right edge."""
    room = frame.plot_width
    right = truncate(frame.clean(data.now_label), room)
    left = truncate("-" + duration((data.t_max_ns - data.t_min_ns) / 1e9), room - cell_len(right) - 1)
    between = " " * (room - cell_len(left) - cell_len(right))
    text = " " * frame.gutter + left + between + right
    return [Segment(text, palette.get("axis"))]


class StripChart(Widget):
    """Draws the `ChartData` it was last shown; sends to the terminal only the cells that changed.

    Give its container the border: a border on the chart would be sent again with it.
    """

    ALLOW_SELECT = False
    COMPONENT_CLASSES = {f"strip-chart--{name}" for name in (*TONES, *PARTS)}
    DEFAULT_CSS = """
    StripChart {
        height: 1fr; width: 1fr;
        .strip-chart--primary { color: $text-primary; }
        .strip-chart--secondary { color: $text-secondary; }
        .strip-chart--accent { color: $text-accent; }
        .strip-chart--success { color: $text-success; }
        .strip-chart--warning { color: $text-warning; }
        .strip-chart--error { color: $text-error; }
        .strip-chart--title { text-style: bold; }
        .strip-chart--axis { color: $text-muted; }
        .strip-chart--empty { color: $text-muted; }
        .strip-chart--limit { color: $text-error; }
        .strip-chart--mark { color: $text-warning; text-style: bold; }
        .strip-chart--shade { background: $warning-muted; }
        &:ansi .strip-chart--shade { background: ansi_bright_black; }
    }
    """

    def __init__(
        self,
        *,
        ascii: bool = False,
        time_labels: bool = True,
        gutter: int = 10,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._ascii = ascii
        self._time_labels = time_labels
        self._gutter = gutter
        self._data: ChartData | None = None
        self._y_range = YRange()
        self._palette: dict[str, Style] | None = None
        self._rows: list[list[Segment]] | None = None
        self._rows_size = (0, 0)

    def show(self, data: ChartData) -> None:
        """Draw this from now on. The y range starts anew when the title or a fixed end of the y axis changes."""
        if self._data is not None and _axis_of(self._data) != _axis_of(data):
            self._y_range.reset()
        self._data = data
        old = self._rows
        self._rows = None
        if not old or self._rows_size != tuple(self.size) or not self.is_on_screen:
            self.refresh()
            return
        width = self.size.width
        regions = [
            Region(span[0], y, span[1] - span[0], 1)
            for y, (before, after) in enumerate(zip(old, self._painted(), strict=True))
            if (span := changed_cells(before, after, width)) is not None
        ]
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        rows = self._painted()
        width = self.size.width
        return Strip(rows[y], width) if y < len(rows) else Strip.blank(width)

    def notify_style_update(self) -> None:
        """Forget what was painted in the old theme."""
        self._palette = None
        self._rows = None
        super().notify_style_update()

    def _painted(self) -> list[list[Segment]]:
        size = self.size
        if self._rows is None or self._rows_size != tuple(size):
            self._rows_size = (size.width, size.height)
            self._rows = (
                []
                if self._data is None
                else paint(
                    self._data,
                    size.width,
                    size.height,
                    self._y_range,
                    self._styles(),
                    ascii=self._ascii,
                    time_labels=self._time_labels,
                    gutter=self._gutter,
                )
            )
        return self._rows

    def _styles(self) -> dict[str, Style]:
        if self._palette is None:
            # Whole styles: a partial one leaves a muted colour unblended, which is white on a light theme.
            whole = {name: self.get_component_rich_style(f"strip-chart--{name}") for name in (*TONES, *PARTS)}
            self._palette = {name: ink(style) for name, style in whole.items()}
            self._palette["shade"] = Style(bgcolor=whole["shade"].bgcolor)
        return self._palette


def _axis_of(data: ChartData) -> tuple[object, ...]:
    return data.title, data.y_min, data.y_max, data.binary
