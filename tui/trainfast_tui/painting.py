"""The base of every painted widget: rows that repaint alone, styled text, and the colours of the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args
from weakref import WeakKeyDictionary

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from trainfast_tui.terminal.textual_app import part_style
from trainfast_tui.text.format import Line, Tone, cell_len, plain, truncate

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot


class RowWidget(Widget):
    """A widget without border, padding, tint or opacity of its own: put a border on its container."""

    ALLOW_SELECT = False

    _rows: list[Strip] | None = None
    """The rows as they are now; None until they are drawn."""
    _rows_for: tuple[int, int, bool] = (0, 0, False)
    """Columns and lines of the drawn rows, and True in the terminal's own colours."""

    def rows(self, width: int, height: int, palette: Palette) -> list[Strip]:
        """Return the `height` rows to show, each `width` cells wide."""
        raise NotImplementedError

    def repaint(self) -> None:
        """Draw again and refresh the rows that have changed; all rows if those before had another size."""
        before = self._rows if self._rows_for == self._canvas() else None
        self._rows = None
        if not before or not self.is_on_screen:
            self.refresh()
            return
        rows = enumerate(zip(before, self.painted(), strict=True))
        regions = [Region(0, y, self._rows_for[0], 1) for y, (old, new) in rows if old != new]
        # terminal/ sends only the cells that differ.
        if regions:
            self.refresh(*regions)

    def notify_style_update(self) -> None:
        """Forget the rows and the styles of the old theme."""
        self._rows = None
        _PALETTES.pop(self.app, None)
        super().notify_style_update()

    def painted(self) -> list[Strip]:
        """Return the rows as they are now, drawn once."""
        width, height, is_native = canvas = self._canvas()
        if self._rows is None or self._rows_for != canvas:
            rows = self.rows(width, height, tone_styles(self))
            ground = Style.null() if is_native else Style(bgcolor=self.rich_style.bgcolor)
            self._rows_for, self._rows = canvas, [row.apply_style(ground) for row in rows] if ground else rows
        return self._rows

    def _canvas(self) -> tuple[int, int, bool]:
        return (*self.outer_size, self.app.native_ansi_color)  # `size` is the same without a border, but slow

    def render_line(self, y: int) -> Strip:
        return self.painted()[y]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return rows without Textual's cache and styles, which would change none: it asks for all in each frame."""
        rows = self.painted()[crop.y : crop.bottom]
        for line_filter in self.get_line_filters():
            rows = [row.apply_filter(line_filter, self.background_colors[1]) for row in rows]
        return rows if crop.width == self._rows_for[0] else [row.crop(crop.x, crop.right) for row in rows]


MAX_ROWS = 100
"""A growing panel asks for no more lines of its text."""


class PaintedWidget(RowWidget):
    """A widget that draws its `lines`; call `repaint` when they have changed."""

    def lines(self, width: int, height: int) -> list[Line]:
        """Return the lines to draw; longer ones are cut, missing ones blank."""
        raise NotImplementedError

    def rows(self, width: int, height: int, palette: Palette) -> list[Strip]:
        lines = self.lines(width, height)[:height] if width and height else []
        return [_row(line, width, palette) for line in [*lines, *([[]] * (height - len(lines)))]]

    def set_height(self, rows: int) -> None:
        """Set the height, unless it stays the same: Textual would lay out the screen again."""
        if self.styles.height is None or self.styles.height.value != rows:
            self.styles.height = rows


WHEEL_ROWS = 3
"""Rows that a turn of the wheel moves."""


class ListWidget(PaintedWidget):
    """A list or a text that keys and the wheel move through."""

    def action_move(self, by: int) -> None:
        """Move `by` rows down, clamped to the list."""
        raise NotImplementedError

    def action_page(self, by: int) -> None:
        """Move `by` pages down."""
        self.action_move(by * self.page_rows)

    def action_end(self, direction: int) -> None:
        """Move to the first row (-1) or to the last (1)."""
        self.action_move(direction * sys.maxsize)

    @property
    def page_rows(self) -> int:
        """The rows of a page: all but one for its title or the number of hidden lines."""
        return max(1, self.size.height - 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-WHEEL_ROWS)


class GrowingPanel(PaintedWidget):
    """A panel as high as its text, hidden without any."""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.lines(width, MAX_ROWS))

    def set_shown(self, is_shown: bool) -> None:
        """Draw again in the height that the text needs now; `is_shown` is False without a text."""
        width, height = self.size
        if width and self.has_class("-shown") == is_shown and len(self.lines(width, MAX_ROWS)) == height:
            self.repaint()
            return
        self.set_class(is_shown, "-shown")
        self._rows = None
        self.refresh(layout=True)


class ShownRunWidget(PaintedWidget):
    """A widget about a run, by the newest snapshot of it."""

    _run: RunSnapshot | None = None

    def show_run(self, run: RunSnapshot | None) -> None:
        """Draw this run from now on."""
        self._run = run
        self.repaint()


def _row(line: Line, width: int, palette: Palette) -> Strip:
    row: list[Segment] = []
    room = width
    for text, tone in line:
        text = truncate(plain(text), room)
        if text:
            row.append(Segment(text, palette[tone]))
        room -= cell_len(text)
    if room > 0:
        # The cursor's line is filled to its end.
        filled = line and line[-1][1] == "cursor"
        row.append(Segment(" " * room, palette["cursor" if filled else "text"]))
    return Strip(row, width)


TONES: tuple[Tone, ...] = get_args(Tone)
"""Every tone."""
FILLED_TONES: tuple[Tone, ...] = ("cursor", "badge", "alarm")
"""Tones with a background of their own."""
Palette = Mapping[str, Style]
"""The style of every tone, by name."""
_PALETTES: WeakKeyDictionary[App[Any], dict[tuple[object, ...], Palette]] = WeakKeyDictionary()


def tone_styles(widget: RowWidget) -> Palette:
    """Return the styles of the classes `tone--NAME` on `widget`, in its present theme.

    COMPONENT_CLASSES would apply the style sheet to every tone of every widget before the first frame.
    """
    app = widget.app
    styles = _PALETTES.setdefault(app, {})
    key = app.theme, app.native_ansi_color, widget.rich_style
    if key not in styles:
        # Whole styles: a partial one leaves a muted colour unblended, which is white on a light theme.
        whole_styles = {tone: part_style(widget, f"tone--{tone}") for tone in TONES}
        filled = {
            tone: Style(bgcolor=whole_styles[tone].bgcolor, reverse=whole_styles[tone].reverse) for tone in FILLED_TONES
        }
        styles[key] = {
            tone: Style(color=style.color, bold=style.bold, dim=style.dim, italic=style.italic)
            + filled.get(tone, Style.null())
            for tone, style in whole_styles.items()
        }
    return styles[key]
