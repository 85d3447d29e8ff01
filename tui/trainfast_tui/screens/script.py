"""A script of the user's own: its command is asked for, its flags are found, and the mapping becomes a preset."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import script_index, script_name
from trainfast_runner.running.command import read_command
from trainfast_runner.running.discovery import LIMIT_S
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME
from trainfast_runner.settings.presets import user_directory
from trainfast_runner.settings.saving import save_script_preset
from trainfast_runner.settings.script_preset import (
    FlagMapping,
    flag_tokens,
    flag_words_text,
    mapping_typed,
    propose,
    split_words,
)
from trainfast_runner.settings.script_reach import LAUNCH_KNOBS, ways_without_flag
from trainfast_tui.control.messages import Notified
from trainfast_tui.control.run_control import DiscoveryRefused, ScriptDiscovered
from trainfast_tui.painting import ListWidget
from trainfast_tui.panels.ask import ask_choice, ask_preset_name, ask_text
from trainfast_tui.panels.header_footer import Footer
from trainfast_tui.screens.base import AppScreen, PostedMessage
from trainfast_tui.session import Session
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import Line
from trainfast_tui.text.keys import PRESET_KEY, RUN_KEY, key_of
from trainfast_tui.text.next_run_words import default_words, discovery_words, warning_words

if TYPE_CHECKING:
    from trainfast_runner.records.run_file import Discovered, Flag
    from trainfast_tui.live.snapshot import Snapshot


GIVEN_REASON = "given by you"
COMMAND_HINT = (
    "Such as: python train.py --data corpus/. Split as a shell splits it, and run without one; torchrun, accelerate"
    " launch and deepspeed may stand in front."
)
FLAG_HINT = (
    "A flag of the script, such as --bs. With more words, {} for the value: '--opt lr={}'. For switches, words by"
    " value: 'bf16: --half, fp32: nothing'."
)
NO_SCRIPT_NOTICE = f"No script is known yet; {key_of('script', 'command')} types its command."


class ScriptScreen(AppScreen):
    """Shows the flags found in a script, lets the mapping be corrected, and saves a preset for the next run."""

    SCOPE = "script"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._findings = ScriptFindings(cwd=session.cwd)

    def content(self) -> ComposeResult:
        yield ScriptView()

    @property
    def view(self) -> ScriptView:
        return self.query_one(ScriptView)

    def on_mount(self) -> None:
        self._show_findings()

    def on_unmount(self) -> None:
        self.session.script_control.cancel()

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the time that discovery has taken."""
        self._show_findings()

    def on_posted_message(self, message: PostedMessage) -> None:
        """Take in the result of discovery; leave other messages to the app."""
        # The result of an earlier discovery may come late.
        match message.content:
            case ScriptDiscovered(command, discovered) if command == self._findings.command:
                mapping = {flag_mapping.knob: flag_mapping for flag_mapping in propose(discovered.flags)}
                self._findings = replace(self._findings, discovered=discovered, mapping=mapping)
                self._show_findings()
            case DiscoveryRefused(command, error) if command == self._findings.command:
                self._findings = replace(self._findings, refusal=error.line_without_option())
                self._show_findings()

    def _show_findings(self, knob: str = "") -> None:
        findings = self._findings
        self.view.show_findings(findings, knob)
        hidden: set[str] = set()
        if findings.discovered is None:
            hidden |= {"save", "add", "filter"}
        if not findings.mapping:
            hidden.add("remove")
            if findings.command:
                hidden.add("map")
        if not findings.command:
            hidden |= {"command", "again"}
        self.query_one(Footer).set_actions(hidden, {"map": "flag" if findings.command else "command"})

    def filter_rows(self, words: str) -> None:
        self.view.filter_flags(words)

    def action_command(self) -> None:
        """Ask for the command of a script, and look into it."""

        def on_command(text: str) -> None:
            self._look_into(tuple(split_command(text)))

        title, typed = "The command that starts your script", shlex.join(self._findings.command)
        ask_text(self.app, title, COMMAND_HINT, typed, split_command, on_command)

    def action_again(self) -> None:
        if self._findings.command:
            self._look_into(self._findings.command)
        else:
            self.action_command()

    def _look_into(self, command: tuple[str, ...]) -> None:
        """Have the flags of this command's script found, unless a run or a search is being measured."""
        session = self.session
        session.script_control.cancel()
        refusal = ""
        if session.is_device_used:
            run_id = session.live_run.run_id if session.live_run is not None else session.other_live_run_id
            is_searching = session.searches.running_kind is not None
            user = "a search" if is_searching or run_id is None else run_id
            refusal = f"{user} is being measured, and starting the script would slow it; look again when it ends"
        else:
            session.script_control.discover(command, self.post)
        self._findings = ScriptFindings(command, session.cwd, time.monotonic_ns(), refusal=refusal)
        self.notify("" if refusal else warning_words(command))
        self._show_findings()

    def action_map(self) -> None:
        if not self._findings.command:
            self.action_command()
        elif self.view.current is not None:
            self._ask_flag(self.view.current)
        else:
            self.notify(f"No knob is mapped; {key_of('script', 'add')} maps one.", severity="warning")

    def action_add(self) -> None:
        if self._findings.discovered is None:
            self.notify(NO_SCRIPT_NOTICE, severity="warning")
            return
        unmapped = [
            (knob.name, knob.what)
            for knob in KNOBS
            if knob.name not in self._findings.mapping and knob.name not in LAUNCH_KNOBS
        ]
        ask_choice(self.app, "Map which knob", unmapped, self._ask_flag)

    def _ask_flag(self, name: str) -> None:
        """Ask for the flag of a knob; the dialog stays open while the script does not have it."""
        findings = self._findings
        assert findings.discovered is not None
        flags = findings.discovered.flags
        before = flag_words_text(findings.mapping[name].flag_words) if name in findings.mapping else ""

        def set_flag(text: str) -> None:
            flag_mapping = mapping_typed(name, text, flags, GIVEN_REASON)
            if text != before:
                self._findings = replace(self._findings, mapping={**self._findings.mapping, name: flag_mapping})
                self._show_findings(name)

        ask_text(self.app, f"The flag of {name}", FLAG_HINT, before, set_flag)

    def action_remove(self) -> None:
        name = self.view.current
        if name is not None:
            mapping = {knob: flag for knob, flag in self._findings.mapping.items() if knob != name}
            self._findings = replace(self._findings, mapping=mapping)
            self._show_findings()
            self.notify(f"{name} has no flag now; {key_of('script', 'add')} maps it again.")

    def action_save(self) -> None:
        """Ask for a name, save the preset, and choose it as the next run."""
        if self._findings.discovered is None:
            self.notify(NO_SCRIPT_NOTICE, severity="warning")
            return
        hint = f"A name; command, folder and mapping become a file in {user_directory()}. {PRESET_KEY} lists it."
        ask_preset_name(self.app, "Save this script as", hint, _name_for(self._findings.command), self._save)

    def _save(self, name: str) -> None:
        from trainfast_runner.running.discovery import preset_of

        findings = self._findings
        assert findings.discovered is not None
        mapping = findings.mapping.values()
        try:
            preset = preset_of(findings.command, findings.discovered, mapping, name=name, cwd=findings.cwd)
            path = save_script_preset(
                preset, {flag_mapping.knob: flag_mapping.reason for flag_mapping in mapping}, overwrite=True
            )
            self.session.set_preset(name)
        except UserError as error:
            self.show_refusal(error)
            return
        keys = f"{RUN_KEY} runs it, {key_of('main', 'batch')} finds its largest batch"
        self.session.post(Notified(f"{name} is the next run: {keys}. Saved: {path}"))
        self.dismiss()


