"""The text about one knob: its effects, its values, the advice for it, and its way into a script."""

from __future__ import annotations

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.scripts.script_reach import Way, reach_of
from trainfast_tui.text.keys import SCRIPT_KEY, key_of
from trainfast_tui.text.lines import Line, Section, labelled, line_length, paragraph, rule, with_more, wrap


class KnobText(msgspec.Struct, frozen=True):
    """The texts about a knob of the next run."""

    name: str
    script: ScriptPreset | None
    """The user's own script; None for a model."""
    advice: str = ""
    auto_choice: str = ""
    """The value that `auto` chose, and the reason; empty for another value."""
    refusals: tuple[str, ...] = ()
    """The reason of each value that cannot work on the devices of the run."""

    def whole(self, width: int, refusal: UserError | None) -> Section:
        """Return all of the text, after the refusal of a value."""
        entry = KNOBS_BY_NAME[self.name]
        entries = [
            paragraph("" if refusal is None else f"Refused: {refusal.line_without_option()}", width, "error"),
            self._way(width),
            paragraph(entry.what, width, "text"),
            *self._trade_off(width),
            labelled(("trains ", "secondary"), entry.training, width),
        ]
        return Section(self.name, [lines for lines in entries if lines])

    def cut_to(self, room: int, width: int) -> list[Line]:
        """Return the text in at most `room` lines."""
        way, description = self._way(width), KNOBS_BY_NAME[self.name].what
        trade_off = [line for entry in self._trade_off(width) for line in entry]
        # The short texts about speed and memory are worth more than the end of a long description.
        lines_for_description = max(1, room - 1 - len(way) - len(trade_off))
        lines = [*way, *paragraph(description, width, "text", lines_for_description), *trade_off]
        is_whole = len(wrap(description, width)) <= lines_for_description and len(lines) < room
        if len(lines) >= room:
            *before, (last, tone) = lines[room - 2]
            lines = [*lines[: room - 2], [*before, (with_more(last, width - line_length(before)), tone)]]
        return [rule(self.name, width, "" if is_whole else f"{key_of('main', 'knob_help')}: all of it"), *lines]

    def _trade_off(self, width: int) -> list[list[Line]]:
        """Return advice, the choice of `auto`, the effects on speed and memory, and the values; an entry for each."""
        entry = KNOBS_BY_NAME[self.name]
        return [
            labelled(("advice ", "accent"), self.advice, width),
            labelled(("here   ", "secondary"), self.auto_choice, width),
            labelled(("speed  ", "secondary"), entry.speed, width),
            labelled(("memory ", "secondary"), entry.memory, width),
            labelled(("not here ", "muted"), "; ".join(self.refusals), width, "muted"),
            paragraph(f"takes {entry.values.describe()}", width, "muted"),
        ]

    def _way(self, width: int) -> list[Line]:
        """Return the way of the knob into the user's own script; empty for a model."""
        if self.script is None:
            return []
        reach = reach_of(self.name, self.script)
        words = f"{reach.text}; {SCRIPT_KEY} maps a flag" if reach.way is Way.NONE else str(reach)
        return labelled(("script ", "accent"), words, width)
