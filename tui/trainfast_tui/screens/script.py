"""A script of the user's own: its command is asked for, its flags are found, and the mapping becomes a preset."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.script_in_command import script_index, script_name
from trainfast_runner.running.scripts.discovery import LIMIT_S
from trainfast_runner.settings.knobs import KNOBS
from trainfast_runner.settings.presets import user_directory
from trainfast_runner.settings.scripts.saving_script import save_script_preset
from trainfast_runner.settings.scripts.script_mapping import FlagMapping, propose
from trainfast_runner.settings.scripts.script_preset import flag_words_text
from trainfast_runner.settings.scripts.script_reach import LAUNCH_KNOBS
from trainfast_runner.settings.scripts.typed_mapping import mapping_typed
from trainfast_tui.control.messages import Notified
from trainfast_tui.control.script_control import DiscoveryRefused, ScriptDiscovered
from trainfast_tui.control.typed_command import split_command
from trainfast_tui.screens.base import AppScreen, PostedMessage
from trainfast_tui.session import Session
from trainfast_tui.text.discovery_words import warning_words
from trainfast_tui.text.format import elapsed
from trainfast_tui.text.keys import PRESET_KEY, RUN_KEY, key_of
from trainfast_tui.text.lines import Tone
from trainfast_tui.widgets.dialogs.ask import ask_choice, ask_preset_name, ask_text
from trainfast_tui.widgets.header_footer import Footer
from trainfast_tui.widgets.script_view import ScriptFindings, ScriptView

if TYPE_CHECKING:
    from trainfast_runner.records.discovered import Discovered
    from trainfast_tui.live.snapshot import Snapshot

NO_DISCOVERY = 0
"""The `discovery_id` while none was begun."""
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
        self._command: tuple[str, ...] = ()
        self._discovered: Discovered | None = None
        self._mapping: dict[str, FlagMapping] = {}
        self._refusal = ""
        self._discovery_id = NO_DISCOVERY
        self._discovery_began_ns = 0

    def compose(self) -> ComposeResult:
        yield ScriptView()
        yield self.footer()

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

    def show_notice(self, text: str, tone: Tone = "text") -> None:
        """Show a line at the bottom."""
        self.view.show_notice(text, tone)

    def on_posted_message(self, message: PostedMessage) -> None:
        """Take in the result of discovery; leave other messages to the app."""
        # The result of an earlier discovery may come late.
        match message.content:
            case ScriptDiscovered(discovery_id, discovered) if discovery_id == self._discovery_id:
                self._discovered = discovered
                self._mapping = {flag_mapping.knob: flag_mapping for flag_mapping in propose(discovered.flags)}
                self._show_findings()
            case DiscoveryRefused(discovery_id, error) if discovery_id == self._discovery_id:
                self._refusal = error.line_without_option()
                self._show_findings()

    def _show_findings(self, knob: str = "") -> None:
        waited = elapsed(self._discovery_began_ns, time.monotonic_ns())
        waiting = f"running the script up to its argument parser… {waited} of at most {LIMIT_S:.0f} s"
        mapping = tuple(self._mapping.values())
        findings = ScriptFindings(self._command, self.session.cwd, self._discovered, mapping, waiting, self._refusal)
        self.view.show_findings(findings, knob)
        footer = self.query_one(Footer)
        hidden: set[str] = set()
        if self._discovered is None:
            hidden |= {"save", "add"}
        if not self._mapping:
            hidden.add("remove")
            if self._command:
                hidden.add("map")
        if not self._command:
            hidden |= {"command", "again"}
        footer.hide(hidden)
        footer.relabel("map", "flag" if self._command else "command")

    def action_command(self) -> None:
        """Ask for the command of a script, and look into it."""

        def on_command(text: str) -> None:
            self._look_into(tuple(split_command(text)))

        title, typed = "The command that starts your script", shlex.join(self._command)
        ask_text(self.app, title, COMMAND_HINT, typed, split_command, on_command)

    def action_again(self) -> None:
        if self._command:
            self._look_into(self._command)
        else:
            self.action_command()

    def _look_into(self, command: tuple[str, ...]) -> None:
        """Have the flags of this command's script found, unless a run or a search is being measured."""
        session = self.session
        session.script_control.cancel()
        self._command, self._discovered, self._mapping, self._refusal = command, None, {}, ""
        self._discovery_id = NO_DISCOVERY
        if session.is_device_used:
            run_id = session.live_run.run_id if session.live_run is not None else session.other_live_run_id
            is_searching = session.searches.running_kind is not None
            user = "a search" if is_searching or run_id is None else run_id
            self._refusal = f"{user} is being measured, and starting the script would slow it; look again when it ends"
        else:
            self._discovery_began_ns = time.monotonic_ns()
            self._discovery_id = session.script_control.discover(command, self.post)
        self.notify("" if self._refusal else warning_words(command))
        self._show_findings()

    def action_map(self) -> None:
        if not self._command:
            self.action_command()
        elif self.view.current is not None:
            self._ask_flag(self.view.current)
        else:
            self.notify(f"No knob is mapped; {key_of('script', 'add')} maps one.", severity="warning")

    def action_add(self) -> None:
        if self._discovered is None:
            self.notify(NO_SCRIPT_NOTICE, severity="warning")
            return
        unmapped = [
            (knob.name, knob.what) for knob in KNOBS if knob.name not in self._mapping and knob.name not in LAUNCH_KNOBS
        ]
        ask_choice(self.app, "Map which knob", unmapped, self._ask_flag)

    def _ask_flag(self, name: str) -> None:
        """Ask for the flag of a knob; the dialog stays open while the script does not have it."""
        assert self._discovered is not None
        flags = self._discovered.flags
        before = flag_words_text(self._mapping[name].flag_words) if name in self._mapping else ""

        def set_flag(text: str) -> None:
            flag_mapping = mapping_typed(name, text, flags, GIVEN_REASON)
            if text != before:
                self._mapping[name] = flag_mapping
                self._show_findings(name)

        ask_text(self.app, f"The flag of {name}", FLAG_HINT, before, set_flag)

    def action_remove(self) -> None:
        name = self.view.current
        if name is not None:
            del self._mapping[name]
            self._show_findings()
            self.notify(f"{name} has no flag now; {key_of('script', 'add')} maps it again.")

    def action_save(self) -> None:
        """Ask for a name, save the preset, and choose it as the next run."""
        if self._discovered is None:
            self.notify(NO_SCRIPT_NOTICE, severity="warning")
            return
        hint = f"A name; command, folder and mapping become a file in {user_directory()}. {PRESET_KEY} lists it."
        ask_preset_name(self.app, "Save this script as", hint, _name_for(self._command), self._save)

    def _save(self, name: str) -> None:
        from trainfast_runner.running.scripts.discovered_preset import preset_of

        assert self._discovered is not None
        mapping = self._mapping.values()
        try:
            preset = preset_of(self._command, self._discovered, mapping, name=name, cwd=self.session.cwd)
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
