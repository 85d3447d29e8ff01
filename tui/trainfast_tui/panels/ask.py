"""Open a dialog and pass its answer on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from textual.app import App
from textual.screen import Screen

AnswerT = TypeVar("AnswerT")


def ask_text(
    app: App[Any],
    title: str,
    hint: str,
    value: str,
    accept: Callable[[str], object],
    then: Callable[[str], object] | None = None,
    choices: Mapping[str, Sequence[str]] | Sequence[str] = (),
) -> None:
    """Ask for a line of text, which is `value` at first, or for one of the `choices`; of a mapping for `name=a,b`.

    Enter calls `accept`; the dialog stays open if that raises a UserError, else it closes and calls `then`.
    """
    from trainfast_tui.panels.dialogs import ChecklistDialog, TextDialog, ValueDialog

    asked = (title, hint, value, accept)
    if isinstance(choices, Mapping):
        dialog: TextDialog = ChecklistDialog(*asked, choices)
    else:
        dialog = ValueDialog(*asked, choices) if choices else TextDialog(*asked)
    app.push_screen(dialog, None if then is None else _unless_left(then))


def ask_choice(
    app: App[Any],
    title: str,
    choices: Sequence[tuple[str, str]],
    then: Callable[[str], object],
    *,
    current: str | None = None,
) -> None:
    """Ask for one of these (value, label) pairs, with the cursor on the value `current`; `then` gets the value."""
    from trainfast_tui.panels.dialogs import ChoiceDialog

    app.push_screen(ChoiceDialog(title, choices, current), _unless_left(then))


def ask_yes(app: App[Any], question: str, yes: str, then: Callable[[], object]) -> Screen[bool]:
    """Ask a question, call `then` if the answer is yes, and return the dialog; `yes` is that answer in words."""
    from trainfast_tui.panels.dialogs import YesDialog

    dialog = YesDialog(question, yes)
    app.push_screen(dialog, _unless_left(lambda answer: then()))
    return dialog


def ask_preset_name(app: App[Any], title: str, hint: str, value: str, save: Callable[[str], object]) -> None:
    """Ask for a name, `value` at first, and call `save` with it; replace a preset of the user's own only after a yes.

    The dialog stays open for a name that no new preset can have.
    """

    def on_name(name: str) -> None:
        if _is_own(name):
            ask_yes(app, f"You have a preset {name} already. Replace it?", "replace it", partial(save, name))
        else:
            save(name)

    ask_text(app, title, hint, value, _check_name, on_name)


def _check_name(name: str) -> None:
    """Raise UserError for a name that no new preset can have; one of the user's own may be replaced."""
    from trainfast_runner.settings.saving import new_preset_path

    new_preset_path(name, overwrite=_is_own(name))


def _is_own(name: str) -> bool:
    from trainfast_runner.settings.presets import user_directory

    # Path.is_file raises for a name too long for the file system before Python 3.14.
    return os.path.isfile(user_directory() / f"{name}.toml")


def _unless_left(then: Callable[[AnswerT], object]) -> Callable[[AnswerT | None], None]:
    """Return a function that passes an answer on to `then`; a dialog that was left has none."""

    def on_close(answer: AnswerT | None) -> None:
        if answer is not None:
            then(answer)

    return on_close
