"""`completion`: a script for the shell that completes commands and options."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from trainfast_runner.errors import UserError
from trainfast_tui.cli.parser import COMMANDS, PROGRAM, Parser
from trainfast_tui.cli.printing import print_line, print_lines

BASH = """_trainfast_tui() {{
  local typed="${{COMP_WORDS[*]:1:COMP_CWORD-1}} " words=""
  case "${{typed# }}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _trainfast_tui {program}"""
INSTALL = {
    "bash": f'# eval "$({PROGRAM} completion bash)" in ~/.bashrc',
    "zsh": f'# eval "$({PROGRAM} completion zsh)" in ~/.zshrc, after compinit',
    "fish": f"# {PROGRAM} completion fish > ~/.config/fish/completions/{PROGRAM}.fish",
}


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")


def completion(arguments: argparse.Namespace) -> int:
    """Print the script for the shell."""
    if arguments.shell not in INSTALL:
        raise UserError(f"no completion for {arguments.shell}", key="SHELL", allowed=INSTALL)
    print_line(INSTALL[arguments.shell])
    if arguments.shell == "zsh":
        print_line("autoload -U bashcompinit && bashcompinit")
    if arguments.shell == "fish":
        for typed, words in _words_after():
            seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in typed.split())
            print_line(f'complete -c {PROGRAM} -n "{seen or "__fish_use_subcommand"}" -a "{" ".join(words)}"')
        return 0
    # The longest first: `runs list` before `runs`.
    by_length = sorted(_words_after(), key=lambda pair: -len(pair[0]))
    cases = [f'    "{typed} "*) words="{" ".join(words)}";;' for typed, words in by_length if typed]
    top = [f'    "") words="{" ".join(words)}";;' for typed, words in by_length if not typed]
    print_lines(BASH.format(cases="\n".join([*cases, *top]), program=PROGRAM).split("\n"))
    return 0


def _words_after() -> Iterator[tuple[str, list[str]]]:
    """Yield the words that may follow each command as typed: first words, second words, then options."""
    yield "", list(dict.fromkeys(command.words[0] for command in COMMANDS))
    for group in dict.fromkeys(command.words[0] for command in COMMANDS if len(command.words) > 1):
        yield group, [command.words[1] for command in COMMANDS if command.words[0] == group and command.words[1:]]
    for command in COMMANDS:
        parser = Parser()
        getattr(importlib.import_module(f"trainfast_tui.cli.{command.module}"), f"{command.function}_arguments")(parser)
        yield " ".join(command.words), [name for name in parser.option_names() if name.startswith("--")]
