"""A script of the user's own as discovery saw it: its command, the mapping of knobs, and its flags."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.scripts.script_preset import flag_tokens, flag_words_text
from trainfast_runner.settings.scripts.script_reach import ways_without_flag
from trainfast_tui.painting.painted import WidgetWithNotice
from trainfast_tui.text.discovery_words import default_words, discovery_words
from trainfast_tui.text.format import plain, to_width
from trainfast_tui.text.keys import key_of
from trainfast_tui.text.lines import Line, clamp_scroll, labelled, moved_cursor, paragraph, rule

if TYPE_CHECKING:
    from trainfast_runner.records.discovered import Discovered, Flag
    from trainfast_runner.settings.scripts.script_mapping import FlagMapping

MIN_FLAG_LINES = 5
"""Lines that the mapping leaves to the flags."""
MIN_KNOB_LINES = 3
"""Rows that the list of knobs keeps on a small screen."""
MAX_COMMAND_LINES, MAX_REASON_LINES, MAX_NOTICE_LINES = 3, 2, 3
KNOB_CELLS = 15
WIDE_FLAG_CELLS, NARROW_FLAG_CELLS = (50, 28), (36, 16)
"""Cells of the names of a flag, and of its default."""
WIDE_NAMES_FROM = 100
"""Columns from which the names of the flags have much room."""


@dataclass(frozen=True, slots=True)
class ScriptFindings:
    """A script of the user's own, as far as discovery has seen it."""

    command: tuple[str, ...] = ()
    cwd: str = ""
    """The folder that the command starts in."""
    discovered: Discovered | None = None
    """The flags of the script; None before discovery has found them."""
    mapping: Sequence[FlagMapping] = ()
    """The flag of each mapped knob."""
    waiting: str = ""
    """Describes discovery while it is under way."""
    refusal: str = ""
    """The reason discovery failed."""


class ScriptView(WidgetWithNotice):
    """The view of a script, as large as the screen, with a cursor on the mapped knobs."""

    DEFAULT_CSS = "ScriptView { height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self._findings = ScriptFindings()
        self._cursor = 0
        self._first_flag = 0

    @property
    def current(self) -> str | None:
        """The knob under the cursor; None if none is mapped."""
        mapping = self._findings.mapping
        return mapping[self._cursor].knob if mapping else None

    def show_findings(self, findings: ScriptFindings, knob: str = "") -> None:
        """Show this script, with the cursor on `knob` where one is named."""
        if findings.discovered is not self._findings.discovered:
            self._cursor = self._first_flag = 0
        self._findings = findings
        rows = (row for row, flag_mapping in enumerate(findings.mapping) if flag_mapping.knob == knob)
        self._cursor = moved_cursor(next(rows, self._cursor), 0, len(findings.mapping))
        self.repaint()

    def action_move(self, by: int) -> None:
        """Move the cursor among the mapped knobs."""
        self._cursor = moved_cursor(self._cursor, by, len(self._findings.mapping))
        self.repaint()

    def action_page(self, by: int) -> None:
        """Scroll the flags by some lines."""
        flags = self._findings.discovered.flags if self._findings.discovered is not None else []
        self._first_flag = moved_cursor(self._first_flag, by * MIN_FLAG_LINES, len(flags))
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        notice = self.notice_lines(width, MAX_NOTICE_LINES)
        head = _head(self._findings, width)
        room = max(0, height - len(head) - len(notice))
        body = self._body(width, room)[:room]
        return [*head, *body, *([[]] * (room - len(body))), *notice]

    def _body(self, width: int, room: int) -> list[Line]:
        discovered = self._findings.discovered
        if discovered is None:
            return []
        ways = _way_lines(discovered, self._findings.mapping, width)
        flags = [_flag_line(flag, self._findings.mapping, width) for flag in discovered.flags]
        rows, reason = self._mapping_lines(width)
        row_room = room - 2 - len(reason) - len(ways) - min(MIN_FLAG_LINES, len(flags))
        top = max(0, self._cursor + 1 - max(MIN_KNOB_LINES, row_room))
        rows = rows[top : top + max(MIN_KNOB_LINES, row_room)]
        lines = [rule("knobs and their flags", width), *rows, *reason, *ways]
        if flags and room > len(lines) + 1:
            flag_room = room - len(lines) - 1
            first = self._first_flag = clamp_scroll(self._first_flag, len(flags), flag_room)
            last = min(len(flags), first + flag_room)
            part = f", {first + 1} to {last} (PgUp PgDn)" if flag_room < len(flags) else ""
            lines += [rule(f"flags of the script{part}", width), *flags[first:last]]
        return lines

    def _mapping_lines(self, width: int) -> tuple[list[Line], list[Line]]:
        """Return a row for each mapped knob, and the reason of the one under the cursor."""
        mapping = self._findings.mapping
        if not mapping:
            words = f"No flag was recognised; {key_of('script', 'add')} maps a knob to one."
            return paragraph(words, width, "warning"), []
        rows = [_knob_line(flag_mapping, index == self._cursor, width) for index, flag_mapping in enumerate(mapping)]
        return rows, paragraph(mapping[self._cursor].reason, width, "muted", MAX_REASON_LINES)


