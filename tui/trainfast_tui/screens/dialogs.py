"""Small questions over the screen: yes or no, one line of text, one of a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from trainfast_runner.problem import Problem
from trainfast_tui.format import plain, to_ascii


class Dialog(ModalScreen[object]):
    """What the three have in common: a box in the middle, left with Esc."""

    BINDINGS = [Binding("escape", "leave", "leave", show=False)]
    DEFAULT_CSS = """
    Dialog { align: center middle; background: transparent; }
    Dialog .dialog {
        width: 76; max-width: 95%; height: auto; max-height: 90%; padding: 0 1;
        border: round $primary; background: $surface;
    }
    Dialog .dialog.-ascii { border: ascii $primary; }
    Dialog .wrong { color: $text-error; }
    Dialog .hint { color: $text-muted; }
    Dialog Static { height: auto; }
    Dialog Input, Dialog Input:focus { border: none; height: 1; padding: 0; background: $boost; }
    Dialog Input:ansi { background: ansi_bright_black; }
    Dialog OptionList, Dialog OptionList:focus {
        border: none; height: auto; max-height: 16; padding: 0; background: $surface;
        text-wrap: nowrap; text-overflow: ellipsis; scrollbar-size-vertical: 1;
    }
    Dialog .-ascii OptionList { text-overflow: clip; scrollbar-size-vertical: 0; }
    """

    def __init__(self, title: str, *, ascii: bool) -> None:
        super().__init__()
        self._title = title
        self._ascii = ascii

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -ascii" if self._ascii else "dialog"):
            yield self.text(self._title)
            yield from self.body()

    def body(self) -> ComposeResult:
        """What stands below the title."""
        raise NotImplementedError

    def text(self, content: str, classes: str = "") -> Static:
        """Text that is shown as it stands."""
        shown = "\n".join(self.shown(line) for line in content.split("\n"))
        return Static(Text(shown), classes=classes, markup=False)

    def shown(self, line: str) -> str:
        """One line without anything a terminal would act on."""
        return to_ascii(plain(line)) if self._ascii else plain(line)

    def action_leave(self) -> None:
        """Close without an answer."""
        self.dismiss(None)


class Confirm(Dialog):
    """Dismissed with True for yes."""

    BINDINGS = [Binding("y,enter", "yes", "yes", show=False), Binding("n", "leave", "no", show=False)]

    def __init__(self, question: str, yes: str, *, ascii: bool) -> None:
        super().__init__(question, ascii=ascii)
        self._yes = yes

    def body(self) -> ComposeResult:
        yield self.text(f"y  {self._yes}\nn  leave it", "hint")

    def action_yes(self) -> None:
        """The answer is yes."""
        self.dismiss(True)


class Ask(Dialog):
    """One line of text; stays open until `check` accepts it. Dismissed with the text."""

    def __init__(
        self, title: str, hint: str, value: str, check: Callable[[str], object] | None, *, ascii: bool
    ) -> None:
        super().__init__(title, ascii=ascii)
        self._hint = hint
        self._value = value
        self._check = check

    def body(self) -> ComposeResult:
        yield Input(self._value, select_on_focus=True)
        yield self.text(self._hint, "hint")
        yield self.text("", "wrong")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            if self._check is not None:
                self._check(event.value)
        except Problem as problem:
            self.query_one(".wrong", Static).update(Text(self.shown(problem.line())))
            return
        self.dismiss(event.value)


class Pick(Dialog):
    """One of a list of (value, label) pairs. Dismissed with the value."""

    def __init__(self, title: str, choices: Sequence[tuple[str, str]], current: str | None, *, ascii: bool) -> None:
        super().__init__(title, ascii=ascii)
        self._choices = choices
        self._current = current

    def body(self) -> ComposeResult:
        wide = max((len(value) for value, _ in self._choices), default=0)
        options = [Option(Text(self.shown(f"{value:<{wide}}  {label}"))) for value, label in self._choices]
        picker = OptionList(*options, markup=False)
        values = [value for value, _ in self._choices]
        picker.highlighted = values.index(self._current) if self._current in values else 0
        yield picker
        yield self.text("Enter chooses, Esc leaves", "hint")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._choices[event.option_index][0])
