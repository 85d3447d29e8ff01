"""What changed on the screen, and no more, goes to the terminal, a frame in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from rich.console import Console
from textual import _compositor
from textual._ansi_sequences import SYNC_END, SYNC_START
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.driver import Driver
from textual.strip import Strip

from trainfast_tui.terminal.cells import SentCells

_SENT: WeakKeyDictionary[Console, SentCells] = WeakKeyDictionary()


class TightUpdate(ChopsUpdate):
    """Textual 8 sends a changed stretch whole, though most of its cells may be as they were."""

    def render_segments(self, console: Console) -> str:
        """The cells that are different now, as text and control sequences."""
        return _sent(console).draw(self._pieces(), console)

    def _pieces(self) -> Iterator[tuple[int, int, Strip]]:
        for y, first, last in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                if strip is None or x >= last or end <= first:
                    continue
                begin, until = max(x, first), min(end, last)
                yield begin, y, strip if (begin, until) == (x, end) else strip.crop(begin - x, until - x)


class WholeUpdate(LayoutUpdate):
    """The whole screen, sent whatever stood there: it is asked for when that is not known."""

    def render_segments(self, console: Console) -> str:
        """All cells, as text and control sequences."""
        return _sent(console).draw_all(self.strips, console)


def _sent(console: Console) -> SentCells:
    return _SENT.setdefault(console, SentCells())


def forget(console: Console) -> None:
    """Take nothing for granted that stands on this console's terminal: the next frame clears it and sends all."""
    _sent(console).forget()


def install(*, plain: bool = False) -> None:
    """Make every screen send its updates this way, or with `plain` as Textual does; it has no setting for them."""
    _compositor.ChopsUpdate = ChopsUpdate if plain else TightUpdate  # type: ignore[misc]
    _compositor.LayoutUpdate = LayoutUpdate if plain else WholeUpdate  # type: ignore[misc]


def in_one_piece(driver: type[Driver]) -> type[Driver]:
    """The driver, handing each frame on as one text with the marks around it: every text wakes the thread that writes,
    and a frame that is cut in two may be shown so."""

    class WholeFrames(driver):  # type: ignore[valid-type,misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self._frame: list[str] | None = None
            super().__init__(*arguments, **named)

        def write(self, data: str) -> None:
            if data == SYNC_START:
                self._frame = []
            if self._frame is not None:
                self._frame.append(data)
                if data != SYNC_END:
                    return
                data, self._frame = "".join(self._frame), None
            super().write(data)

    return WholeFrames
