"""Every action of the app with its keys; bindings, footer, palette and help are made from this list."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a screen. `id` names the method `action_ID` of the screen, or after `WIDGET.` of that widget on it;
    the first key is the one shown."""

    id: str
    keys: tuple[str, ...]
    label: str
    help: str
    scope: str
    """main, search, runs, compare, topo, help, or everywhere."""
    footer: bool = True
    palette: bool = True

    @property
    def call(self) -> str:
        """The action as Textual calls it on the screen, which passes it on to the widget."""
        widget, dot, name = self.id.rpartition(".")
        return f"widget({widget!r}, {name!r})" if dot else name

    @property
    def key(self) -> str:
        """The key's name on the screen."""
        return KEY_WORDS.get(self.keys[0], self.keys[0])


KEY_WORDS = {
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
    "enter": "Enter",
    "escape": "Esc",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "question_mark": "?",
    "slash": "/",
    "plus": "+",
    "minus": "-",
    "ctrl+l": "Ctrl-L",
}


def _events_and_zoom(scope: str) -> tuple[Action, ...]:
    """The actions on the time axis of the charts."""
    earlier, later = (
        "An earlier event, in words, marked on the charts.",
        "A later event; after the last the newest again.",
    )
    return (
        Action("Charts.event(-1)", ("e",), "earlier event", earlier, scope, footer=False),
        Action("Charts.event(1)", ("E", "upper_e"), "later event", later, scope, footer=False),
        Action("Charts.zoom(-1)", ("plus", "equals_sign"), "shorter time", "Show a shorter time.", scope, footer=False),
        Action("Charts.zoom(1)", ("minus",), "longer time", "Show a longer time.", scope, footer=False),
    )


def _scroll(scope: str, *, pages: bool = True, shown: bool = False) -> tuple[Action, ...]:
    """The actions of a page of text; `shown` in the footer and the palette."""
    lines = (
        Action("Page.scroll(-1)", ("up", "k"), "up", "Scroll up.", scope, shown, shown),
        Action("Page.scroll(1)", ("down", "j"), "down", "Scroll down.", scope, shown, shown),
    )
    if not pages:
        return lines
    return (
        *lines,
        Action("Page.scroll(-20)", ("pageup",), "page up", "A page up.", scope, shown, shown),
        Action("Page.scroll(20)", ("pagedown", "space"), "page down", "A page down.", scope, shown, shown),
    )


