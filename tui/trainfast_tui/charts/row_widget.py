"""A widget that paints rows of segments: only rows that changed are drawn again, each once."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.filter import LineFilter
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

Rows = list[list[Segment]]


class RowWidget(Widget):
    """It has no border, padding, tint or opacity of its own, and Textual does not look for them: put a border on its
    container."""

    ALLOW_SELECT = False

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._strips: dict[int, tuple[list[Segment] | None, Strip]] = {}
        """By row the segments that were drawn, and how they look on the background."""
        self._strips_for: tuple[int, Style | None, Sequence[LineFilter]] = (0, None, ())

    def painted(self) -> Rows:
        """The rows as they are to be now, each as wide as the widget; missing ones are blank."""
        raise NotImplementedError

    def background(self) -> Style | None:
        """What stands behind the rows: what the theme says, in the terminal's own colours nothing."""
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
            known = self._strips.get(y)
            if known is None or known[0] is not row:
                known = self._strips[y] = row, self._strip(row, width, background, filters)
            strips.append(known[1])
        first, last = crop.column_span
        return strips if (first, last) == (0, width) else [strip.crop(first, last) for strip in strips]

    def _strip(
        self, row: list[Segment] | None, width: int, background: Style | None, filters: Sequence[LineFilter]
    ) -> Strip:
        # A style even of nothing: with NO_COLOR Textual asks every segment for its own.
        strip = Strip.blank(width, Style.null()) if row is None else Strip(row, width)
        strip = strip if background is None else strip.apply_style(background)
        for one in filters:
            strip = strip.apply_filter(one, self.background_colors[1])
        return strip

    def send_changes(self, before: Rows | None) -> None:
        """Have the rows drawn that are different now; all of them where nothing is known `before`."""
        if not before or not self.is_on_screen:
            self.refresh()
            return
        width = self.size.width
        regions = [
            Region(0, y, width, 1)
            for y, (old, new) in enumerate(zip(before, self.painted(), strict=True))
            if old is not new and old != new
        ]
        # That only cells which are different are sent is seen to where they are sent.
        if regions:
            self.refresh(*regions)
