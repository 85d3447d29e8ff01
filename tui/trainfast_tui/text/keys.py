"""Every command of the app, once: keys, footer, palette and help are made from this list."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Command:
    """One thing a person can do. `id` names the method `action_ID` of its screen; the first key is the one shown."""

    id: str
    keys: tuple[str, ...]
    label: str
    help: str
    scope: str
    """main, search, runs, compare, topo, help, or everywhere."""
    footer: bool = True
    palette: bool = True

    @property
    def key(self) -> str:
        """The key as a person reads it."""
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

COMMANDS: tuple[Command, ...] = (
    Command("run", ("r",), "run", "Start a run with the knobs shown; while one is live, stop it first.", "main"),
    Command("stop", ("s",), "stop", "Stop the run: asked to end, then killed after the countdown; again: now.", "main"),
    Command("turn(1)", ("right",), "turn", "Turn the knob under the cursor one stop up.", "main", footer=False),
    Command("turn(-1)", ("left",), "turn back", "Turn the knob under the cursor one stop down.", "main", footer=False),
    Command("cycle", ("space",), "turn", "Turn the knob under the cursor; after the last value the first.", "main"),
    Command("move(-1)", ("up", "k"), "up", "Move to the knob above.", "main", footer=False, palette=False),
    Command("move(1)", ("down", "j"), "down", "Move to the knob below.", "main", footer=False, palette=False),
    Command("type_value", ("enter",), "type", "Type a value for the knob under the cursor.", "main", footer=False),
    Command(
        "reset_knob",
        ("backspace",),
        "reset",
        "Give the knob under the cursor its preset's value.",
        "main",
        footer=False,
    ),
    Command("preset", ("p",), "preset", "Choose what to train: a preset or one of its variants.", "main"),
    Command("batch", ("b",), "max batch", "Search the largest batch that fits, and prove it.", "main"),
    Command("save", ("w",), "save", "Save the knobs as a preset of your own.", "main", footer=False),
    Command("compare", ("c",), "compare", "Compare this run with the one before it.", "main"),
    Command(
        "cool_to",
        ("C", "upper_c"),
        "cool to",
        "Let each run, and each process of a search, wait for its GPUs to cool first.",
        "main",
        footer=False,
    ),
    Command("history", ("h",), "runs", "All runs: filter, sort, mark two and compare.", "main"),
    Command("monitor", ("m",), "monitor", "The machine: all readings, who uses it, what holds it back.", "main"),
    Command("topo", ("o",), "topology", "How the GPUs are connected, and what it means.", "main", footer=False),
    Command("diagnosis", ("d",), "why", "What holds the run back: the figures, and what to try.", "main", footer=False),
    Command("log", ("l",), "log", "Show or hide what the training prints.", "main"),
    Command("log_scroll(-1)", ("pageup",), "log up", "Scroll the log back.", "main", footer=False, palette=False),
    Command("log_scroll(1)", ("pagedown",), "log down", "Scroll the log on.", "main", footer=False, palette=False),
    Command("fix(0)", ("1",), "first cure", "After out of memory: set the first knob proposed.", "main", footer=False),
    Command(
        "fix(1)", ("2",), "second cure", "After out of memory: set the second knob proposed.", "main", footer=False
    ),
    Command("fix(2)", ("3",), "third cure", "After out of memory: set the third knob proposed.", "main", footer=False),
    Command("rate", ("t",), "samples or tokens", "Throughput in samples a second or in tokens.", "main", footer=False),
    Command("reading", ("g",), "next reading", "Another device reading in the chart.", "main", footer=False),
    Command(
        "event(-1)", ("e",), "earlier event", "An earlier event, in words, marked on the charts.", "main", footer=False
    ),
    Command(
        "event(1)",
        ("E", "upper_e"),
        "later event",
        "A later event; after the last the newest again.",
        "main",
        footer=False,
    ),
    Command("zoom(-1)", ("plus", "equals_sign"), "shorter time", "Show a shorter time.", "main", footer=False),
    Command("zoom(1)", ("minus",), "longer time", "Show a longer time.", "main", footer=False),
    Command("apply", ("enter",), "apply", "Give the knobs the answer under the cursor, and go back.", "search"),
    Command("pause", ("space", "p"), "pause", "Wait after the probe it is at; again: go on.", "search"),
    Command(
        "cancel", ("escape",), "cancel", "Cancel the search and keep its journal; once it has ended: back.", "search"
    ),
    Command("leave", ("b",), "leave", "Back to the main screen; the search goes on.", "search"),
    Command("again", ("f5",), "go on", "Take an ended search up again; one with an answer starts anew.", "search"),
    Command("move(-1)", ("up", "k"), "up", "To the answer above.", "search", footer=False, palette=False),
    Command("move(1)", ("down", "j"), "down", "To the answer below.", "search", footer=False, palette=False),
    Command("back", ("escape", "h"), "back", "Back to the main screen.", "runs"),
    Command("open", ("enter",), "open", "Show the run under the cursor on the main screen.", "runs"),
    Command("mark", ("space",), "mark", "Mark a run; two marked runs can be compared.", "runs"),
    Command("compare", ("c",), "compare", "Compare the two marked runs, or this one with the one below.", "runs"),
    Command("filter", ("slash",), "filter", "Show only runs whose id, preset, state or knobs contain a word.", "runs"),
    Command("sort", ("o",), "order", "Order by another column.", "runs"),
    Command("reverse", ("O", "upper_o"), "reverse", "Turn the order around.", "runs", footer=False),
    Command("delete", ("d",), "delete", "Delete the run under the cursor. A live one is refused.", "runs"),
    Command("reload", ("f5",), "reload", "List the runs again.", "runs", footer=False),
    Command("move(-1)", ("up", "k"), "up", "Move up.", "runs", footer=False, palette=False),
    Command("move(1)", ("down", "j"), "down", "Move down.", "runs", footer=False, palette=False),
    Command("page(-1)", ("pageup",), "page up", "A page up.", "runs", footer=False, palette=False),
    Command("page(1)", ("pagedown",), "page down", "A page down.", "runs", footer=False, palette=False),
    Command("end(-1)", ("home",), "first", "To the first run.", "runs", footer=False, palette=False),
    Command("end(1)", ("end",), "last", "To the last run.", "runs", footer=False, palette=False),
    Command("back", ("escape", "c"), "back", "Back to where you came from.", "compare"),
    Command("swap", ("x",), "swap", "Exchange the two sides.", "compare"),
    Command("scroll(-1)", ("up", "k"), "up", "Scroll up.", "compare", footer=False, palette=False),
    Command("scroll(1)", ("down", "j"), "down", "Scroll down.", "compare", footer=False, palette=False),
    Command("back", ("escape", "o"), "back", "Back to the main screen.", "topo"),
    Command("reload", ("f5",), "ask again", "Ask the driver again.", "topo"),
    Command("scroll(-1)", ("up", "k"), "up", "Scroll up.", "topo", footer=False, palette=False),
    Command("scroll(1)", ("down", "j"), "down", "Scroll down.", "topo", footer=False, palette=False),
    Command("scroll(-20)", ("pageup",), "page up", "A page up.", "topo", footer=False, palette=False),
    Command("scroll(20)", ("pagedown", "space"), "page down", "A page down.", "topo", footer=False, palette=False),
    Command("back", ("escape", "m"), "back", "Back to the main screen.", "monitor"),
    Command("end", ("x",), "end", "End the process under the cursor, then kill it; of a run: stop the run.", "monitor"),
    Command("sort", ("o",), "order", "Order the processes by another column.", "monitor"),
    Command("reverse", ("O", "upper_o"), "reverse", "Turn the order around.", "monitor", footer=False),
    Command("reading", ("g",), "next reading", "Another device reading in the first chart.", "monitor"),
    Command("choose(1)", ("right",), "next GPU", "All readings of the next GPU.", "monitor"),
    Command("choose(-1)", ("left",), "GPU before", "All readings of the GPU before.", "monitor", footer=False),
    Command(
        "event(-1)",
        ("e",),
        "earlier event",
        "An earlier event, in words, marked on the charts.",
        "monitor",
        footer=False,
    ),
    Command(
        "event(1)",
        ("E", "upper_e"),
        "later event",
        "A later event; after the last the newest again.",
        "monitor",
        footer=False,
    ),
    Command("zoom(-1)", ("plus", "equals_sign"), "shorter time", "Show a shorter time.", "monitor", footer=False),
    Command("zoom(1)", ("minus",), "longer time", "Show a longer time.", "monitor", footer=False),
    Command("move(-1)", ("up", "k"), "up", "To the process above.", "monitor", footer=False, palette=False),
    Command("move(1)", ("down", "j"), "down", "To the process below.", "monitor", footer=False, palette=False),
    Command("page(-1)", ("pageup",), "page up", "A page up.", "monitor", footer=False, palette=False),
    Command("page(1)", ("pagedown",), "page down", "A page down.", "monitor", footer=False, palette=False),
    Command("back", ("escape", "d"), "back", "Back to the main screen.", "diagnosis"),
    Command("scroll(-1)", ("up", "k"), "up", "Scroll up.", "diagnosis", footer=False, palette=False),
    Command("scroll(1)", ("down", "j"), "down", "Scroll down.", "diagnosis", footer=False, palette=False),
    Command("scroll(-20)", ("pageup",), "page up", "A page up.", "diagnosis", footer=False, palette=False),
    Command("scroll(20)", ("pagedown", "space"), "page down", "A page down.", "diagnosis", footer=False, palette=False),
    Command("back", ("escape",), "back", "Close the help.", "help"),
    Command("scroll(-1)", ("up", "k"), "up", "Scroll up.", "help"),
    Command("scroll(1)", ("down", "j"), "down", "Scroll down.", "help"),
    Command("scroll(-20)", ("pageup",), "page up", "A page up.", "help"),
    Command("scroll(20)", ("pagedown", "space"), "page down", "A page down.", "help"),
    Command("help", ("question_mark", "f1"), "help", "Every key, and every knob with what it costs.", "everywhere"),
    Command(
        "theme", ("f2",), "theme", "The terminal's own colours, or a dark or light theme.", "everywhere", footer=False
    ),
    Command(
        "repaint",
        ("ctrl+l",),
        "repaint",
        "Draw the whole screen anew, where another program has written over it.",
        "everywhere",
        footer=False,
    ),
    Command(
        "quit", ("q", "ctrl+c"), "quit", "Leave. A run or search goes on; come back with trainfast-tui.", "everywhere"
    ),
)


def of(scope: str) -> tuple[Command, ...]:
    """The commands of one screen, those that are everywhere not included."""
    return tuple(command for command in COMMANDS if command.scope == scope)


def bindings(scope: str) -> list[Binding]:
    """Textual's bindings of one screen, or with `everywhere` of the app."""
    return [
        Binding(
            ",".join(command.keys),
            command.id,
            command.label,
            show=False,
            tooltip=command.help,
            id=f"{scope}.{command.id}",
        )
        for command in of(scope)
    ]