ACTIONS: tuple[Action, ...] = (
    Action("run", ("r",), "run", "Start a run with the knobs shown; while one is live, stop it first.", "main"),
    Action("stop", ("s",), "stop", "Stop the run: asked to end, then killed after the countdown; again: now.", "main"),
    Action(
        "KnobPanel.turn(1)", ("right",), "turn", "Turn the knob under the cursor one stop up.", "main", footer=False
    ),
    Action(
        "KnobPanel.turn(-1)",
        ("left",),
        "turn back",
        "Turn the knob under the cursor one stop down.",
        "main",
        footer=False,
    ),
    Action(
        "KnobPanel.cycle", ("space",), "turn", "Turn the knob under the cursor; after the last value the first.", "main"
    ),
    Action("KnobPanel.move(-1)", ("up", "k"), "up", "Move to the knob above.", "main", footer=False, palette=False),
    Action("KnobPanel.move(1)", ("down", "j"), "down", "Move to the knob below.", "main", footer=False, palette=False),
    Action(
        "KnobPanel.type_value", ("enter",), "type", "Type a value for the knob under the cursor.", "main", footer=False
    ),
    Action(
        "KnobPanel.reset_knob",
        ("backspace",),
        "reset",
        "Give the knob under the cursor its preset's value.",
        "main",
        footer=False,
    ),
    Action("KnobPanel.preset", ("p",), "preset", "Choose what to train: a preset or one of its variants.", "main"),
    Action("batch", ("b",), "max batch", "Search the largest batch that fits, and confirm it.", "main"),
    Action("KnobPanel.save", ("w",), "save", "Save the knobs as a preset of your own.", "main", footer=False),
    Action("compare", ("c",), "compare", "Compare this run with the one before it.", "main"),
    Action(
        "cool_to",
        ("C", "upper_c"),
        "cool to",
        "Let each run, and each process of a search, wait for its GPUs to cool first.",
        "main",
        footer=False,
    ),
    Action("history", ("h",), "runs", "All runs: filter, sort, mark two and compare.", "main"),
    Action("monitor", ("m",), "monitor", "The machine: all readings, who uses it, what holds it back.", "main"),
    Action("topo", ("o",), "topology", "How the GPUs are connected, and what it means.", "main", footer=False),
    Action("diagnosis", ("d",), "why", "What holds the run back: the figures, and what to try.", "main", footer=False),
    Action("LogPane.log", ("l",), "log", "Show or hide what the training prints.", "main"),
    Action("log_scroll(-1)", ("pageup",), "log up", "Scroll the log back.", "main", footer=False, palette=False),
    Action("log_scroll(1)", ("pagedown",), "log down", "Scroll the log on.", "main", footer=False, palette=False),
    Action(
        "EndingPanel.fix(0)",
        ("1",),
        "first cure",
        "After out of memory: set the first knob proposed.",
        "main",
        footer=False,
    ),
    Action(
        "EndingPanel.fix(1)",
        ("2",),
        "second cure",
        "After out of memory: set the second knob proposed.",
        "main",
        footer=False,
    ),
    Action(
        "EndingPanel.fix(2)",
        ("3",),
        "third cure",
        "After out of memory: set the third knob proposed.",
        "main",
        footer=False,
    ),
    Action(
        "Charts.rate", ("t",), "samples or tokens", "Throughput in samples a second or in tokens.", "main", footer=False
    ),
    Action("Charts.reading", ("g",), "next reading", "Another device reading in the chart.", "main", footer=False),
    *_events_and_zoom("main"),
    Action("apply", ("enter",), "apply", "Give the knobs the answer under the cursor, and go back.", "search"),
    Action("pause", ("space", "p"), "pause", "Pause after this probe; press again to resume.", "search"),
    Action(
        "cancel", ("escape",), "cancel", "Cancel the search and keep its journal; once it has ended: back.", "search"
    ),
    Action("leave", ("b",), "leave", "Back to the main screen; the search goes on.", "search"),
    Action("again", ("f5",), "go on", "Take an ended search up again; one with an answer starts anew.", "search"),
    Action(
        "BatchSearchView.move(-1)", ("up", "k"), "up", "To the answer above.", "search", footer=False, palette=False
    ),
    Action(
        "BatchSearchView.move(1)", ("down", "j"), "down", "To the answer below.", "search", footer=False, palette=False
    ),
    Action("back", ("escape", "h"), "back", "Back to the main screen.", "runs"),
    Action("open", ("enter",), "open", "Show the run under the cursor on the main screen.", "runs"),
    Action("RunsTable.mark", ("space",), "mark", "Mark a run; two marked runs can be compared.", "runs"),
    Action("compare", ("c",), "compare", "Compare the two marked runs, or this one with the one below.", "runs"),
    Action("filter", ("slash",), "filter", "Show only runs whose id, preset, state or knobs contain a word.", "runs"),
    Action("sort", ("o",), "order", "Order by another column.", "runs"),
    Action("reverse", ("O", "upper_o"), "reverse", "Turn the order around.", "runs", footer=False),
    Action("delete", ("d",), "delete", "Delete the run under the cursor. A live one is refused.", "runs"),
    Action("reload", ("f5",), "reload", "List the runs again.", "runs", footer=False),
    Action("RunsTable.move(-1)", ("up", "k"), "up", "Move up.", "runs", footer=False, palette=False),
    Action("RunsTable.move(1)", ("down", "j"), "down", "Move down.", "runs", footer=False, palette=False),
    Action("RunsTable.page(-1)", ("pageup",), "page up", "A page up.", "runs", footer=False, palette=False),
    Action("RunsTable.page(1)", ("pagedown",), "page down", "A page down.", "runs", footer=False, palette=False),
    Action("RunsTable.end(-1)", ("home",), "first", "To the first run.", "runs", footer=False, palette=False),
    Action("RunsTable.end(1)", ("end",), "last", "To the last run.", "runs", footer=False, palette=False),
    Action("back", ("escape", "c"), "back", "Back to where you came from.", "compare"),
    Action("swap", ("x",), "swap", "Exchange the two sides.", "compare"),
    *_scroll("compare", pages=False),
    Action("back", ("escape", "o"), "back", "Back to the main screen.", "topo"),
    Action("reload", ("f5",), "ask again", "Ask the driver again.", "topo"),
    *_scroll("topo"),
    Action("back", ("escape", "m"), "back", "Back to the main screen.", "monitor"),
    Action("end", ("x",), "end", "End the process under the cursor, then kill it; of a run: stop the run.", "monitor"),
    Action("ProcessTable.sort", ("o",), "order", "Order the processes by another column.", "monitor"),
    Action("ProcessTable.reverse", ("O", "upper_o"), "reverse", "Turn the order around.", "monitor", footer=False),
    Action("Charts.reading", ("g",), "next reading", "Another device reading in the first chart.", "monitor"),
    Action("MonitorDevices.choose(1)", ("right",), "next GPU", "All readings of the next GPU.", "monitor"),
    Action(
        "MonitorDevices.choose(-1)", ("left",), "GPU before", "All readings of the GPU before.", "monitor", footer=False
    ),
    *_events_and_zoom("monitor"),
    Action("ProcessTable.move(-1)", ("up", "k"), "up", "To the process above.", "monitor", footer=False, palette=False),
    Action(
        "ProcessTable.move(1)", ("down", "j"), "down", "To the process below.", "monitor", footer=False, palette=False
    ),
    Action("ProcessTable.page(-1)", ("pageup",), "page up", "A page up.", "monitor", footer=False, palette=False),
    Action("ProcessTable.page(1)", ("pagedown",), "page down", "A page down.", "monitor", footer=False, palette=False),
    Action("back", ("escape", "d"), "back", "Back to the main screen.", "diagnosis"),
    *_scroll("diagnosis"),
    Action("back", ("escape",), "back", "Close the help.", "help"),
    *_scroll("help", shown=True),
    Action("help", ("question_mark", "f1"), "help", "Every key, and every knob with what it costs.", "everywhere"),
    Action(
        "theme", ("f2",), "theme", "The terminal's own colours, or a dark or light theme.", "everywhere", footer=False
    ),
    Action(
        "repaint",
        ("ctrl+l",),
        "repaint",
        "Draw the whole screen anew, where another program has written over it.",
        "everywhere",
        footer=False,
    ),
    Action(
        "quit", ("q", "ctrl+c"), "quit", "Leave. A run or search goes on; come back with trainfast-tui.", "everywhere"
    ),
)


def of(scope: str) -> tuple[Action, ...]:
    """Return the actions of one screen, without those of every screen."""
    return tuple(action for action in ACTIONS if action.scope == scope)


def bindings(scope: str) -> list[Binding]:
    """Return Textual's bindings of one screen, or with `everywhere` of the app."""
    return [
        Binding(
            ",".join(action.keys),
            action.call,
            action.label,
            show=False,
            tooltip=action.help,
            id=f"{scope}.{action.id}",
        )
        for action in of(scope)
    ]
