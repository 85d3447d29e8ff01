"""How a run ended, in the middle of the screen: why, and what to turn."""

from __future__ import annotations

from textual.geometry import Size

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
        if ending.fixes:
            lines.append([("the cheapest knobs that free memory:", "muted")])
            wide = max(len(f"{fix.knob} = {fix.value}") for fix in ending.fixes)
            for place, fix in enumerate(ending.fixes, 1):
                knob = f"{fix.knob} = {fix.value}"
                lines.append(
                    [
                        (f" {place} ", "key"),
                        (f"{knob:<{wide if width >= 90 else 0}}", "title"),
                        (f"  {fix.saves}", "text"),
                    ]
                )
                cost = f"speed: {fix.costs}"
                if len(knob) + len(fix.saves) + len(cost) + 8 <= width:
                    lines[-1].append((f"  {cost}", "muted"))
                else:
                    lines.append([(f"     {cost}", "muted")])
        lines += [[("│ ", "muted"), (text, "text")] for text in ending.log]
        return [*lines, *_paragraph(ending.advice, width, "muted", 2)]


def _paragraph(text: str, width: int, tone: str, most: int) -> list[Line]:
    lines = wrap(text, max(1, width))
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]} …"]
    return [[(line, tone)] for line in lines]
