"""Every key, and every knob with its effect on speed and memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_tui.screens.base import Page, PageScreen
from trainfast_tui.text.event_words import SHADES
from trainfast_tui.text.format import Line, Section, Tone, has_all_words, labelled, line_text, paragraph, rule
from trainfast_tui.text.keys import SCRIPT_KEY, actions_of, knobs_by_group

if TYPE_CHECKING:
    from trainfast_tui.session import Session

SCOPE_WORDS = {
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
"""The words after "keys" in the title of each scope's section, in the order of the help."""
ABOUT = (
    "trainfast-tui trains a preset for real, for seconds, and shows what the machine did meanwhile."
    " Turn one knob, run again, compare. No weights are kept."
    f" A script of your own runs as it is: {SCRIPT_KEY} finds its flags."
)
SIGN_MEANINGS = (
    ("•", "a knob that differs from the run on the screen"),
    ("▸", "the cursor; beside a GPU: the run uses it"),
    ("T t", "event line: throttling by heat began (T) and ended (t); other causes use their letters"),
    ("✗ ✓ + - X c", "event line: GPU lost, GPU back, process came, process left, Xid error, step compiled"),
    ("O o", "event line: a reason for lower clocks that has no letter of its own began and ended"),
    *((f"{shade.letter} {shade.glyph * 2}", f"below a chart, and as its shade: {shade.words}") for shade in SHADES),
)
LABEL_CELLS = 14


class HelpScreen(PageScreen):
    """A page of help, of which a filter shows only the entries that contain its words."""

    SCOPE = "help"

    def __init__(self, session: Session, sections: Callable[[int], list[Section]]) -> None:
        """`sections` returns the whole help in lines of a width."""
        super().__init__(session)
        self._sections = sections
        self._filter = ""

    def filter_rows(self, words: str) -> None:
        self._filter = words.strip()
        self.query_one(Page).action_end(-1)

    def body(self, width: int) -> list[Line]:
        sections = self._sections(width)
        if not self._filter:
            return _painted(sections, width)[1:]
        matching = _matching_sections(sections, self._filter)
        title = f"with “{self._filter}”" if matching else f"nothing with “{self._filter}”"
        return [rule(f"help {title}", width), *_painted(matching, width)]


def _matching_sections(sections: list[Section], words: str) -> list[Section]:
    """Return the entries that contain all of these words, in their sections; a section without one is left out."""
    matching = [
        Section(title, [entry for entry in every if has_all_words(" ".join(map(line_text, entry)), words)])
        for title, every in sections
    ]
    return [section for section in matching if section.entries]


def _painted(sections: list[Section], width: int) -> list[Line]:
    """Return the lines of the sections, each below an empty line and its title."""
    lines: list[Line] = []
    for title, entries in sections:
        lines += [[], rule(title, width), *chain.from_iterable(entries)]
    return lines


def help_sections(width: int, scope: str = "main") -> list[Section]:
    """Return every key and every knob in lines of `width` cells, the keys of the screen `scope` first."""
    first = scope if scope in SCOPE_WORDS else "main"
    return [
        Section("help", [paragraph(ABOUT, width, "text")]),
        *(_keys_section(shown_scope, width) for shown_scope in dict.fromkeys((first, *SCOPE_WORDS))),
        Section("signs", [_entry(sign, meaning, "key", width) for sign, meaning in SIGN_MEANINGS]),
        *(
            Section(f"knobs: {group}", [_knob_entry(name, width) for name in names])
            for group, names in knobs_by_group().items()
        ),
    ]


def _keys_section(scope: str, width: int) -> Section:
    """Return the keys of a screen, or those of every screen with the palette's."""
    rows = [(", ".join(action.shown_keys), action.help) for action in actions_of(scope)]
    if scope == "everywhere":
        rows.append(("mouse", "A click chooses a row, an answer, a key or an event; Shift selects text."))
    return Section(f"keys {SCOPE_WORDS[scope]}", [_entry(keys, text, "key", width) for keys, text in rows])


def _knob_entry(name: str, width: int) -> list[Line]:
    """Return the description of a knob, its effects and its values."""
    knob = KNOBS_BY_NAME[name]
    effects = (("speed", knob.speed), ("memory", knob.memory), ("training", knob.training))
    values_words = f"takes {knob.values.describe()}; default {knob.text_of(knob.default)}"
    return [
        *_entry(name, knob.what, "title", width),
        *(line for label, text in effects if text for line in _entry("", f"{label}: {text}", "text", width)),
        *labelled((" " * LABEL_CELLS, "text"), values_words, width, "muted"),
    ]


def _entry(label: str, text: str, tone: Tone, width: int) -> list[Line]:
    """Return one entry: a text beside its label."""
    return labelled((f"{label:<{LABEL_CELLS - 1}} ", tone), text, width)
