"""The next run of a script of the user's own, which may leave knobs to the script."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, knob
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.scripts.script_reach import Way, reach_of
from trainfast_runner.settings.spec import with_setting
from trainfast_tui.next_run.next_run import LAUNCH_DEFAULTS, NextRun
from trainfast_tui.text.keys import SCRIPT_KEY

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine

SCRIPTS_OWN = "script's own"
"""The value of a knob that is left to the script."""


@dataclasses.dataclass(frozen=True)
class ScriptNextRun(NextRun):
    """A script with the knobs asked of it."""

    @property
    def script(self) -> ScriptPreset:
        """The user's own script."""
        assert self.spec.script is not None
        return self.spec.script

    def text_of(self, name: str) -> str:
        values = {**LAUNCH_DEFAULTS, **self.spec.knobs}
        return KNOBS_BY_NAME[name].text_of(values[name]) if name in values else SCRIPTS_OWN

    def headings(self, names: Iterable[str]) -> dict[str, str]:
        """Return the way of every knob into the script, by the knob's name: those with a flag first."""
        ways = {entry.name: reach_of(entry.name, self.script).way for entry in KNOBS}
        in_order = dict.fromkeys((*self.script.flag_words, *ways))
        return {name: way.value for way in Way for name in in_order if ways[name] is way}

    def matters(self, name: str) -> bool:
        """True if the knob reaches the script."""
        return reach_of(name, self.script).way is not Way.NONE

    def turn(self, name: str, by: int, *, around: bool = False, skipped: Container[KnobValue] = ()) -> Self:
        return self.with_value(name, self._turned(name, by, around=around, skipped=skipped))

    def _turned(self, name: str, by: int, *, around: bool, skipped: Container[KnobValue]) -> str:
        """Return the value `by` stops along those of the script's flag, as typed; the default before any is set."""
        entry, place = KNOBS_BY_NAME[name], self.script.flag_words.get(name)
        current = self.spec.knobs.get(name, entry.default)
        ladder = [
            value
            for value in entry.values.ladder(current)
            if (not isinstance(place, dict) or entry.text_of(value) in place)
            and (value == current or value not in skipped)
        ]
        if not ladder:
            return entry.text_of(current)
        if name not in self.spec.knobs:
            return entry.text_of(entry.default if entry.default in ladder else ladder[0])
        index = (ladder.index(current) if current in ladder else 0) + by
        return entry.text_of(ladder[index % len(ladder) if around else max(0, min(len(ladder) - 1, index))])

    def with_value(self, name: str, text: str) -> Self:
        """Return a copy with a typed value of the knob. Raises UserError for one that cannot reach the script."""
        if text.strip() in ("", SCRIPTS_OWN):
            return self.reset(name)
        name = knob(name).name
        reach = reach_of(name, self.script)
        if reach.way is Way.NONE:
            raise UserError(f"{name} cannot reach {self.script.name}: {reach.text}; {SCRIPT_KEY} maps a flag", key=name)
        spec = with_setting(self.spec, f"{name}={text}")
        self.script.applied(list(self.script.command), {name: spec.knobs[name]})
        return dataclasses.replace(self, spec=spec)

    def save(self, name: str) -> Path:
        from trainfast_runner.settings.scripts.saving_script import save_script_preset

        script = msgspec.structs.replace(self.script, name=name, knobs=dict(self.spec.knobs))
        return save_script_preset(script, {}, overwrite=True)

    def _ranks(self, machine: Machine) -> int | None:
        from trainfast_runner.running.scripts.command import read_command

        return read_command(self.script.command, cwd=self.script.cwd).process_count
