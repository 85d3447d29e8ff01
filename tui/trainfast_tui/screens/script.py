"""A script of the user's own: its command is asked for, its flags are found, and the mapping becomes a preset."""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import script_index, script_name
from trainfast_runner.running.command import read_command
from trainfast_runner.running.discovery import LIMIT_S
from trainfast_runner.settings import script_preset
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME
from trainfast_runner.settings.presets import user_directory
from trainfast_runner.settings.saving import save_script_preset
from trainfast_runner.settings.script_reach import LAUNCH_KNOBS, ways_without_flag
from trainfast_tui.control.messages import Message, Notified, TrainingPython
from trainfast_tui.panels.ask import ask_choice, ask_preset_name, ask_text
from trainfast_tui.panels.header_footer import Footer
from trainfast_tui.panels.table_view import TablePage, TableView
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


class ScriptDiscovered(Message, frozen=True):
    """The flags of a script are known."""

    command: tuple[str, ...]
    discovered: Discovered


class DiscoveryRefused(Message, frozen=True):
    """A script could not be looked into."""

    command: tuple[str, ...]
    error: UserError


def _discover(command: tuple[str, ...], python: TrainingPython, cancelled: threading.Event) -> ScriptDiscovered | None:
    """Find the flags of this command's script, which `python` runs in place of the command's interpreter."""
    from trainfast_runner.running.discovery import discover

    discovered = discover(command, python, cancelled=cancelled)
    return None if cancelled.is_set() else ScriptDiscovered(command, discovered)


class ScriptScreen(AppScreen):
    """Shows the flags found in a script, lets the mapping be corrected, and saves a preset for the next run."""

    SCOPE = "script"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._findings = ScriptFindings(cwd=session.cwd)
        self._flag_words = ""
        """Words that the listed flags contain."""

    def content(self) -> ComposeResult:
        yield TableView(self.page, shows_newest=False)

    @property
    def view(self) -> TableView:
        return self.query_one(TableView)

    @property
    def current(self) -> str | None:
        """The knob under the cursor; None if none is mapped."""
        mapped = list(self._findings.mapping)
        return mapped[min(self.view.cursor, len(mapped) - 1)] if mapped else None

    def on_mount(self) -> None:
        self._show_findings()

    def on_unmount(self) -> None:
        self.session.discovery.cancel()

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the time that discovery has taken."""
        self._show_findings()

    def on_posted_message(self, message: PostedMessage) -> None:
        """Take in the result of discovery; leave other messages to the app."""
        # The result of an earlier discovery may come late.
        match message.content:
            case ScriptDiscovered(command, discovered) if command == self._findings.command:
                self.view.to_top()
                mapping = {flag_mapping.knob: flag_mapping for flag_mapping in script_preset.propose(discovered.flags)}
                self._change(discovered=discovered, mapping=mapping)
            case DiscoveryRefused(command, error) if command == self._findings.command:
                self._change(refusal=error.line_without_option())

    def _change(self, knob: str = "", **changes: Any) -> None:
        """Change these fields of the findings, and put the cursor on `knob` where one is named."""
        self._findings = replace(self._findings, **changes)
        if knob in self._findings.mapping:
            self.view.cursor = list(self._findings.mapping).index(knob)
        self._show_findings()

    def _show_findings(self) -> None:
        findings = self._findings
        self.view.repaint()
        useless = {
            "save": findings.discovered is None,
            "add": findings.discovered is None,
            "filter": findings.discovered is None,
            "remove": not findings.mapping,
            "map": bool(findings.command) and not findings.mapping,
            "command": not findings.command,
        }
        hidden = {name for name, is_useless in useless.items() if is_useless}
        self.query_one(Footer).set_actions(hidden, {"map": "flag" if findings.command else "command"})

    def filter_rows(self, words: str) -> None:
        self._flag_words = words
        self.view.to_top()
        self.view.repaint()

    def page(self, width: int, height: int, cursor: int) -> TablePage:
        """Return the knobs with their flags, and the flags of the script."""
        findings, discovered = self._findings, self._findings.discovered
        head = _head(findings, width)
        if discovered is None:
            return TablePage(head)
        mapping = list(findings.mapping.values())
        rows = [_knob_line(flag_mapping, index == cursor, width) for index, flag_mapping in enumerate(mapping)]
        reason = f"No flag was recognised; {key_of('script', 'add')} maps a knob to one."
        if mapping:
            reason = mapping[min(cursor, len(mapping) - 1)].reason
        below = fmt.paragraph(reason, width, "muted", MAX_REASON_LINES)
        ways = ways_without_flag(discovered.framework or "", list(findings.mapping))
        for way, knobs in ways.items():
            below += fmt.paragraph(f"without a flag, through {way}: {', '.join(knobs)}", width, "secondary", 2)
        flags = _flag_lines(discovered.flags, mapping, self._flag_words)
        row_room = height - len(head) - len(below) - min(MIN_FLAG_LINES, len(flags)) - 3
        top = max(0, cursor + 1 - max(MIN_KNOB_LINES, row_room))
        head += [fmt.rule("knobs and their flags", width), *rows[top : top + max(MIN_KNOB_LINES, row_room)], *below]
        return TablePage(head, [fmt.rule("flags of the script", width), *flags] if flags else (), choices=len(rows))

    def action_command(self) -> None:
        """Ask for the command of a script, and look into it."""

        def on_command(text: str) -> None:
            self._look_into(tuple(split_command(text)))

        title, typed = "The command that starts your script", shlex.join(self._findings.command)
        ask_text(self.app, title, COMMAND_HINT, typed, split_command, on_command)

    def _look_into(self, command: tuple[str, ...]) -> None:
        """Have the flags of this command's script found, unless a run or a search is being measured."""
        session = self.session
        session.discovery.cancel()
        refusal = "the device is being measured, and starting the script would slow it; look again when that ends"
        if not session.is_device_used:
            refusal = ""
            discovery = partial(_discover, command, session.python)
            session.discovery.start(discovery, self.post, partial(DiscoveryRefused, command))
        self._findings = ScriptFindings(command, session.cwd, time.monotonic_ns(), refusal=refusal)
        self.notify("" if refusal else warning_words(command))
        self._show_findings()

    def action_map(self) -> None:
        if not self._findings.command:
            self.action_command()
        elif self.current is not None:
            self._ask_flag(self.current)
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
        before = script_preset.flag_words_text(findings.mapping[name].flag_words) if name in findings.mapping else ""

        def set_flag(text: str) -> None:
            flag_mapping = script_preset.mapping_typed(name, text, flags, GIVEN_REASON)
            if text != before:
                self._change(name, mapping={**self._findings.mapping, name: flag_mapping})

        ask_text(self.app, f"The flag of {name}", FLAG_HINT, before, set_flag)

    def action_remove(self) -> None:
        name = self.current
        if name is not None:
            self._change(mapping={knob: flag for knob, flag in self._findings.mapping.items() if knob != name})
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
MAX_FLAG_CELLS = 36
"""Cells of the names of a flag, and of its default."""


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
    mapping: Mapping[str, script_preset.FlagMapping] = field(default_factory=dict)
    """The flag of each mapped knob."""
    refusal: str = ""
    """The reason discovery failed."""


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
        next_step = f"{key_of('script', 'command')} types another command, or looks again with the same one."
        return [*lines, [], *fmt.paragraph(next_step, width, "title")]
    if findings.discovered is not None:
        return [*lines, *fmt.labelled(("found   ", "muted"), discovery_words(findings.discovered), width)]
    waited = fmt.elapsed(findings.began_ns, time.monotonic_ns())
    waiting = f"running the script up to its argument parser… {waited} of at most {LIMIT_S:.0f} s"
    return [*lines, *fmt.labelled(("found   ", "muted"), waiting, width, "muted")]