def _name_for(command: tuple[str, ...]) -> str:
    """Return a name for the preset of this command: its script's or module's, or else its first word's."""
    index = script_index(command)
    name = Path(command[0]).stem if index is None else Path(script_name(command[index])).name.removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "mine"


MIN_FLAG_LINES = 5
"""Lines that the mapping leaves to the flags."""
MIN_KNOB_LINES = 3
"""Rows that the list of knobs keeps on a small screen."""
MAX_COMMAND_LINES, MAX_REASON_LINES = 3, 2
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
    began_ns: int = 0
    """The start of discovery (CLOCK_MONOTONIC)."""
    discovered: Discovered | None = None
    """The flags of the script; None before discovery has found them."""
    mapping: Mapping[str, FlagMapping] = field(default_factory=dict)
    """The flag of each mapped knob."""
    refusal: str = ""
    """The reason discovery failed."""


class ScriptView(ListWidget):
    """The view of a script, as large as the screen, with a cursor on the mapped knobs."""

    def __init__(self) -> None:
        super().__init__()
        self._findings = ScriptFindings()
        self._cursor = 0
        self._first_flag = 0
        self._flag_words = ""
        """Words that the listed flags contain."""

    def filter_flags(self, words: str) -> None:
        """List only the flags that contain all of these words."""
        self._flag_words, self._first_flag = words, 0
        self.repaint()

    def _flags(self) -> list[Flag]:
        discovered = self._findings.discovered
        flags = discovered.flags if discovered is not None else []
        return [flag for flag in flags if fmt.has_all_words(f"{' '.join(flag.names)} {flag.type}", self._flag_words)]

    @property
    def current(self) -> str | None:
        """The knob under the cursor; None if none is mapped."""
        mapped = list(self._findings.mapping)
        return mapped[self._cursor] if mapped else None

    def show_findings(self, findings: ScriptFindings, knob: str = "") -> None:
        """Show this script, with the cursor on `knob` where one is named."""
        if findings.discovered is not self._findings.discovered:
            self._cursor = self._first_flag = 0
        self._findings = findings
        rows = (row for row, mapped in enumerate(findings.mapping) if mapped == knob)
        self._cursor = fmt.moved_cursor(next(rows, self._cursor), 0, len(findings.mapping))
        self.repaint()

    def action_move(self, by: int) -> None:
        """Move the cursor among the mapped knobs."""
        self._cursor = fmt.moved_cursor(self._cursor, by, len(self._findings.mapping))
        self.repaint()

    def action_page(self, by: int) -> None:
        """Scroll the flags by some lines."""
        self._first_flag = fmt.moved_cursor(self._first_flag, by * MIN_FLAG_LINES, len(self._flags()))
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        head = _head(self._findings, width)
        room = max(0, height - len(head))
        return [*head, *self._body(width, room)[:room]]

    def _body(self, width: int, room: int) -> list[Line]:
        discovered = self._findings.discovered
        if discovered is None:
            return []
        mapping = self._findings.mapping.values()
        ways = _way_lines(discovered, mapping, width)
        flags = [_flag_line(flag, mapping, width) for flag in self._flags()]
        rows, reason = self._mapping_lines(width)
        row_room = room - 2 - len(reason) - len(ways) - min(MIN_FLAG_LINES, len(flags))
        top = max(0, self._cursor + 1 - max(MIN_KNOB_LINES, row_room))
        rows = rows[top : top + max(MIN_KNOB_LINES, row_room)]
        lines = [fmt.rule("knobs and their flags", width), *rows, *reason, *ways]
        if flags and room > len(lines) + 1:
            flag_room = room - len(lines) - 1
            first = self._first_flag = fmt.clamp_scroll(self._first_flag, len(flags), flag_room)
            last = min(len(flags), first + flag_room)
            part = f", {first + 1} to {last} (PgUp PgDn)" if flag_room < len(flags) else ""
            lines += [fmt.rule(f"flags of the script{part}", width), *flags[first:last]]
        return lines

    def _mapping_lines(self, width: int) -> tuple[list[Line], list[Line]]:
        """Return a row for each mapped knob, and the reason of the one under the cursor."""
        mapping = list(self._findings.mapping.values())
        if not mapping:
            words = f"No flag was recognised; {key_of('script', 'add')} maps a knob to one."
            return fmt.paragraph(words, width, "warning"), []
        rows = [_knob_line(flag_mapping, index == self._cursor, width) for index, flag_mapping in enumerate(mapping)]
        return rows, fmt.paragraph(mapping[self._cursor].reason, width, "muted", MAX_REASON_LINES)


