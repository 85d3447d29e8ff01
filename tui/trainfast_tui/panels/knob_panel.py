"""The knobs of the next run, in groups, their keys, and the text about the knob under the cursor."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from textual import events

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_values import whole_number
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.script_reach import Way, reach_of
from trainfast_tui.next_run.next_run import NextRun
from trainfast_tui.next_run.sources import preset_choices, variant_choices
from trainfast_tui.painting import ListWidget
from trainfast_tui.panels.ask import ask_choice, ask_preset_name, ask_text
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import LabelledText, Line, Piece, Section, Tone, has_all_words
from trainfast_tui.text.keys import KNOBS_IN_ORDER, SCRIPT_KEY, key_of

if TYPE_CHECKING:
    from trainfast_runner.settings.knob_values import KnobValue, KnobValues
    from trainfast_tui.session import Session


AUTO = "auto"
NO_VALUE = "–"
"""Stands for the value of a knob that cannot reach a script."""
NAME_WIDTH = 15
KNOBS_A_PAGE = 8
ABOUT_LINES = 3
"""Lines about the knob under the cursor; its help has the rest."""
MIN_LIST_LINES_BESIDE_REFUSAL = 3
"""Lines of the list that a long refusal leaves."""


class KnobPanel(ListWidget, can_focus=True):
    """A list of knobs with a cursor, and below it the text about the knob; the keys change the session's next run."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._shown_next_run: NextRun | None = None
        self._global_batch: tuple[int, int] | None = None
        self._advice: Mapping[str, str] = {}
        self._auto_choices: Mapping[str, str] = {}
        self._value_refusal: UserError | None = None
        self._headings: Mapping[str, str] = dict.fromkeys(KNOBS_IN_ORDER, "")
        """The heading over each listed knob, in the order of the list."""
        self._words = ""
        """Words that the listed knobs contain."""
        self._folded: tuple[str, ...] = ()
        """Knobs that do nothing here and stand in one line, until one of them is asked for."""
        self._is_unfolded = False
        self._knob_of_row: dict[int, str] = {}
        """The knob in each row of the panel."""
        self._cursor = 0
        self._top = 0

    @property
    def listed(self) -> tuple[str, ...]:
        """The names of the listed knobs."""
        return tuple(self._headings)

    @property
    def current(self) -> str:
        """The name of the knob under the cursor."""
        return self.listed[self._cursor]

    def show_knobs(self, knob: str = "") -> None:
        """Paint the knobs that matter to the next run, with the cursor on `knob` where one is named."""
        next_run = self._session.next_run
        if next_run is not self._shown_next_run or knob:
            self._value_refusal = None
        self._shown_next_run, self._advice = next_run, self._session.advice()
        self._global_batch = None if next_run is None else next_run.global_batch(self._session.machine)
        if next_run is not None:
            above = self.listed[: self._cursor + 1]
            headings = next_run.headings(KNOBS_IN_ORDER)
            is_unfolded = self._is_unfolded or bool(self._words)
            self._folded = () if is_unfolded else next_run.folded(self._session.machine)
            matching = {
                name: heading
                for name, heading in headings.items()
                if name not in self._folded
                and has_all_words(f"{name} {heading} {KNOBS_BY_NAME[name].what}", self._words)
            }
            self._headings = matching or headings
            # The cursor stays on its knob, or goes to the nearest one above that is still listed.
            self._cursor = next((self.listed.index(name) for name in reversed(above) if name in self.listed), 0)
        self._put_cursor_on(knob)
        self.repaint()

    def show_auto_choices(self, chosen: Mapping[str, str]) -> None:
        """Show the value that `auto` chose and the reason, by the name of the knob."""
        if chosen != self._auto_choices:
            self._auto_choices = chosen
            self.repaint()

    def _auto_choice(self, next_run: NextRun, name: str) -> str:
        """Return the value that `auto` chose for this knob; empty for another value, and before the choice is known."""
        return self._auto_choices.get(name, "") if next_run.spec.knobs.get(name) == AUTO else ""

    def _put_cursor_on(self, name: str | None) -> None:
        if name in self._folded:
            self._is_unfolded = True
            self.show_knobs()
        if name in self.listed:
            self._cursor = self.listed.index(name)

    def show_refusal(self, error: UserError) -> None:
        """Show why a value was refused, at its knob and on the status line."""
        self._value_refusal = error
        self._put_cursor_on(error.key)
        self.repaint()
        self.screen.notify(error.line_without_option(), severity="error")

    def move_to(self, name: str) -> None:
        """Move the cursor to this knob, where it is listed."""
        self._put_cursor_on(name)
        self._value_refusal = None
        self.repaint()

    def action_move(self, by: int) -> None:
        """Move the cursor `by` knobs down, clamped to the list."""
        self.move_to(self.listed[fmt.moved_cursor(self._cursor, by, len(self.listed))])

    @property
    def page_rows(self) -> int:
        return KNOBS_A_PAGE

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked knob; a click on the knob under the cursor types its value."""
        name = self._knob_of_row.get(event.y)
        if name == self.current:
            self.action_type_value()
        elif name is not None:
            self.move_to(name)

    def filter_knobs(self, words: str) -> None:
        """List only the knobs whose name, group or description contains all of these words; a name comes first."""
        self._words = words
        self.show_knobs(next((name for name in KNOBS_IN_ORDER if words and name.startswith(words)), ""))

    def action_turn(self, by: int, around: bool = False) -> None:
        next_run = self._session.next_run
        if next_run is None:
            return
        try:
            refused = next_run.refused_values(self.current, self._session.machine)
            self._change(next_run.turn(self.current, by, around=around, skipped=refused))
        except UserError as error:
            self.show_refusal(error)

    def _change(self, next_run: NextRun) -> None:
        """Change the next run and show it at once: the next key may already be waiting."""
        self._session.set_next_run(next_run)
        self.show_knobs()

    def action_cycle(self) -> None:
        self.action_turn(1, around=True)

    def action_reset_knob(self) -> None:
        if self._session.next_run is not None:
            self._change(self._session.next_run.reset(self.current))

    def action_type_value(self) -> None:
        entry, next_run = KNOBS_BY_NAME[self.current], self._session.next_run
        if next_run is None:
            return

        def set_value(text: str) -> None:
            # Looked up again: a run that was started elsewhere may have replaced the next run meanwhile.
            if self._session.next_run is not None:
                self._change(self._session.next_run.with_value(entry.name, text))

        current = next_run.spec.knobs.get(entry.name)
        usual = list(dict.fromkeys(map(entry.text_of, entry.values.ladder(current))))
        hint, text = entry.values.describe(), next_run.text_of(entry.name)
        ask_text(self.app, entry.name, hint, text, set_value, choices=usual)

    def action_preset(self) -> None:
        session, next_run = self._session, self._session.next_run
        fit_words = session.background.fit_words(session.machine, session.snapshot)
        current = next_run.spec.name.partition("/")[0] if next_run is not None else None
        ask_choice(self.app, "What to train", preset_choices(fit_words), self._choose_variant, current=current)

    def _choose_variant(self, preset: str) -> None:
        try:
            variants = variant_choices(preset)
        except UserError as error:
            self.show_refusal(error)
            return
        if variants:
            ask_choice(self.app, preset, variants, self._set_preset)
        else:
            self._set_preset(preset)

    def _set_preset(self, name: str) -> None:
        try:
            spec = self._session.set_preset(name).spec
        except UserError as error:
            self.show_refusal(error)
            return
        self.screen.notify(f"{spec.name}: {spec.title}")

    def action_save(self) -> None:
        next_run = self._session.next_run
        if next_run is None:
            return
        from trainfast_runner.settings.presets import user_directory

        def save(name: str) -> None:
            try:
                self.screen.notify(f"saved: {next_run.save(name)}")
            except UserError as error:
                self.screen.notify(error.line_without_option(), severity="error")

        hint = f"A name; it becomes a file in {user_directory()}, with the comments of the preset it comes from."
        ask_preset_name(self.app, "Save these knobs as", hint, "", save)

    def lines(self, width: int, height: int) -> list[Line]:
        next_run = self._shown_next_run
        if next_run is None:
            return [fmt.rule("next run", width)]
        head = self._head(next_run, width)
        room = height - 1 - len(head)
        if (refusal := self._value_refusal) is not None:
            # A refusal and its advice matter more than knobs that were not turned.
            text = _refusal_lines(refusal, width, max(ABOUT_LINES, room // 2, room - MIN_LIST_LINES_BESIDE_REFUSAL))
        else:
            text = self._short_text(width)
        room = max(1, room - len(text))
        rows, row_of_knob = self._list_rows(next_run, width)
        cursor = row_of_knob[self._cursor]
        # The group's title stays visible when the cursor reaches its first knob.
        self._top = max(fmt.clamp_scroll(min(self._top, cursor - 1), len(rows), room), cursor - room + 1)
        above = sum(row < self._top for row in row_of_knob)
        below = sum(row >= self._top + room for row in row_of_knob)
        first_row = 1 + len(head) - self._top
        self._knob_of_row = {
            first_row + row: name
            for row, name in zip(row_of_knob, self.listed, strict=True)
            if self._top <= row < self._top + room
        }
        visible_rows = rows[self._top : self._top + room]
        visible_rows += [[] for _ in range(room - len(visible_rows))]
        return [fmt.rule("next run", width, fmt.hidden_words(above, below)), *head, *visible_rows, *text]

    def _head(self, next_run: NextRun, width: int) -> list[Line]:
        rows: list[LabelledText] = [("preset ", next_run.spec.name, "title")]
        rows += [("script ", next_run.spec.title, "text")] if next_run.script is not None else []
        rows += [("with ", override, "warning") for override in next_run.typed_field_overrides()]
        lines: list[Line] = [
            [(label, "muted"), (fmt.plain(text, max(8, width - len(label))), tone)] for label, text, tone in rows
        ]
        if self._global_batch is not None:
            lines.append(_global_batch_line(next_run.spec.knobs, *self._global_batch, width))
        return lines

    def _list_rows(self, next_run: NextRun, width: int) -> tuple[list[Line], list[int]]:
        """Return the rows of the list with its headings, and the index of each knob's row."""
        rows: list[Line] = []
        row_of_knob: list[int] = []
        group = ""
        for number, (name, heading) in enumerate(self._headings.items()):
            if heading != group:
                group = heading
                rows.append([(group, "muted")])
            changed = next_run.is_changed(name)
            row_of_knob.append(len(rows))
            rows.append(_knob_row(name, next_run, changed, number == self._cursor, self._auto_choice(next_run, name)))
            if number == self._cursor and next_run.matters(name):
                refused = next_run.refused_values(name, self._session.machine)
                rows[-1] += _other_values(name, next_run, refused, width - fmt.line_length(rows[-1]))
        if self._folded:
            words = f"do nothing here (/): {', '.join(self._folded)}"
            rows.append([(fmt.truncate(words, width), "muted")])
        return rows, row_of_knob

    def about(self, width: int) -> Section:
        """Return the whole text about the knob under the cursor, after the refusal of a value."""
        refusal = self._value_refusal
        words = "" if refusal is None else f"Refused: {refusal.line_without_option()}"
        return Section(self.current, list(filter(None, [fmt.paragraph(words, width, "error"), *self._texts(width)])))

    def _short_text(self, width: int) -> list[Line]:
        """Return a title and `ABOUT_LINES` lines: refusal and advice first, then one line of each other text."""
        refused, advice, *others = self._texts(width)
        lines = refused + advice
        for first, *rest in filter(None, others):
            *before, (last, tone) = first
            cut = fmt.with_more(last, width - fmt.line_length(before)) if rest else last
            lines.append([*before, (cut, tone)])
        title = fmt.rule(self.current, width, f"{key_of('main', 'knob_help')}: all of it")
        return [title, *lines[:ABOUT_LINES]]

    def _texts(self, width: int) -> list[list[Line]]:
        """Return the texts about the knob under the cursor, refusal and advice first; some may be empty."""
        next_run, name = self._shown_next_run, self.current
        entry, way, here, refused, elsewhere = KNOBS_BY_NAME[name], "", "", "", ""
        if next_run is not None:
            here = self._auto_choice(next_run, name)
            reasons = next_run.refused_values(name, self._session.machine)
            refused = reasons.pop(next_run.spec.knobs.get(name), "")
            elsewhere = "; ".join(reasons.values())
            if next_run.script is not None:
                reach = reach_of(name, next_run.script)
                way = f"{reach.text}; {SCRIPT_KEY} maps a flag" if reach.way is Way.NONE else str(reach)
        texts: list[tuple[Piece, str]] = [
            (("refused ", "error"), refused),
            (("advice ", "accent"), self._advice.get(name, "")),
            (("script ", "accent"), way),
            (("here   ", "secondary"), here),
            (("", "text"), entry.what),
            (("speed  ", "secondary"), entry.speed),
            (("memory ", "secondary"), entry.memory),
            (("not here ", "muted"), elsewhere),
            (("takes ", "muted"), entry.values.describe()),
            (("trains ", "secondary"), entry.training),
        ]
        return [fmt.labelled(label, text, width) for label, text in texts]


