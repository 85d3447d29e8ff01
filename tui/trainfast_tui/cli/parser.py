"""Parse the command line; an error names the nearest command or option."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from trainfast_runner import __version__
from trainfast_runner.errors import UserError, nearest
from trainfast_runner.worker.shared.host import can_move_cursor

PROGRAM = "trainfast-tui"
RunCommand = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UserError instead of printing its usage and takes no abbreviated options.

    The parser of a `command` imports the command's module and adds the arguments once the command is typed.
    """

    def __init__(self, *arguments: Any, command: Command | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, "exit_on_error": False, **keywords})
        self._command = command

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        command = self._command
        if command is not None:
            module = importlib.import_module(f"trainfast_tui.cli.{command.module}")
            getattr(module, f"{command.function}_arguments")(self)
            script = None
            if command.takes_script and "--" in args:
                separator = args.index("--")
                args, script = args[:separator], args[separator + 1 :]
            args = self._with_slurm(args) if "--slurm" in args else args
            self.set_defaults(run=getattr(module, command.function), leaf=self, script=script)
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            name = error.argument_name
            if isinstance(error.__context__, argparse.ArgumentTypeError):
                # The message of a `type` function says already what the option takes.
                raise UserError(f"{name}: {error.message}", key=name) from None
            raise UserError(f"{error}; see {self.prog} --help", key=name) from None

    def _with_slurm(self, words: list[str]) -> list[str]:
        """Return the words with `--slurm=--nodes=2` for `--slurm --nodes=2`: argparse takes that for two options."""
        before = words.index("--slurm")
        value = "".join(words[before + 1 : before + 2])
        is_value = value.startswith("-") and value.partition("=")[0] not in self._option_string_actions
        return [*words[:before], f"--slurm={value if is_value else ''}", *words[before + 1 + is_value :]]

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def option_names(self) -> list[str]:
        """Return all options, long ones first."""
        return sorted(self._option_string_actions, key=lambda name: not name.startswith("--"))

    def unknown(self, word: str) -> UserError:
        """Return the error for a word or an option that this command does not take."""
        name = self.prog.removeprefix(f"{PROGRAM} ")
        if not word.startswith("-"):
            return UserError(f"{name} does not take {word!r}", key=word)
        option, names = word.partition("=")[0], self.option_names()
        close = nearest(option, [name for name in names if name.startswith("--")])
        return UserError(f"{name} has no option {option}", key=option, allowed=None if close else names, nearest=close)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the nearest command where argparse would list them all."""
        if action.choices is None or value in action.choices:
            return
        names = list(action.choices)
        group = self.prog.removeprefix(PROGRAM).strip()
        words = f"{group} has no command {value!r}" if group else f"there is no command {value!r}"
        close = nearest(value, names)
        raise UserError(words, key=value, allowed=names, nearest=f"{group} {close}".strip() if close else None)


def parse(arguments: list[str]) -> tuple[RunCommand, argparse.Namespace]:
    """Return the function to run and its arguments; raises UserError, exits after `--help` and `--version`."""
    parser = _build(COMMANDS if arguments else ())  # the app need not wait for the parsers of commands
    arguments = _spelled_out(arguments)
    # Before argparse misses an argument that a removed option stood for; a script's own options come after --.
    for word in itertools.takewhile(lambda word: word != "--", arguments):
        if word in REMOVED and (word.startswith("-") or word is arguments[0]):
            raise UserError(f"{word} was removed: {REMOVED[word]}", key=word)
    for word in itertools.takewhile(lambda word: word.startswith("-"), arguments):
        if word.partition("=")[0] not in parser.option_names():
            raise parser.unknown(word)  # argparse would take the next word for a command and refuse that
    parsed, extra = parser.parse_known_args(arguments)
    if parsed.leaf is not parser and arguments[0].startswith("-"):
        # The command would ignore an option of the app.
        command, option = parsed.leaf.prog.removeprefix(f"{PROGRAM} "), arguments[0].partition("=")[0]
        words = f"{option} before {command} is for the app alone; leave it out, or put it after {command}"
        raise UserError(words, key=option)
    if extra:
        if parsed.leaf.prog == f"{PROGRAM} run" and parsed.script is None and parsed.preset is not None:
            refuse_script_word([parsed.preset, *extra])
        raise parsed.leaf.unknown(extra[0])
    return parsed.run, parsed


def _spelled_out(arguments: list[str]) -> list[str]:
    """Return the arguments with `list` for `ls`, and after `runs` or `presets` alone; `ls` alone lists runs."""
    if arguments[:1] == ["ls"]:
        return ["runs", "list", *arguments[1:]]
    if arguments[:1] not in (["runs"], ["presets"]):
        return arguments
    group, *rest = arguments
    if rest[:1] == ["ls"]:
        return [group, "list", *rest[1:]]
    is_alone = not rest or (rest[0].startswith("-") and rest[0] not in ("-h", "--help"))
    return [group, "list", *rest] if is_alone else arguments


def refuse_script_word(words: list[str]) -> None:
    """Raise UserError if one of these words, typed where `run` takes a preset, is a Python file that exists."""
    if any(word.endswith(".py") and os.path.isfile(word) for word in words):
        command = shlex.join(["python", *words] if words[0].endswith(".py") else words)
        raise UserError(f"a script goes after --: {PROGRAM} run -- {command}", key=words[0])


def _build(commands: Sequence[Command]) -> Parser:
    """Return the parser with these commands by name."""
    parser = Parser(
        prog=PROGRAM,
        description="Find the fastest way to train your model that fits. Without a command: the app.",
        epilog="Exit codes: finished 0, wrong input 2, out of memory 3, failed or killed 4, lost 5, stopped 130.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.add_argument("--ascii", action="store_true", help="the app without Unicode characters")
    parser.add_argument(
        "--plain-output", action="store_true", help="the app with Textual's own output and keys, should ours fail"
    )
    parser.add_argument("--no-mouse", action="store_true", help="the app without the mouse, for the terminal's own")
    parser.add_argument("--preset", metavar="PRESET", dest="app_preset", help="the preset that the app starts with")
    parser.add_argument("--python", metavar="PATH", dest="app_python", help="the Python that the app trains with")
    parser.set_defaults(run=_open_app, leaf=parser)
    subparsers = {"": parser.add_subparsers(title="commands", metavar="COMMAND")}
    for command in commands:
        *groups, name = command.words
        group = "".join(groups)
        if group not in subparsers:
            names = [sibling.words[1] for sibling in COMMANDS if sibling.words[0] == group]
            group_help = f"{GROUP_HELP[group]}: {', '.join(names)}"
            group_parser = subparsers[""].add_parser(group, help=group_help, description=_sentence(group_help))
            group_parser.set_defaults(run=partial(_refuse_group, group, names), leaf=group_parser)
            subparsers[group] = group_parser.add_subparsers(title="commands", metavar="COMMAND")
        subparsers[group].add_parser(name, help=command.help, description=_sentence(command.help), command=command)
    return parser


def _sentence(words: str) -> str:
    """Return the words with a capital and a full stop; `GPUs` stays as it is."""
    return f"{words[0].upper()}{words[1:]}."


class _Version(argparse.Action):
    """Prints the version; argparse's own hides that stdout is full."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **keywords: Any) -> None:
        print(f"{PROGRAM} {__version__}")
        parser.exit()


