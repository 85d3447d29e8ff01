"""Find the command for the words typed; for a misspelt word the nearest one is named."""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

from trainfast_runner.errors import UserError, nearest
from trainfast_tui.cli.commands import COMMANDS, GROUPS, Command, named

Run = Callable[[argparse.Namespace], int]
Subparsers = Any
"""The return type of `ArgumentParser.add_subparsers`, which argparse does not export."""

APP_OPTIONS = ("--preset", "--python", "--ascii", "--plain-output", "--version", "--help")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UserError instead of printing its usage and takes no abbreviated options."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **keywords})

    def error(self, message: str) -> NoReturn:
        argument = message.removeprefix("argument ").partition(":")[0] if message.startswith("argument ") else None
        raise UserError(f"{message}; see {self.prog} --help", key=argument)

    def option_names(self) -> list[str]:
        """Return all options, long ones first."""
        names = [name for action in self._actions for name in action.option_strings]
        return sorted(names, key=lambda name: not name.startswith("--"))


def parse(arguments: list[str]) -> tuple[Run, argparse.Namespace]:
    """Return the function to run and its arguments; raises UserError, exits after `--help` and `--version`."""
    command = _typed(arguments)
    parser = _build(command)
    script: list[str] | None = None
    if command is not None and command.takes_script and "--" in arguments:
        place = arguments.index("--")
        arguments, script = arguments[:place], arguments[place + 1 :]
    parsed, extra = parser.parse_known_args(arguments, argparse.Namespace(script=script))
    if extra:
        raise _unknown_argument(extra[0], parsed.leaf)
    return parsed.run, parsed


def _typed(arguments: list[str]) -> Command | None:
    """Return the command whose words come first, None for the app or a group; raises UserError for another word."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        # Options of the app may come before a command; after an unknown one nothing is certain.
        option = rest.pop(0)
        if option in ("--preset", "--python"):
            rest = rest[1:]
        elif option not in ("--ascii", "--plain-output") and not option.startswith(("--preset=", "--python=")):
            name = option.partition("=")[0]
            if name.startswith("--") and name not in APP_OPTIONS:
                close = nearest(name, APP_OPTIONS)
                allowed = None if close else APP_OPTIONS
                raise UserError(f"trainfast-tui has no option {name}", key=name, allowed=allowed, nearest=close)
            return None
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))[:2]
    if not words:
        return None
    first = words[0]
    if first in GROUPS:
        inside = [command.words[1] for command in COMMANDS if command.words[0] == first]
        if len(words) == 1:
            if not {"-h", "--help"} & set(arguments):
                raise UserError(f"{first} needs to know what to do", key=first, allowed=inside)
            return None
        if words[1] not in inside:
            raise UserError(
                f"{first} has no command {words[1]!r}",
                key=words[1],
                allowed=inside,
                nearest=_prefixed(first, nearest(words[1], inside)),
            )
        return named((first, words[1]))
    found = named((first,))
    if found is None:
        known = list(dict.fromkeys(command.words[0] for command in COMMANDS))
        raise UserError(f"there is no command {first!r}", key=first, allowed=known, nearest=nearest(first, known))
    return found


def _prefixed(group: str, word: str | None) -> str | None:
    return f"{group} {word}" if word else None


def _build(chosen: Command | None) -> Parser:
    """Return the parser with all commands by name, and only the chosen one with its arguments."""
    parser = Parser(
        prog="trainfast-tui",
        description="Find the fastest way to train your model that fits. Without a command: the app.",
        epilog="Exit codes: finished 0, wrong input 2, out of memory 3, failed or killed 4, lost 5, stopped 130.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.add_argument("--ascii", action="store_true", help="the app without Unicode characters")
    parser.add_argument(
        "--plain-output", action="store_true", help="the app with Textual's own output and keys, should ours fail"
    )
    parser.add_argument("--preset", metavar="PRESET", help="the preset that the app starts with")
    parser.add_argument("--python", metavar="PATH", dest="app_python", help="the Python that the app trains with")
    parser.set_defaults(run=_open_app, leaf=parser)
    top = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    groups: dict[str, Subparsers] = {}
    for command in COMMANDS:
        place: Subparsers = top
        if len(command.words) == 2:
            name = command.words[0]
            if name not in groups:
                inside = ", ".join(other.words[1] for other in COMMANDS if other.words[0] == name)
                about = f"{GROUPS[name]}: {inside}"
                group = top.add_parser(name, help=about, description=_sentence(about))
                groups[name] = group.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
            place = groups[name]
        if command is chosen:
            module = importlib.import_module(f"trainfast_tui.cli.{command.module}")
            leaf: Parser = place.add_parser(command.words[-1], help=command.help, description=_sentence(command.help))
            module.add(leaf)
            leaf.set_defaults(run=module.run, leaf=leaf)
        else:
            place.add_parser(command.words[-1], help=command.help, add_help=False)
    return parser


def _sentence(words: str) -> str:
    """Return the words with a capital and a full stop; `GPUs` stays as it is."""
    return f"{words[0].upper()}{words[1:]}."


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **keywords: Any) -> None:
        from trainfast_runner import __version__

        print(f"trainfast-tui {__version__}")
        parser.exit()


def _open_app(parsed: argparse.Namespace) -> int:
    import gc
    import sys

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("the app needs a terminal; without one: trainfast-tui run PRESET, see trainfast-tui --help")
    # Collecting garbage among the imported modules would delay the first frame.
    gc.disable()
    from trainfast_runner.records.home import Home
    from trainfast_tui.app import run_app

    return run_app(Home().ready(), parsed.ascii, parsed.preset, parsed.app_python, parsed.plain_output)


def _unknown_argument(word: str, leaf: Parser) -> UserError:
    name = leaf.prog.removeprefix("trainfast-tui ")
    if not word.startswith("-"):
        return UserError(f"{name} does not take {word!r}", key=word)
    option = word.partition("=")[0]
    names = leaf.option_names()
    close = nearest(option, [name for name in names if name.startswith("--")])
    return UserError(f"{name} has no option {option}", key=option, allowed=None if close else names, nearest=close)
