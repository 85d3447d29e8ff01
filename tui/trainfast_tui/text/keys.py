"""Every action of the app with its keys; bindings, footer, palette, help and texts take them from this list."""

from __future__ import annotations

from enum import Enum, auto
from functools import partial

import msgspec
from msgspec.structs import replace

from trainfast_runner.settings.knobs import KNOBS

ASK_VARY, ASK_BATCH, ASK_OBJECTIVE, ASK_BUDGET = "ask('vary')", "ask('batch')", "ask('objective')", "ask('budget')"
"""The actions that change one part of the question of a best-fit search."""


class Shown(Enum):
    """The places that name an action."""

    IN_FOOTER = auto()
    """The footer, the palette and the help."""
    IN_PALETTE = auto()
    """The palette and the help."""
    IN_HELP = auto()
    """The help alone."""


class Action(msgspec.Struct, frozen=True):
    """One action of a screen, whose first key is the one shown.

    `id` is NAME for the screen's method `action_NAME`, or WIDGET.NAME for that of a widget on the screen.
    """

    id: str
    keys: str
    """Textual's names of the keys, with spaces between."""
    label: str
    help: str
    shown: Shown = Shown.IN_FOOTER
    scope: str = ""
    """The screen that has the action, or everywhere."""

    @property
    def call(self) -> str:
        """The action as Textual calls it on the screen, which passes it on to the widget."""
        widget, dot, name = self.id.rpartition(".")
        return f"widget({widget!r}, {name!r})" if dot else name

    @property
    def key(self) -> str:
        """The key's name on the screen."""
        return self.shown_keys[0]

    @property
    def shown_keys(self) -> list[str]:
        """The names of the keys on the screen."""
        return [shown_key(key) for key in self.keys.split() if key != "equals_sign"]

    @property
    def bound_keys(self) -> str:
        """The keys as Textual binds them: a capital has two names there."""
        keys = self.keys.split()
        capitals = [f"upper_{key.lower()}" for key in keys if len(key) == 1 and key.isupper()]
        return ",".join([*keys, *capitals])


KEY_WORDS = {
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
    "escape": "Esc",
    "space": "space",
    "backspace": "backspace",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "question_mark": "?",
    "slash": "/",
    "plus": "+",
    "minus": "-",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "comma": ",",
    "full_stop": ".",
    "colon": ":",
}


def shown_key(key: str) -> str:
    """Return the key's name on the screen."""
    return key if len(key) == 1 else KEY_WORDS.get(key) or key.title().replace("+", "-")


_in_palette, _in_help = partial(Action, shown=Shown.IN_PALETTE), partial(Action, shown=Shown.IN_HELP)


def _moves(widget: str, noun: str) -> tuple[Action, ...]:
    """Return the cursor keys of a list or a page of text, which the help alone names."""
    return (
        _in_help(f"{widget}.move(-1)", "up k", "up", f"To the {noun} above."),
        _in_help(f"{widget}.move(1)", "down j", "down", f"To the {noun} below."),
        _in_help(f"{widget}.page(-1)", "pageup", "page up", "A page up."),
        _in_help(f"{widget}.page(1)", "pagedown", "page down", "A page down."),
        *_ends(widget, noun),
    )


def _ends(widget: str, noun: str) -> tuple[Action, ...]:
    """Return the keys to the first and the last of a list."""
    return (
        _in_help(f"{widget}.end(-1)", "g home", "first", f"To the first {noun}."),
        _in_help(f"{widget}.end(1)", "G end", "last", f"To the last {noun}."),
    )


def _back(own_key: str = "", help: str = "Back to where you came from.", id: str = "back") -> Action:
    """Return the way back, by Esc, q, and the key that opened the screen."""
    return Action(id, f"escape q {own_key}", id, help)


def _filter(noun: str) -> Action:
    """Return the action that narrows a list."""
    return Action("filter", "slash", "filter", f"Show only {noun} that contain all typed words.")


def _shares(noun: str) -> tuple[Action, ...]:
    """Return the actions that write files about what is shown."""
    return (
        Action("export", "e", "export", f"Write the settings of {noun} in the form of another tool."),
        Action("report", "E", "report", f"Write a report of {noun}."),
    )


def _fix(index: int, nth: str) -> Action:
    """Return the action that applies one of the changes after out of memory."""
    words = f"After out of memory: apply the {nth} proposed change."
    return _in_palette(f"EndingPanel.apply_change({index})", str(index + 1), f"{nth} fix", words)