def _refuse_group(group: str, names: Iterable[str], _: argparse.Namespace) -> NoReturn:
    raise UserError(f"{group} needs a command", key=group, allowed=names)


def _open_app(parsed: argparse.Namespace) -> int:
    import gc
    import sys

    os.getcwd()  # raises FileNotFoundError in a deleted folder: the screens read files by names from here
    without = f"without one: {PROGRAM} run PRESET, or {PROGRAM} monitor --once"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"the app needs a terminal; {without}")
    if not can_move_cursor(os.environ):
        term = os.environ.get("TERM") or "not set"
        raise UserError(f"the app needs a terminal that can move its cursor, and TERM is {term}; {without}", key="TERM")
    # Collecting garbage among the imported modules would delay the first frame.
    gc.disable()
    from trainfast_runner.records.home import Home
    from trainfast_tui.app import run_app

    return run_app(
        Home().create(),
        preset=parsed.app_preset,
        python=parsed.app_python,
        ascii=parsed.ascii,
        plain_output=parsed.plain_output,
        mouse=not parsed.no_mouse,
    )


class Command(NamedTuple):
    """A command: its words as typed, and the module of this folder that runs it.

    The functions of `runs list` are `runs_list`, which returns the exit code, and `runs_list_arguments`.
    """

    words: tuple[str, ...]
    module: str
    help: str
    takes_script: bool = False
    """True if a command line of the user's own may follow, after `--`."""

    @property
    def function(self) -> str:
        """The name of its function in its module."""
        return "_".join(self.words).replace("-", "_")


COMMANDS = (
    Command(
        ("run",),
        "run",
        "train a preset or a script of your own, show its progress, print the figures",
        takes_script=True,
    ),
    Command(("search", "max-batch"), "search", "the largest batch that fits, confirmed in a fresh process"),
    Command(("search", "best"), "search", "the fastest settings that fit, confirmed in fresh processes"),
    Command(("predict",), "predict", "the memory a run needs, by category, and its speed, without running it"),
    Command(("bench",), "bench", "a preset's variants, or a grid of settings, as a table against the baseline"),
    Command(("runs", "list"), "runs", "all runs, newest first"),
    Command(("runs", "show"), "runs", "one run's result"),
    Command(("runs", "compare"), "runs", "which settings differ and what changed"),
    Command(("runs", "rm"), "runs_rm", "delete runs"),
    Command(("runs", "prune"), "runs_rm", "delete old runs and searches"),
    Command(("logs",), "logs", "the output of a run's training"),
    Command(("stop",), "logs", "stop a live run"),
    Command(("attach",), "run", "follow a live run; Ctrl-C leaves it running"),
    Command(("export",), "report", "a run's settings for a script of your own"),
    Command(("report",), "report", "runs or a search in one file, .html or .md, with tables and pictures"),
    Command(("presets", "list"), "presets", "all presets"),
    Command(("presets", "show"), "presets", "a preset's model, data, settings and variants"),
    Command(
        ("presets", "new"),
        "presets",
        "make a preset of your own from another, or from a script's flags",
        takes_script=True,
    ),
    Command(("knobs",), "presets", "every setting of --set: what it does to speed and memory, and its values"),
    Command(("monitor",), "monitor", "this machine's GPUs and host, live"),
    Command(("topo",), "monitor", "how the GPUs are connected, and what it means for the strategies"),
    Command(("doctor",), "doctor", "problems of this machine, each with its cure"),
    Command(("completion",), "completion", "the completion of commands and options for bash, zsh or fish"),
)
REMOVED = {
    "import": "presets new NAME -- COMMAND makes a preset of a script's command",
    "--onto": "--to prints the settings for your script",
    "--prove": "run -- COMMAND runs your script with them",
    "--cool-to": "monitor shows the temperature to wait for, and a result says if its run was hot",
    "--cold": "every row is a run of its own",
}
"""The present way to the job of each removed command or option."""
GROUP_HELP = {
    "search": "what fits, and what is fastest",
    "runs": "history and live runs",
    "presets": "recipes, shipped and your own",
}
"""The help of the first word of commands with two."""
