"""How a run ended, in the middle of the screen: why, and what to turn."""

from __future__ import annotations

from textual.geometry import Size

from trainfast_runner.result import OomChange
from trainfast_tui import oom_text
from trainfast_tui.endings import Ending
from trainfast_tui.widgets.painted import Line, Painted, wrap

MOST_REASON_LINES = 4


class EndingPanel(Painted):
    """As high as what it says; nothing to say, nothing to see."""

    DEFAULT_CSS = """
    EndingPanel { height: auto; display: none; }
    EndingPanel.-says { display: block; }
    """

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id)
        self._ending: Ending | None = None

    def show(self, ending: Ending | None) -> None:
        """Say this, or nothing."""
        if ending != self._ending:
            self._ending = ending
            self.set_class(ending is not None, "-says")
            self.refresh(layout=True)
            self._rows = None

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.lines(width, 100))

    def lines(self, width: int, height: int) -> list[Line]:
        ending = self._ending
        if ending is None:
            return []
        alarm = ending.tone == "error"
        head = f" {ending.headline.upper()} " if alarm else ending.headline
        line: Line = [(head, "alarm" if alarm else ending.tone)]
        if ending.tone == "success":
            return [[*line, (f"  {ending.advice}", "muted")]]
        lines = [line, *_paragraph(ending.reason, width, "text", MOST_REASON_LINES)]
        for fact in ending.facts:
            lines += _paragraph(fact, width, "text", 2)
        lines += _fix_lines(ending.fixes, width)
        lines += [[("│ ", "muted"), (text, "text")] for text in ending.log]
        return [*lines, *_paragraph(ending.advice, width, "muted", 2)]


def _fix_lines(fixes: tuple[OomChange, ...], width: int) -> list[Line]:
    """Each change with its key, what it needs or frees, and beside or below that what it costs."""
    if not fixes:
        return []
    lines: list[Line] = [[(oom_text.title(fixes), "muted")]]
    wide = max(len(oom_text.knobs(fix)) for fix in fixes)
    for place, fix in enumerate(fixes, 1):
        knobs, cost = oom_text.knobs(fix), f"speed: {fix.costs}"
        head = f"{knobs:<{wide if width >= 90 else 0}}"
        lines.append([(f" {place} ", "key"), (head, "title"), (f"  {fix.saves}", "text")])
        if 3 + len(head) + 2 + len(fix.saves) + 2 + len(cost) <= width:
            lines[-1].append((f"  {cost}", "muted"))
        else:
            lines.append([(f"     {cost}", "muted")])
    return lines


def _paragraph(text: str, width: int, tone: str, most: int) -> list[Line]:
    lines = wrap(text, max(1, width))
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]} …"]
    return [[(line, tone)] for line in lines]
