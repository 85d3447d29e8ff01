"""Every key, and every knob with its effect on speed and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainfast_runner.settings.knobs import BY_NAME
from trainfast_tui.screens.base import PageScreen
from trainfast_tui.text.keys import KEY_WORDS, actions_of
from trainfast_tui.text.lines import Line, Tone, labelled, paragraph, rule
from trainfast_tui.text.shades import SHADES
from trainfast_tui.widgets.knob_panel import knobs_by_group

if TYPE_CHECKING:
    from trainfast_tui.session import Session

SCOPES = {
    "main": "on the main screen",
    "batch": "in the search for the largest batch",
    "script": "in the look into your own script",
    "best": "in the search for the best fit",
    "runs": "in the list of runs",
    "compare": "in a comparison",
    "topo": "in the topology",
    "diagnosis": "in the diagnosis",
    "monitor": "in the monitor",
    "everywhere": "everywhere",
}
ABOUT = (
    "trainfast-tui trains a preset for real, for seconds, and shows what the machine did meanwhile."
    " Turn one knob, run again, compare. No weights are kept. A script of your own runs as it is: o finds its flags."
)
SIGNS = (
    ("•", "a knob that differs from the run on the screen"),
    ("▸", "the cursor; beside a GPU: the run uses it"),
    ("T t", "in the line of events: that it began, and that it ended; likewise the other letters"),
    ("✗ ✓ + - X c", "there too: GPU lost, back; another process came, left; Xid error; a step compiled"),
    *((f"{shade.letter} {shade.glyph * 2}", f"below a chart, and as its shade: {shade.words}") for shade in SHADES),
)
LABEL = 14


class KnobHelpScreen(PageScreen):
    """The whole text about one knob; `about` returns it in lines of a width."""

    SCOPE = "help"

    def __init__(self, session: Session, about: Callable[[int], list[Line]]) -> None:
        super().__init__(session)
        self._about = about

    def body(self, width: int) -> list[Line]:
        return self._about(width)


class HelpScreen(PageScreen):
    """Made from the list of commands and the knob table; the keys of the screen it was opened on (`scope`) first."""

    SCOPE = "help"

    def __init__(self, session: Session, scope: str = "main") -> None:
        super().__init__(session)
        self._scope = scope

    def body(self, width: int) -> list[Line]:
        return help_lines(width, self._scope)


def help_lines(width: int, scope: str = "main") -> list[Line]:
    """Return the help in lines of `width` cells, the keys of `scope` first."""
    lines = [rule("help", width), *paragraph(ABOUT, width, "text")]
    first = scope if scope in SCOPES else "main"
    for each_scope in dict.fromkeys((first, *SCOPES)):
        lines += [[], rule(f"keys {SCOPES[each_scope]}", width)]
        for command in actions_of(each_scope):
            keys = ", ".join(
                KEY_WORDS.get(key, key) for key in command.keys if not key.startswith(("upper_", "equals"))
            )
            lines += _entry(keys, command.help, "key", width)
        if scope == "everywhere":
            lines += _entry("ctrl+p", "Every command by its name.", "key", width)
    lines += [[], rule("signs", width)]
    for sign, meaning in SIGNS:
        lines += _entry(sign, meaning, "key", width)
    for group, names in knobs_by_group().items():
        lines += [[], rule(f"knobs: {group}", width)]
        for name in names:
            entry = BY_NAME[name]
            lines += _entry(name, entry.what, "title", width)
            for label, text in (("speed", entry.speed), ("memory", entry.memory), ("training", entry.training)):
                lines += _entry("", f"{label}: {text}", "text", width) if text else []
            takes = f"takes {entry.values.describe()}; default {entry.text_of(entry.default)}"
            lines += labelled((" " * LABEL, "text"), takes, width, "muted")
    return lines


def _entry(label: str, text: str, tone: Tone, width: int) -> list[Line]:
    return labelled((f"{label:<{LABEL - 1}} ", tone), text, width)
