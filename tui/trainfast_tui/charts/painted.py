"""A widget drawn from lines of toned text; it shows plain text only and sends only the cells that changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size

from trainfast_tui.charts.braille import ink
from trainfast_tui.charts.inks import inks
from trainfast_tui.charts.row_widget import Rows, RowWidget
from trainfast_tui.text.format import plain, truncate
from trainfast_tui.text.lines import Line

TEXT_TONES = ("text", "title", "muted", "primary", "secondary", "accent", "success", "warning", "error", "key")
FILLED = ("cursor", "badge", "alarm")
"""Tones with a background of their own."""
Value = TypeVar("Value")


class Painted(RowWidget):
    """A widget that draws its `lines`; call `repaint` when they have changed."""

    DEFAULT_CSS = """
    Painted {
        height: 1; width: 1fr;
        /* Never dim: while themes change Textual blends it with a background that is not there yet, and breaks. */
        .painted--title { text-style: bold; }
        .painted--muted { color: $text-muted; }
        .painted--primary { color: $text-primary; }
        .painted--secondary { color: $text-secondary; }
        .painted--accent { color: $text-accent; }
        .painted--success { color: $text-success; }
        .painted--warning { color: $text-warning; text-style: bold; }
        .painted--error { color: $text-error; text-style: bold; }
        .painted--key { color: $text-accent; text-style: bold; }
        .painted--cursor { color: $block-cursor-foreground; background: $block-cursor-background; text-style: bold; }
        .painted--badge { color: $block-cursor-foreground; background: $primary; text-style: bold; }
        .painted--alarm { color: $block-cursor-foreground; background: $error; text-style: bold; }
    }
    """

    def lines(self, width: int, height: int) -> list[Line]:
        """Return the lines to draw; longer ones are cut, missing ones blank."""
        raise NotImplementedError

    def rows(self, width: int, height: int, palette: Mapping[str, Style]) -> Rows:
        lines = self.lines(width, height)[:height] if width and height else []
        return [_row(line, width, palette) for line in [*lines, *([[]] * (height - len(lines)))]]

    def find_palette(self) -> Mapping[str, Style]:
        whole = inks(self, "painted", (*TEXT_TONES, *FILLED))
        filled = {
            tone: Style(color=whole[tone].color, bgcolor=whole[tone].bgcolor, bold=whole[tone].bold) for tone in FILLED
        }
        return {tone: ink(whole[tone]) for tone in TEXT_TONES} | filled

    def set_height(self, rows: int) -> None:
        """Be as high as this from now on; Textual arranges a screen again for a height that stays the same."""
        if self.styles.height is None or self.styles.height.value != rows:
            self.styles.height = rows


class GrowingPanel(Painted):
    """A panel as high as its text, hidden without any."""

    DEFAULT_CSS = """
    GrowingPanel { height: auto; display: none; }
    GrowingPanel.-shown { display: block; }
    """

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.lines(width, 100))

    def set_shown(self, is_shown: bool) -> None:
        """Draw again in the height that the text needs now; `is_shown` is False without a text."""
        self.set_class(is_shown, "-shown")
        self._rows = None
        self.refresh(layout=True)


class PaintedValue(Painted, Generic[Value]):
    """A widget that draws one value, the newest it was shown."""

    shown: Value | None = None

    def show(self, value: Value | None) -> None:
        """Draw this from now on."""
        self.shown = value
        self.repaint()


def _row(line: Line, width: int, palette: Mapping[str, Style]) -> list[Segment]:
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
    return row
