"""A widget drawn from lines of toned text; it shows plain text only and sends only the cells that changed."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from trainfast_tui.charts.braille import ink
from trainfast_tui.charts.inks import forget_inks, inks
from trainfast_tui.charts.row_widget import Rows, RowWidget
from trainfast_tui.text.format import plain, truncate
from trainfast_tui.text.lines import Line

TONES = ("text", "title", "muted", "primary", "secondary", "accent", "success", "warning", "error", "key")
FILLED = ("cursor", "badge", "alarm")
"""Tones with a background of their own."""


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

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._rows: Rows | None = None
        self._lines: list[Line] = []
        self._rows_of_lines: Rows = []
        """The last rows and their lines: most lines stay the same."""
        self._painted_for = (0, 0, False)
        self._palette: dict[str, Style] | None = None

    def lines(self, width: int, height: int) -> list[Line]:
        """Return the lines to draw; longer ones are cut, missing ones blank."""
        raise NotImplementedError

    def repaint(self) -> None:
        """Draw again and send the changed cells."""
        old, key = self._rows, self._key()
        self._rows = None
        self.send_changes(old if self._painted_for == key else None)

    def notify_style_update(self) -> None:
        """Forget the rows of the old theme."""
        self._palette = self._rows = None
        forget_inks(self)
        super().notify_style_update()

    def painted(self) -> Rows:
        width, height, native = key = self._key()
        if self._rows is None or self._painted_for != key:
            if native != self._painted_for[2]:
                self._palette = None
            is_first = self._palette is None or self._painted_for != key
            self._painted_for = key
            lines = self.lines(width, height)[:height] if width and height else []
            lines += [[] for _ in range(height - len(lines))]
            if is_first:
                self._rows = [self._row(line, width) for line in lines]
            else:
                before = zip(lines, self._lines, self._rows_of_lines, strict=True)
                self._rows = [row if line == old else self._row(line, width) for line, old, row in before]
            self._lines, self._rows_of_lines = lines, self._rows
        return self._rows

    def _key(self) -> tuple[int, int, bool]:
        """Return width, height and whether the theme is the terminal's own: rows are painted for these."""
        return (*self.size, self.app.native_ansi_color)

    def _row(self, line: Line, width: int) -> list[Segment]:
        styles = self._styles()
        row: list[Segment] = []
        room, style = width, styles["text"]
        for text, tone in line:
            text = plain(text)
            length = cell_len(text)
            if length > room:
                text = truncate(text, room)
                length = cell_len(text)
            if text:
                style = styles[tone]
                row.append(Segment(text, style))
            room -= length
            if room <= 0:
                break
        if room > 0:
            # The cursor's line is filled to its end.
            row.append(Segment(" " * room, style if line and line[-1][1] == "cursor" else styles["text"]))
        return row

    def _styles(self) -> dict[str, Style]:
        if self._palette is None:
            whole = inks(self, "painted", (*TONES, *FILLED))
            palette = {tone: ink(whole[tone]) for tone in TONES}
            for tone in FILLED:
                palette[tone] = Style(color=whole[tone].color, bgcolor=whole[tone].bgcolor, bold=whole[tone].bold)
            self._palette = palette
        return self._palette
