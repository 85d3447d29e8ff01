"""A widget of rows of segments; only changed rows are sent and rendered again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.segment import Segment
from rich.style import Style
from textual.filter import LineFilter
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from trainfast_tui.painting.palettes import Palette, forget_palettes, tone_styles

SegmentRows = list[list[Segment]]


class Canvas(msgspec.Struct, frozen=True):
    """The size and colours of the drawn rows."""

    width: int = 0
    height: int = 0
    is_native: bool = False
    """True in the terminal's own colours."""


class RowWidget(Widget):
    """A widget without border, padding, tint or opacity of its own: put a border on its container."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    RowWidget {
        /* Never dim: while themes change Textual blends it with a background that is not there yet, and breaks. */
        .tone--title { text-style: bold; }
        .tone--muted { color: $text-muted; }
        .tone--primary { color: $text-primary; }
        .tone--secondary { color: $text-secondary; }
        .tone--accent { color: $text-accent; }
        .tone--success { color: $text-success; }
        .tone--warning { color: $text-warning; text-style: bold; }
        .tone--error { color: $text-error; text-style: bold; }
        .tone--key { color: $text-accent; text-style: bold; }
        .tone--cursor { color: $block-cursor-foreground; background: $block-cursor-background; text-style: bold; }
        .tone--badge { color: $block-cursor-foreground; background: $primary; text-style: bold; }
        .tone--alarm { color: $block-cursor-foreground; background: $error; text-style: bold; }
    }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._strips: dict[int, tuple[list[Segment] | None, Strip]] = {}
        """The segments of each row and their strip on the background."""
        self._strips_for: tuple[int, Style | None, Sequence[LineFilter]] = (0, None, ())
        self._rows: SegmentRows | None = None
        self._rows_for = Canvas()

    def rows(self, width: int, height: int, palette: Palette) -> SegmentRows:
        """Return the rows to show, each `width` cells wide; missing ones are blank."""
        raise NotImplementedError

    def repaint(self) -> None:
        """Draw again and send the changed cells."""
        old, is_same_size = self._rows, self._rows_for == self._canvas()
        self._rows = None
        self.send_changes(old if is_same_size else None)

    def notify_style_update(self) -> None:
        """Forget the rows of the old theme."""
        self._rows = None
        forget_palettes(self)
        super().notify_style_update()

    def painted(self) -> SegmentRows:
        """Return the rows as they are now, drawn once."""
        canvas = self._canvas()
        if self._rows is None or self._rows_for != canvas:
            self._rows_for = canvas
            self._rows = self.rows(canvas.width, canvas.height, tone_styles(self))
        return self._rows

    def _canvas(self) -> Canvas:
        return Canvas(*self.size, self.app.native_ansi_color)

    def background(self) -> Style | None:
        """Return the style behind the rows; None in the terminal's own colours."""
        return None if self.app.native_ansi_color else Style(bgcolor=self.rich_style.bgcolor)

    def render_line(self, y: int) -> Strip:
        return self.render_lines(Region(0, y, self.size.width, 1))[0]

    def render_lines(self, crop: Region) -> list[Strip]:
        rows, width = self.painted(), self.size.width
        background, filters = self.background(), self.get_line_filters()
        if self._strips_for != (width, background, filters):
            self._strips_for, self._strips = (width, background, filters), {}
        strips = []
        for y in crop.line_range:
            row = rows[y] if y < len(rows) else None
            cached = self._strips.get(y)
            if cached is None or cached[0] is not row:
                cached = self._strips[y] = row, self._strip(row, width, background, filters)
            strips.append(cached[1])
        first, last = crop.column_span
        return strips if (first, last) == (0, width) else [strip.crop(first, last) for strip in strips]

    def _strip(
        self, row: list[Segment] | None, width: int, background: Style | None, filters: Sequence[LineFilter]
    ) -> Strip:
        # NO_COLOR makes Textual ask every segment for a style.
        strip = Strip.blank(width, Style.null()) if row is None else Strip(row, width)
        strip = strip if background is None else strip.apply_style(background)
        for line_filter in filters:
            strip = strip.apply_filter(line_filter, self.background_colors[1])
        return strip

    def send_changes(self, before: SegmentRows | None) -> None:
        """Refresh the rows that differ from `before`; all rows if that is unknown."""
        if not before or not self.is_on_screen:
            self.refresh()
            return
        width = self.size.width
        regions = [
            Region(0, y, width, 1)
            for y, (old, new) in enumerate(zip(before, self.painted(), strict=True))
            if old is not new and old != new
        ]
        # terminal/ sends only the cells that differ.
        if regions:
            self.refresh(*regions)
