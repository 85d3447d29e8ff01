"""Every key, and every knob with its effect on speed and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_tui.screens.base import PageScreen
from trainfast_tui.text.keys import KEY_WORDS, actions_of
from trainfast_tui.text.knob_groups import knobs_by_group
from trainfast_tui.text.lines import Line, Tone, labelled, line_text, paragraph, rule
from trainfast_tui.text.shades import SHADES
from trainfast_tui.widgets.open_dialog import ask_text
from trainfast_tui.widgets.page import Page

if TYPE_CHECKING:
    from trainfast_tui.session import Session

SCOPES = {
    "main": "on the main screen",
    "batch": "in the search for the largest batch",
    "script": "on the own-script screen",
    "best": "in the search for the best fit",
    "runs": "in the list of runs",
    "compare": "in a comparison",
    "topo": "in the topology",
    "diagnosis": "in the diagnosis",
    "monitor": "in the monitor",
    "help": "in the help",
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


class HelpScreen(PageScreen):
    """A page of help, of which a filter shows only the entries that contain its words."""

    SCOPE = "help"

    def __init__(self, session: Session, text: Callable[[int], list[Line]]) -> None:
        """`text` returns the whole help in lines of a width."""
        super().__init__(session)
        self._text = text
        self._filter = ""

    def action_filter(self) -> None:
        hint = "Words that must all occur: batch, memory, page up. Empty shows the whole help."
        ask_text(self.app, "Show help with", hint, self._filter, self._apply_filter)

    def _apply_filter(self, words: str) -> None:
        self._filter = words.strip()
        self.query_one(Page).action_end(-1)

    def body(self, width: int) -> list[Line]:
        lines = self._text(width)
        return matching_entries(lines, self._filter, width) if self._filter else lines


def matching_entries(lines: list[Line], words: str, width: int) -> list[Line]:
    """Return the entries of a help that contain all of these words, below the titles of their sections.

    An entry is a line with the indented ones below it.
    """
    entries: list[list[Line]] = []
    for line in lines:
        if entries and line_text(line).startswith(" "):
            entries[-1].append(line)
        else:
            entries.append([line])
    shown: list[Line] = []
    section: list[Line] = []
    for entry in entries:
        text = " ".join(" ".join(map(line_text, entry)).split()).lower()
        if text.endswith("─"):
            section = [[], *entry]
        elif all(word in text for word in words.lower().split()):
            shown += [*section, *entry]
            section = []
    title = f"with “{words}”" if shown else f"nothing with “{words}”"
    return [rule(f"help {title}", width, "/ and Enter: all of it"), *shown]


def help_lines(width: int, scope: str = "main") -> list[Line]:
    """Return every key and every knob in lines of `width` cells, the keys of the screen `scope` first."""
    lines = [rule("help", width), *paragraph(ABOUT, width, "text")]
    first = scope if scope in SCOPES else "main"
    for shown_scope in dict.fromkeys((first, *SCOPES)):
        lines += [[], rule(f"keys {SCOPES[shown_scope]}", width)]
        for action in actions_of(shown_scope):
            keys = ", ".join(KEY_WORDS.get(key, key) for key in action.keys if not key.startswith(("upper_", "equals")))
            lines += _entry(keys, action.help, "key", width)
        if shown_scope == "everywhere":
            lines += _entry("Ctrl-P", "Every command by its name.", "key", width)
    lines += [[], rule("signs", width)]
    for sign, meaning in SIGNS:
        lines += _entry(sign, meaning, "key", width)
    for group, names in knobs_by_group().items():
        lines += [[], rule(f"knobs: {group}", width)]
        for name in names:
            entry = KNOBS_BY_NAME[name]
            lines += _entry(name, entry.what, "title", width)
            for label, text in (("speed", entry.speed), ("memory", entry.memory), ("training", entry.training)):
                lines += _entry("", f"{label}: {text}", "text", width) if text else []
            takes = f"takes {entry.values.describe()}; default {entry.text_of(entry.default)}"
            lines += labelled((" " * LABEL, "text"), takes, width, "muted")
    return lines


def _entry(label: str, text: str, tone: Tone, width: int) -> list[Line]:
    return labelled((f"{label:<{LABEL - 1}} ", tone), text, width)
