"""The command line: one file a command, imported only when its words are typed.

Modules that only some uses of a command need, for a script or a proof, are imported where they are used.
Exit codes: docs/commands.md.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING

from trainfast_tui.cli.exit_codes import EXIT_CUT_OFF, EXIT_FAILED, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from trainfast_runner.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; a UserError becomes one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_closed_streams()
    try:
        exit_code = _run(arguments)
        sys.stdout.flush()  # while an error can still be reported
        return exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`runs list | head`).
        _drop_stdout()
        return EXIT_CUT_OFF
    except OSError as error:
        _drop_stdout()
        _print_error(error.strerror or str(error))
        return EXIT_FAILED


def _run(arguments: list[str]) -> int:
    from trainfast_runner.errors import UserError
    from trainfast_tui.cli import parser

    try:
        command, parsed = parser.parse(arguments)
        return command(parsed)
    except UserError as error:
        return _refuse(error, arguments)
    except SystemExit as ended:
        # argparse, after `--help` and `--version`.
        return int(ended.code or 0)
    except RuntimeError as error:
        from trainfast_runner.machine.resource_limits import inherited_limits, limit_words

        if not (limit := limit_words(inherited_limits(), str(error))):
            raise
        return _refuse(UserError(f"{error}{limit}", exit_code=4), arguments)
    except OSError as error:
        if error.filename is not None:
            return _refuse(UserError(f"{os.fsdecode(error.filename)}: {error.strerror or error}"), arguments)
        if isinstance(error, FileNotFoundError):
            # Only os.getcwd names no file.
            return _refuse(UserError("the current directory has been deleted: cd to another one"), arguments)
        raise  # our own output failed, so nothing more can be printed


def _refuse(error: UserError, arguments: list[str]) -> int:
    _print_error(error.line())
    # A `--json` after `--` belongs to the script.
    if "--json" in itertools.takewhile(lambda word: word != "--", arguments):
        from trainfast_tui.cli.printing import print_json

        print_json({"error": error.as_json()})
    return error.exit_code


def _print_error(words: str) -> None:
    from trainfast_tui.cli.printing import print_notice

    print_notice(f"trainfast-tui: {words}")


def _open_closed_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed (`>&-`)."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # In this order each gets its usual descriptor, 0 to 2.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))


def _drop_stdout() -> None:
    """Point stdout at /dev/null, or the interpreter's last flush would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
