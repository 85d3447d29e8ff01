"""The panel of a run's end: the reason, and changes to the knobs."""

from __future__ import annotations

from textual.geometry import Size

from trainfast_runner.records.result import OomChange
from trainfast_tui.charts.painted import Painted
from trainfast_tui.text import oom
from trainfast_tui.text.endings import Ending
from trainfast_tui.text.lines import Line, wrap

MOST_REASON_LINES = 4
KEYS = ("", "1 sets it", "1 or 2 sets it", "1, 2 or 3 sets it")
"""By the number of changes."""


class EndingPanel(Painted):
    """A panel as high as its text, hidden without any."""

    DEFAULT_CSS = """
    EndingPanel { height: auto; display: none; }
    EndingPanel.-says { display: block; }
    """

    def __init__(self, *, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(ascii=ascii, id=id)
        self._ending: Ending | None = None

    def show(self, ending: Ending | None) -> None:
        """Show this ending; None hides the panel."""
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
        lines: list[Line] = [line, *_paragraph(ending.reason, width, "text", MOST_REASON_LINES)]
        for fact in ending.facts:
            lines += _paragraph(fact, width, "text", 2)
        lines += _fix_lines(ending.fixes, width)
        lines += [[("│ ", "muted"), (text, "text")] for text in ending.log]
        return [*lines, *_paragraph(ending.advice, width, "muted", 2)]


def _fix_lines(fixes: tuple[OomChange, ...], width: int) -> list[Line]:
    """Return each change with its key, the memory it needs or frees, and its cost, beside it or below."""
    if not fixes:
        return []
    lines: list[Line] = _paragraph(f"{KEYS[len(fixes)]}; {oom.title(fixes)}", width, "muted", 2)
    wide = max(len(oom.knobs(fix)) for fix in fixes)
    for place, fix in enumerate(fixes, 1):
        head, words = oom.knobs(fix), f"{fix.saves}; speed: {fix.costs}"
        lines.append([(f" {place} ", "key"), (head, "title")])
        if 3 + wide + 2 + len(words) <= width:
            lines[-1].append((f"{'':{wide - len(head)}}  {words}", "text"))
        else:
            lines += [[(f"   {line}", "text")] for line in wrap(words, max(1, width - 3))[:2]]
    return lines


def _paragraph(text: str, width: int, tone: str, most: int) -> list[Line]:
    lines = wrap(text, max(1, width))
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]} …"]
    return [[(line, tone)] for line in lines]
