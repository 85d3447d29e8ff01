"""The command line: one file a command, imported only when it is the one that was typed.

Exit codes: finished 0, usage or an invalid preset 2, out of memory 3, failed or killed 4, lost 5, stopped 130.
"""

from __future__ import annotations

import os
import sys

CUT_OFF = 141
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. What a person got wrong is one line on stderr, never a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _finish(_run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`runs list | head`): the rest is of no use to anyone.
        _drop_stdout()
        return CUT_OFF
    except OSError as error:
        _drop_stdout()
        place = f"{error.filename}: " if error.filename else ""
        print(f"trainfast-tui: {place}{error.strerror or error}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    from trainfast_runner.problem import Problem
    from trainfast_tui.cli import parser

    try:
        command, parsed = parser.parse(arguments)
        return command(parsed)
    except Problem as problem:
        print(f"trainfast-tui: {problem.line()}", file=sys.stderr)
        if "--json" in arguments:
            import json

            print(json.dumps({"error": problem.as_json()}))
        return problem.exit_code


def _finish(code: int) -> int:
    """Write out what is buffered while an error can still be told."""
    sys.stdout.flush()
    return code


def _drop_stdout() -> None:
    """Point stdout at nothing, or the interpreter's last flush would complain a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