def _global_batch_line(knobs: KnobValues, total: int, ranks: int, width: int) -> Line:
    factors = [
        f"{factor:,}" for factor in (whole_number(knobs, "batch_size"), whole_number(knobs, "grad_accum"), ranks)
    ]
    head: Line = [("global batch ", "muted"), (f"{total:,}", "title")]
    long = f" = {' x '.join(factors)} {'rank' if ranks == 1 else 'ranks'}"
    return fmt.first_fitting([[*head, (words, "muted")] for words in (long, f" = {'x'.join(factors)}")], width)


def _refusal_lines(error: UserError, width: int, room: int) -> list[Line]:
    """Return a refusal in at most `room` lines; the last one stays, which names the values that work."""
    lines = fmt.wrap(f"Refused: {error.line_without_option()}", width)
    is_whole = len(lines) < room
    if not is_whole:
        lines = [*lines[: room - 3], fmt.with_more(lines[room - 3], width), lines[-1]]
    refused: list[Line] = [[(line, "error")] for line in lines]
    return [fmt.rule("", width, "" if is_whole else f"{key_of('main', 'knob_help')}: all of it")[1:], *refused]


def _knob_row(name: str, next_run: NextRun, is_changed: bool, is_current: bool, choice: str) -> Line:
    value = next_run.text_of(name) if next_run.matters(name) else NO_VALUE
    if choice:
        value += f" ({choice.partition(',')[0]})"
    mark = "•" if is_changed else " "
    pointer = "▸" if is_current else " "
    tone: Tone = "cursor" if is_current else "title" if is_changed else "text"
    row: Line = [(f"{pointer}{mark}{name:<{NAME_WIDTH}}", tone)]
    before = next_run.shown_run_knobs
    before_words = ""
    if is_changed and before is not None and name in before:
        before_words = f"  was {KNOBS_BY_NAME[name].text_of(before[name])}"
    if is_current:
        return [*row, (f"{value}{before_words}", "cursor")]
    return [*row, (value, "warning" if is_changed else "text"), (before_words, "muted")]


def _other_values(name: str, next_run: NextRun, refused: Container[KnobValue], room: int) -> Line:
    """Return the values that the arrows lead to, nearest first, as far as there is room; refused ones are grey."""
    entry, current = KNOBS_BY_NAME[name], next_run.spec.knobs.get(name)
    ladder = list(entry.values.ladder(current))
    if current not in ladder:
        return []
    at = ladder.index(current)
    line: Line = [("  ← → ", "accent")]
    for value in (*ladder[at + 1 :], *reversed(ladder[:at])):
        words = f"{'· ' if len(line) > 1 else ''}{entry.text_of(value)} "
        if fmt.line_length(line) + len(words) > room:
            break
        line.append((words, "muted" if value in refused else "text"))
    return line if len(line) > 1 else []