def _head(findings: ScriptFindings, width: int) -> list[Line]:
    lines = [rule("own script", width)]
    if not findings.command:
        about = (
            "A script of your own runs as it is, in its own environment: its steps, memory and speed are measured, its"
            " largest batch and its fastest settings found. First it is run to its argument parser and no further,"
            " to see which of its flags take which knobs."
        )
        first_step = f"{key_of('script', 'map')} types its command."
        return [*lines, *paragraph(about, width, "text"), [], [(first_step, "title")]]
    lines += labelled(("command ", "muted"), shlex.join(findings.command), width)[:MAX_COMMAND_LINES]
    lines += labelled(("folder  ", "muted"), findings.cwd, width)[:1]
    if findings.refusal:
        lines += labelled(("refused ", "error"), findings.refusal, width, "error")
        command_key, again_key = key_of("script", "command"), key_of("script", "again")
        next_steps = f"{command_key} types another command; {again_key} looks again after a change."
        return [*lines, [], *paragraph(next_steps, width, "title")]
    text = findings.waiting if findings.discovered is None else discovery_words(findings.discovered)
    return [*lines, *labelled(("found   ", "muted"), text, width, "muted" if findings.discovered is None else "text")]


def _knob_line(flag_mapping: FlagMapping, is_current: bool, width: int) -> Line:
    value = "" if flag_mapping.value is None else f"now {KNOBS_BY_NAME[flag_mapping.knob].text_of(flag_mapping.value)}"
    knob = f"{'▸' if is_current else ' '} {flag_mapping.knob:<{KNOB_CELLS}} "
    words = to_width(plain(flag_words_text(flag_mapping.flag_words)), width - len(knob) - 1 - len(value))
    return [(f"{knob}{words} {value}", "cursor" if is_current else "text")]


def _way_lines(discovered: Discovered, mapping: Sequence[FlagMapping], width: int) -> list[Line]:
    """Return the knobs that reach the script without a flag, a paragraph a way."""
    ways = ways_without_flag(discovered.framework or "", [flag_mapping.knob for flag_mapping in mapping])
    return [
        line
        for way, knobs in ways.items()
        for line in paragraph(f"without a flag, through {way}: {', '.join(knobs)}", width, "secondary", 2)
    ]


def _flag_line(flag: Flag, mapping: Sequence[FlagMapping], width: int) -> Line:
    names = set(flag.names)
    knobs = [flag_mapping.knob for flag_mapping in mapping if names & flag_tokens(flag_mapping.flag_words)]
    name_room, default_room = WIDE_FLAG_CELLS if width >= WIDE_NAMES_FROM else NARROW_FLAG_CELLS
    text = f"  {to_width(plain(', '.join(flag.names)), name_room)} {flag.type:<10} "
    default = to_width(default_words(flag), default_room)
    return [(text, "text"), (default, "muted"), (f" {', '.join(knobs)}", "accent")]