def _head(findings: ScriptFindings, width: int) -> list[Line]:
    lines = [fmt.rule("own script", width)]
    if not findings.command:
        about = (
            "A script of your own runs as it is, in its own environment: its steps, memory and speed are measured, its"
            " largest batch and its fastest settings found. First it is run to its argument parser and no further,"
            " to see which of its flags take which knobs."
        )
        first_step = f"{key_of('script', 'map')} types its command."
        return [*lines, *fmt.paragraph(about, width, "text"), [], [(first_step, "title")]]
    lines += fmt.labelled(("command ", "muted"), shlex.join(findings.command), width)[:MAX_COMMAND_LINES]
    lines += fmt.labelled(("folder  ", "muted"), findings.cwd, width)[:1]
    if findings.refusal:
        lines += fmt.labelled(("refused ", "error"), findings.refusal, width, "error")
        command_key, again_key = key_of("script", "command"), key_of("script", "again")
        next_steps = f"{command_key} types another command; {again_key} looks again after a change."
        return [*lines, [], *fmt.paragraph(next_steps, width, "title")]
    if findings.discovered is not None:
        return [*lines, *fmt.labelled(("found   ", "muted"), discovery_words(findings.discovered), width)]
    waited = fmt.elapsed(findings.began_ns, time.monotonic_ns())
    waiting = f"running the script up to its argument parser… {waited} of at most {LIMIT_S:.0f} s"
    return [*lines, *fmt.labelled(("found   ", "muted"), waiting, width, "muted")]