def _knob_line(flag_mapping: script_preset.FlagMapping, is_current: bool, width: int) -> Line:
    value = "" if flag_mapping.value is None else f"now {KNOBS_BY_NAME[flag_mapping.knob].text_of(flag_mapping.value)}"
    knob = f"{'▸' if is_current else ' '} {flag_mapping.knob:<{KNOB_CELLS}} "
    words = fmt.to_width(
        fmt.plain(script_preset.flag_words_text(flag_mapping.flag_words)), width - len(knob) - 1 - len(value)
    )
    return [(f"{knob}{words} {value}", "cursor" if is_current else "text")]


def _flag_lines(flags: Sequence[Flag], mapping: Sequence[script_preset.FlagMapping], words: str) -> list[Line]:
    """Return a row for each flag that contains all `words`: its names, type, the knobs that take it, its default."""
    rows = []
    for flag in flags:
        names = fmt.plain(", ".join(flag.names))
        if fmt.has_all_words(f"{names} {flag.type}", words):
            taking = [each.knob for each in mapping if set(flag.names) & script_preset.flag_tokens(each.flag_words)]
            rows.append((f"  {names}", flag.type, ", ".join(taking), default_words(flag)))
    return [[(line, "text")] for line in fmt.table(("", "", "", ""), rows, MAX_FLAG_CELLS)[1:]]


SHELL_WORDS = ("|", "||", "&", "&&", ";", "<", ">", ">>", "2>&1")
"""Words that mean something to a shell alone."""


def split_command(text: str) -> list[str]:
    """Split a typed command as a shell splits it, with `~` for the home folder; no shell runs it.

    Raises UserError for a text that is not a command, or one that cannot start in this folder.
    """
    words = [os.path.expanduser(word) for word in script_preset.split_words(text, "command")]
    shell_word = next((word for word in words if word in SHELL_WORDS), None)
    if shell_word is not None:
        raise UserError(f"no shell runs the command, so {shell_word} has no meaning in it", key="command")
    if not words:
        raise UserError("type the command that starts your script", key="command", advice="python train.py")
    read_command(words)
    return words
