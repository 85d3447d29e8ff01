"""The dialogs: yes or no, one line of text, one of a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingsMap
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from trainfast_runner.errors import UserError
from trainfast_tui.terminal.textual_app import forward_key
from trainfast_tui.text.format import has_all_words, plain

INPUT_KEYS = BindingsMap(Input.BINDINGS).key_to_bindings
AnswerT = TypeVar("AnswerT")


class Dialog(ModalScreen[AnswerT]):
    """A box in the middle of the screen; it is dismissed with the answer, or by Esc with None.

    Over a slow link the key that opens a dialog and the keys meant for it arrive in one read, before its widgets
    exist: `queue_key` holds them back until the dialog is ready.
    """

    BINDINGS = [
        Binding("escape", "leave", "leave", show=False),
        Binding("ctrl+l", "app.repaint", "repaint", show=False),  # no key of the app reaches a dialog otherwise
    ]
    DEFAULT_CSS = """
    Dialog { align: center middle; background: transparent; }
    Dialog .dialog {
        width: 80; max-width: 100%; height: auto; max-height: 90%; padding: 0 1;
        border: round $primary; background: $surface;
    }
    Dialog .wrong { color: $text-error; }
    Dialog .hint { color: $text-muted; }
    Dialog Static { height: auto; }
    Dialog Input, Dialog Input:focus { border: none; height: 1; padding: 0; background: $boost; }
    Dialog Input:ansi { background: ansi_bright_black; }
    Dialog Input:nocolor { background: ansi_default; }
    Dialog OptionList, Dialog OptionList:focus {
        border: none; height: auto; max-height: 16; padding: 0; background: $surface;
        text-wrap: nowrap; text-overflow: ellipsis; scrollbar-size-vertical: 1;
    }
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._early_keys: list[tuple[str, str | None]] = []
        """Keys with their characters that were typed before the dialog was ready."""
        self.is_ready = True
        """True once its widgets can be given keys."""

    def queue_key(self, event: events.Key) -> None:
        """Hold back a key that was typed ahead of the dialog and came to the screen below."""
        self._early_keys.append((event.key, event.character))
        if self.is_ready and self.focused is not None:
            self.replay_early_keys(self.focused)

    def replay_early_keys(self, widget: Widget) -> None:
        """Give `widget` the early keys; later keys come to it by themselves."""
        self.is_ready = True
        keys, self._early_keys = self._early_keys, []
        for key, character in keys:
            forward_key(widget, events.Key(key, character))

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        if not self.is_ready:
            self.replay_early_keys(event.widget)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield self.text(self._title)
            yield from self.body()

    def body(self) -> ComposeResult:
        """Yield the widgets below the title."""
        raise NotImplementedError

    def text(self, content: str, classes: str = "") -> Static:
        """Return a widget with this text, whose markup is not interpreted."""
        plain_text = "\n".join(plain(line) for line in content.split("\n"))
        return Static(Text(plain_text), classes=classes, markup=False)

    def action_leave(self) -> None:
        """Close without an answer."""
        self.dismiss(None)


class YesDialog(Dialog[bool]):
    """A question with the answers yes (True) and no (None).

    Each yes ends, deletes, replaces or risks something: it takes the key y alone, as Enter opens things in lists.
    """

    BINDINGS = [Binding("y", "yes", "yes", show=False), Binding("n", "leave", "no", show=False)]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__(question)
        self._yes = yes

    def body(self) -> ComposeResult:
        yield self.text(f"y  {self._yes}\nn  leave it", "hint")

    def action_yes(self) -> None:
        """Answer yes."""
        self.dismiss(True)


class DialogInput(Input):
    """An input that takes no key after Enter until the dialog has accepted or refused the text.

    Its own keys are acted on at once, in the order typed; through the app's bindings an Enter would overtake them.
    """

    def __init__(self, value: str, dialog: TextDialog) -> None:
        super().__init__(value, select_on_focus=True)
        self._dialog = dialog

    async def on_key(self, event: events.Key) -> None:
        bindings = INPUT_KEYS.get(event.key, [])
        if not self._dialog.is_ready:
            self._dialog.queue_key(event)
        elif bindings:
            self._dialog.is_ready = event.key != "enter"
            await self.app.run_action(bindings[0].action, self)
        else:
            return
        event.stop()
        event.prevent_default()


class TextDialog(Dialog[str]):
    """One line of text. Enter calls `accept`: the dialog stays open on a UserError, else its answer is the text."""

    def __init__(self, title: str, hint: str, value: str, accept: Callable[[str], object]) -> None:
        super().__init__(title)
        self._hint = hint
        self._value = value
        self._accept = accept
        self.is_ready = False

    def body(self) -> ComposeResult:
        yield DialogInput(self._value, self)
        yield self.text(f"{self._hint}\nEnter accepts, Esc leaves", "hint")
        yield self.text("", "wrong")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            self._accept(event.value)
        except UserError as error:
            self.query_one(".wrong", Static).update(Text(plain(error.line_without_option())))
            self.replay_early_keys(event.input)
            return
        self.dismiss(event.value)
        # Keys typed after Enter are meant for the screen below.
        for key, character in self._early_keys:
            self.app.post_message(events.Key(key, character))


class ChoiceList(OptionList):
    """A list that gives typed words to its dialog, which shows only the matching choices."""

    def __init__(self, dialog: ChoiceDialog) -> None:
        super().__init__(markup=False)
        self._dialog = dialog

    def on_key(self, event: events.Key) -> None:
        if event.key == "backspace":
            self._dialog.narrow(self._dialog.words[:-1])
        elif event.is_printable and event.character is not None:
            self._dialog.narrow(self._dialog.words + event.character)
        else:
            return
        event.stop()
        event.prevent_default()


class ChoiceDialog(Dialog[str]):
    """A list of (value, label) pairs, narrowed down by typed words. Its answer is a value."""

    DEFAULT_CSS = "ChoiceDialog .dialog { width: 120; }"

    def __init__(self, title: str, choices: Sequence[tuple[str, str]], current: str | None) -> None:
        super().__init__(title)
        self._choices = choices
        self._matching = list(choices)
        self._current = current
        self.words = ""
        """The typed words; a choice matches if all of them are in its value or label."""
        self.is_ready = False

    def body(self) -> ComposeResult:
        yield ChoiceList(self)
        yield self.text("", "hint")

    def on_mount(self) -> None:
        self.narrow("")

    def narrow(self, words: str) -> None:
        """Show only the choices that contain all of these words."""
        picker = self.query_one(ChoiceList)
        highlighted = picker.highlighted
        current = self._current if highlighted is None else self._matching[highlighted][0]
        self.words = words
        self._matching = [choice for choice in self._choices if has_all_words(" ".join(choice), words)]
        value_width = max((len(value) for value, _ in self._choices), default=0)
        picker.clear_options()
        picker.add_options(Option(Text(plain(f"{value:<{value_width}}  {label}"))) for value, label in self._matching)
        values = [value for value, _ in self._matching]
        index = values.index(current) if current in values else 0
        picker.highlighted = index if values else None
        hint = f"with “{words}”: {len(values)} of {len(self._choices)}   " if words else "type to narrow it down   "
        self.query_one(".hint", Static).update(Text(plain(f"{hint}Enter chooses, Esc leaves")))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._matching[event.option_index][0])