def _knob_line(flag_mapping: FlagMapping, is_current: bool, width: int) -> Line:
    value = "" if flag_mapping.value is None else f"now {KNOBS_BY_NAME[flag_mapping.knob].text_of(flag_mapping.value)}"
    knob = f"{'▸' if is_current else ' '} {flag_mapping.knob:<{KNOB_CELLS}} "
    words = fmt.to_width(fmt.plain(flag_words_text(flag_mapping.flag_words)), width - len(knob) - 1 - len(value))
    return [(f"{knob}{words} {value}", "cursor" if is_current else "text")]


def _way_lines(discovered: Discovered, mapping: Collection[FlagMapping], width: int) -> list[Line]:
    """Return the knobs that reach the script without a flag, a paragraph a way."""
    ways = ways_without_flag(discovered.framework or "", [flag_mapping.knob for flag_mapping in mapping])
    return [
        line
        for way, knobs in ways.items()
        for line in fmt.paragraph(f"without a flag, through {way}: {', '.join(knobs)}", width, "secondary", 2)
    ]


def _flag_line(flag: Flag, mapping: Collection[FlagMapping], width: int) -> Line:
    names = set(flag.names)
    knobs = [flag_mapping.knob for flag_mapping in mapping if names & flag_tokens(flag_mapping.flag_words)]
    name_room, default_room = WIDE_FLAG_CELLS if width >= WIDE_NAMES_FROM else NARROW_FLAG_CELLS
    text = f"  {fmt.to_width(fmt.plain(', '.join(flag.names)), name_room)} {flag.type:<10} "
    default = fmt.to_width(default_words(flag), default_room)
    return [(text, "text"), (default, "muted"), (f" {', '.join(knobs)}", "accent")]


SHELL_WORDS = ("|", "||", "&", "&&", ";", "<", ">", ">>", "2>&1")
"""Words that mean something to a shell alone."""


def split_command(text: str) -> list[str]:
    """Split a typed command as a shell splits it, with `~` for the home folder; no shell runs it.

    Raises UserError for a text that is not a command, or one that cannot start in this folder.
    """
    words = [os.path.expanduser(word) for word in split_words(text, "command")]
    shell_word = next((word for word in words if word in SHELL_WORDS), None)
    if shell_word is not None:
        raise UserError(f"no shell runs the command, so {shell_word} has no meaning in it", key="command")
    if not words:
        raise UserError("type the command that starts your script", key="command", advice="python train.py")
    read_command(words)
    return words
