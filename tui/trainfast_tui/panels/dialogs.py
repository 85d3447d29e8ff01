"""The dialogs: yes or no, one line of text, one of a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from trainfast_runner.errors import UserError
from trainfast_tui.panels.header_footer import FilterLine
from trainfast_tui.text.format import has_all_words, plain
from trainfast_tui.text.keys import shown_key

AnswerT = TypeVar("AnswerT")


class KeyHint(Static):
    """A key and what it does; a click on it is the key."""

    def __init__(self, key: str, words: str) -> None:
        super().__init__(Text(f"{shown_key(key)} {plain(words)}"), classes=f"hint {key}", markup=False)
        self._key = key

    def on_click(self) -> None:
        self.app.post_message(Key(self._key, None))


class Dialog(ModalScreen[AnswerT]):
    """A box in the middle of the screen; it is dismissed with the answer, or by Esc with None."""

    BINDINGS = [
        Binding("escape", "leave", "leave", show=False),
        Binding("ctrl+l", "app.repaint", "repaint", show=False),  # no key of the app reaches a dialog otherwise
    ]

    keys: Sequence[tuple[str, str]] = (("enter", "accepts"), ("escape", "leaves"))
    """The keys in the last line, each with its effect."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(plain(self._title)))
            yield from self.body()
            with Horizontal(classes="keys"):
                yield from (KeyHint(key, words) for key, words in self.keys)

    def body(self) -> ComposeResult:
        """Yield the widgets between the title and the keys."""
        yield from ()

    def on_click(self, event: events.Click) -> None:
        """Leave by a click beside the dialog."""
        if event.widget is self:
            self.action_leave()

    def action_leave(self) -> None:
        """Close without an answer."""
        self.dismiss(None)


class YesDialog(Dialog[bool]):
    """A question with the answers yes (True) and no (None).

    Each yes ends, deletes, replaces or risks something: it takes the key y alone, as Enter opens things in lists.
    """

    BINDINGS = [Binding("y", "yes", "yes", show=False), Binding("n,q", "leave", "no", show=False)]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__(question)
        self.keys = ("y", f" {yes}"), ("n", " leave it")

    def action_yes(self) -> None:
        """Answer yes."""
        self.dismiss(True)


class TextDialog(Dialog[str]):
    """One line of text. Enter calls `accept`: the dialog stays open on a UserError, else its answer is the text."""

    def __init__(self, title: str, hint: str, value: str, accept: Callable[[str], object]) -> None:
        super().__init__(title)
        self._hint = hint
        self._value = value
        self._accept = accept

    def body(self) -> ComposeResult:
        yield Input(self._value, select_on_focus=True)
        yield Static(Text(plain(self._hint)), classes="hint")
        yield Static(classes="wrong")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.take(event.value)

    def take(self, text: str) -> None:
        """Accept this text, or show why it is refused."""
        try:
            self._accept(text)
        except UserError as error:
            self.query_one(".wrong", Static).update(Text(plain(error.line_without_option())))
        else:
            self.dismiss(text)


class ValueDialog(TextDialog):
    """One line of text above a list of usual values: a click on one takes it, and so does Enter."""

    BINDINGS = [Binding("down", "app.focus_next", "to the list", show=False)]

    def __init__(
        self, title: str, hint: str, value: str, accept: Callable[[str], object], values: Sequence[str]
    ) -> None:
        super().__init__(title, hint, value, accept)
        self._values = values

    def body(self) -> ComposeResult:
        yield from super().body()
        yield OptionList(*self._values, markup=False)

    def on_mount(self) -> None:
        if self._value in self._values:
            self.query_one(OptionList).highlighted = self._values.index(self._value)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.take(self._values[event.option_index])


class ChoiceList(OptionList):
    """A list that gives typed words to the filter of its dialog."""

    def on_key(self, event: events.Key) -> None:
        if self.screen.query_one(FilterLine).edit(event):
            event.stop()
            event.prevent_default()


class ChoiceDialog(Dialog[str]):
    """A list of (value, label) pairs, narrowed down by typed words. Its answer is a value."""

    keys = ("enter", "chooses"), ("escape", "leaves")

    def __init__(self, title: str, choices: Sequence[tuple[str, str]], current: str | None) -> None:
        super().__init__(title)
        self._choices = choices
        self._matching = list(choices)
        self._current = current

    def body(self) -> ComposeResult:
        yield ChoiceList(markup=False)
        yield FilterLine(self.narrow, is_open=True)

    def on_mount(self) -> None:
        self.narrow("")

    def narrow(self, words: str) -> None:
        """Show only the choices that contain all of these words."""
        picker = self.query_one(ChoiceList)
        highlighted = picker.highlighted
        current = self._current if highlighted is None else self._matching[highlighted][0]
        self._matching = [choice for choice in self._choices if has_all_words(" ".join(choice), words)]
        value_width = max((len(value) for value, _ in self._choices), default=0)
        picker.clear_options()
        picker.add_options(Option(Text(plain(f"{value:<{value_width}}  {label}"))) for value, label in self._matching)
        values = [value for value, _ in self._matching]
        index = values.index(current) if current in values else 0
        picker.highlighted = index if values else None
        self.query_one(FilterLine).show_count(f"{len(values)} of {len(self._choices)}")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._matching[event.option_index][0])


class Checklist(OptionList):
    """Values to check with space; Enter accepts the line above them."""

    BINDINGS = [
        Binding("space", "select", "check", show=False),
        Binding("enter", "screen.submit", "accept", show=False),
    ]


class ChecklistDialog(TextDialog):
    """A line of words `name=a,b`, and a checklist of all values below it; each follows the other."""

    BINDINGS = [Binding("down", "app.focus_next", "to the list", show=False)]

    def __init__(
        self, title: str, hint: str, value: str, accept: Callable[[str], object], choices: Mapping[str, Sequence[str]]
    ) -> None:
        """`choices` are the values of each name."""
        super().__init__(title, hint, value, accept)
        self._pairs = [(name, value) for name, values in choices.items() for value in values]

    def body(self) -> ComposeResult:
        yield from super().body()
        yield Static(classes="count")
        yield Checklist(*(f"{name}={value}" for name, value in self._pairs), markup=False)

    @property
    def _checked(self) -> dict[str, list[str]]:
        """The values of each name on the line."""
        words = (word.partition("=") for word in self.query_one(Input).value.split())
        return {name: list(filter(None, values.split(","))) for name, _, values in words}

    def on_input_changed(self) -> None:
        """Check the values on the line."""
        checked, checklist, count = self._checked, self.query_one(Checklist), 0
        for index, (name, value) in enumerate(self._pairs):
            is_checked = value in checked.get(name, ())
            count += is_checked
            checklist.replace_option_prompt_at_index(index, Text(f"[{'x' if is_checked else ' '}] {name}={value}"))
        words = f"{count} of {len(self._pairs)} checked; ↓ goes to them, space checks"
        self.query_one(".count", Static).update(Text(words))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Put the value on the line, or take it off."""
        name, value = self._pairs[event.option_index]
        checked = self._checked
        values = checked.setdefault(name, [])
        (values.remove if value in values else values.append)(value)
        self.query_one(Input).value = " ".join(
            f"{name}={','.join(values)}" for name, values in checked.items() if values
        )

    async def action_submit(self) -> None:
        """Accept the line."""
        await self.query_one(Input).action_submit()
