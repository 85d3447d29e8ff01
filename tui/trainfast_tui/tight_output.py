"""What changed on the screen, and no more, goes to the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.control import Control
from textual import _compositor
from textual._compositor import ChopsUpdate


class TightUpdate(ChopsUpdate):
    """Textual 8 sends all that stands left of a changed stretch as well, once for each stretch of a row."""

    def render_segments(self, console: Console) -> str:
        """The changed stretches as text and control sequences."""
        parts: list[str] = []
        for y, first, last in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                if strip is None or x >= last or end <= first:
                    continue
                begin, until = max(x, first), min(end, last)
                part = strip if (begin, until) == (x, end) else strip.crop(begin - x, until - x)
                parts += (Control.move_to(begin, y).segment.text, part.render(console))
        return "".join(parts)


def install() -> None:
    """Have every screen send its updates so from now on: Textual has no other way to give it a class of its own."""
    _compositor.ChopsUpdate = TightUpdate  # type: ignore[misc]