_ZOOMS = (
    _in_palette("ChartColumn.zoom(-1)", "plus equals_sign", "shorter time", "Show a shorter time."),
    _in_palette("ChartColumn.zoom(1)", "minus", "longer time", "Show a longer time."),
)
_EVENTS = (
    _in_palette(
        "ChartColumn.event(-1)", "less_than_sign comma", "earlier event", "An earlier event, marked on the charts."
    ),
    _in_palette(
        "ChartColumn.event(1)", "greater_than_sign full_stop", "later event", "A later event, at last the newest."
    ),
)

_BY_SCREEN: dict[str, tuple[Action, ...]] = {
    "main": (
        Action("run", "r", "run", "Start a run with the knobs shown; while one is live, stop it first."),
        Action(
            "stop",
            "s",
            "stop",
            "Stop the run: ask it to end, kill it after a countdown; press again to kill it at once.",
        ),
        _in_palette("KnobPanel.turn(1)", "right", "turn", "Turn the knob under the cursor one stop up."),
        _in_palette("KnobPanel.turn(-1)", "left", "turn back", "Turn the knob under the cursor one stop down."),
        _in_palette(
            "KnobPanel.cycle", "space", "turn", "Turn the knob under the cursor; after the last value the first."
        ),
        *_moves("KnobPanel", "knob")[:2],
        *_ends("KnobPanel", "knob"),
        _in_palette("KnobPanel.type_value", "enter", "type", "Type a value for the knob under the cursor."),
        _in_palette("KnobPanel.reset_knob", "backspace", "reset", "Give the knob under the cursor its preset's value."),
        Action("KnobPanel.preset", "p", "preset", "Choose what to train: a preset or one of its variants."),
        Action("batch", "b", "batch", "Find the largest batch that fits, and confirm it; it asks first."),
        Action("best", "B", "best", "Find the fastest settings that fit and train the same; it asks first."),
        # The footer of 80 columns has room for these up to the report.
        Action("compare", "c", "compare", "Compare this run with the one before it."),
        Action("history", "h", "runs", "All runs: filter, sort, mark two and compare."),
        *_shares("the run"),
        Action("script", "o", "script", "Find the flags of a script of your own, and make a preset of it."),
        _in_palette("KnobPanel.save", "w", "save", "Save the knobs as a preset of your own."),
        Action("monitor", "m", "monitor", "The machine: all readings, who uses it, what throttles it."),
        _in_palette("topo", "T", "topology", "How the GPUs are connected, and what it means."),
        _in_palette("diagnosis", "d", "diagnosis", "The bottlenecks of the run: the figures, and what to try."),
        Action("LogPane.log", "l", "log", "Show or hide what the training prints."),
        _in_help("page(-1)", "pageup", "page up", "Scroll the open log back, else move up by knobs."),
        _in_help("page(1)", "pagedown", "page down", "Scroll the open log on, else move down by knobs."),
        Action("filter", "slash", "filter", "Show only knobs whose text contains all typed words.", Shown.IN_PALETTE),
        _in_palette("knob_help", "i", "knob help", "Everything about the knob under the cursor, and its refusal."),
        *map(_fix, range(3), ("first", "second", "third")),
        _in_palette("ChartColumn.reading", "n", "next reading", "Another device reading in the chart."),
        _in_palette("ChartColumn.unit", "t", "tokens/s", "Throughput in tokens/s; again: in samples/s."),
        *_EVENTS,
        *_ZOOMS,
        Action("back", "q", "quit", "Leave. A run or search goes on; come back with trainfast-tui."),
    ),
    "batch": (
        Action("apply", "enter", "apply", "Start the search; at its end give the knobs the answer under the cursor."),
        Action("pause", "space p", "pause", "Pause after this probe; press again to resume."),
        _back("b", help="Back to the main screen; the search goes on.", id="leave"),
        Action("cancel", "s", "stop", "Stop the search and keep its journal."),
        Action("again", "f5", "continue", "Continue an unfinished search; restart one with an answer."),
        Action("limit", "l", "limit", "Set the memory limit of the next run or search."),
        *_shares("the answer"),
        *_moves("TableView", "answer, row of sizes, or line of the question"),
    ),
    "script": (
        Action("save", "w", "save", "Save the command and the mapping as a preset, and choose it as the next run."),
        Action("map", "enter", "flag", "Type the flag of the knob under the cursor, or at first the command."),
        Action("add", "a", "add", "Map another knob to a flag."),
        Action("remove", "x backspace", "remove", "Remove the flag of the knob under the cursor."),
        Action("command", "c", "command", "Type another command, or look again with the same one."),
        _back("o", help="Back to the main screen; nothing is saved."),
        _filter("flags"),
        *_moves("TableView", "knob, or page of flags"),
    ),
    "best": (
        Action("apply", "enter", "apply", "Apply the best setting found and go back; start a search if there is none."),
        Action("pause", "space", "pause", "Pause after this step; press again to resume."),
        _back("B", help="Back to the main screen; the search goes on.", id="leave"),
        Action("cancel", "s", "stop", "Stop the search and keep its journal."),
        Action("again", "f5", "continue", "Continue an unfinished search; restart one with an answer."),
        Action(ASK_VARY, "v", "vary", "Choose the knobs and values that the next search varies."),
        Action(ASK_BATCH, "b", "batch", "Choose the global batch of the next search."),
        Action(ASK_OBJECTIVE, "o", "objective", "Choose what the next search is for: samples, joules, time."),
        Action(ASK_BUDGET, "t", "time", "Choose the time budget of the next search."),
        Action("fresh", "f", "fresh", "Ignore earlier searches: continue none; press again to undo."),
        *_shares("the answer"),
        *_moves("TableView", "measurement, or line of the question"),
    ),
    "runs": (
        _back("h"),
        Action("open", "enter", "open", "Show the run under the cursor on the main screen."),
        Action("RunsTable.mark", "space", "mark", "Mark a run; two marked runs can be compared."),
        Action("compare", "c", "compare", "Compare the two marked runs, or this one with the one below."),
        _filter("runs"),
        Action("delete", "d", "delete", "Delete the run under the cursor. A live one is refused."),
        *_shares("the run under the cursor"),
        Action("RunsTable.sort", "o", "order", "Order by another column."),
        _in_palette("RunsTable.reverse", "O", "reverse", "Turn the order around."),
        *_moves("RunsTable", "run"),
    ),
    "compare": (
        _back("c"),
        Action("in_turn", "a", "run A B A B", "Run both settings again in turn, twice each, and compare those runs."),
        Action("swap", "x", "swap", "Exchange the two sides."),
        *_shares("the two runs"),
        *_moves("Page", "line"),
    ),
    "topo": (_back("T"), *_moves("Page", "line")),
    "monitor": (
        _back("m"),
        Action("ProcessTable.sort", "o", "order", "Order the processes by another column."),
        _in_palette("ProcessTable.reverse", "O", "reverse", "Turn the order around."),
        Action("ChartColumn.reading", "n", "next reading", "Another device reading in the first chart."),
        _filter("processes"),
        Action("MonitorDevices.choose(1)", "right", "next GPU", "All readings of the next GPU."),
        _in_palette("MonitorDevices.choose(-1)", "left", "GPU before", "All readings of the GPU before."),
        *_ZOOMS,
        *_moves("ProcessTable", "process"),
    ),
    "diagnosis": (_back("d"), *_moves("Page", "line")),
    "help": (_back(), _filter("keys and knobs"), *_moves("Page", "line")),
    "everywhere": (
        Action("help", "question_mark f1", "help", "Every key, and every knob with what it costs."),
        _in_palette("theme", "f2", "theme", "The terminal's own colours, or a dark or light theme."),
        _in_palette("repaint", "ctrl+l", "repaint", "Redraw the screen after another program has written over it."),
        _in_palette("command_palette", "colon ctrl+p", "commands", "Every command by its name."),
        _in_palette("suspend_process", "ctrl+z", "suspend", "Give the terminal back to the shell; fg returns."),
        _in_palette("quit", "Q ctrl+q ctrl+c", "quit", "Leave, from any screen; a run or search goes on."),
    ),
}
ACTIONS = tuple(replace(action, scope=scope) for scope, actions in _BY_SCREEN.items() for action in actions)


def actions_of(scope: str) -> list[Action]:
    """Return the actions of one screen, without those of every screen."""
    return [action for action in ACTIONS if action.scope == scope]


def key_of(scope: str, id: str) -> str:
    """Return the name of an action's key on the screen, for a text that tells a user to press it."""
    return next(action.key for action in actions_of(scope) if action.id == id)


RUN_KEY, STOP_KEY, SCRIPT_KEY = key_of("main", "run"), key_of("main", "stop"), key_of("main", "script")
PRESET_KEY = key_of("main", "KnobPanel.preset")
"""The keys of the main screen that many texts name."""


GROUPS = ("batch", "compute", "memory", "data", "parallel", "optimization", "run")
"""The most turned first; a group that is not listed comes last."""


def knobs_by_group() -> dict[str, list[str]]:
    """Return the names of all knobs by group."""
    by_group: dict[str, list[str]] = {group: [] for group in GROUPS}
    for entry in KNOBS:
        by_group.setdefault(entry.group, []).append(entry.name)
    return by_group


KNOBS_IN_ORDER = tuple(name for names in knobs_by_group().values() for name in names)
"""The names of all knobs, group after group."""
