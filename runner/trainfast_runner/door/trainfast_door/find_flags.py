"""Run a script to its argument parser: `python find_flags.py DIRECTORY SCRIPT WORDS...`, or `-m MODULE` for SCRIPT.

The report is in DIRECTORY. A script of its own, so that it starts in any Python, also one without PYTHONPATH.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
from typing import Any

DOOR_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__))
"""The folder of the package `trainfast_door`."""


def main() -> None:
    """Run the script of the command line; the hooks end the process unless the script ends first."""
    directory, *words = sys.argv[1:]
    is_module = words[0] == "-m"
    if sys.path and os.path.abspath(sys.path[0]) == DOOR_PACKAGE_FOLDER:
        # Python puts this file's folder first in sys.path; the script expects its own.
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    sys.path.append(os.path.dirname(DOOR_PACKAGE_FOLDER))

    discovery = importlib.import_module("trainfast_door.discovery").Discovery(directory)
    discovery.install()
    sys.argv = words[1:] if is_module else words
    try:
        if is_module:
            script_globals = runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            script_globals = runpy.run_path(words[0], run_name="__main__")
        discovery.report("its end", script_globals)
    except SystemExit as left:
        discovery.report("its end" if left.code in (0, None) else "an error", _globals_of_raiser(left))
        raise
    except BaseException as error:
        traceback.print_exc()
        discovery.report("an error", _globals_of_raiser(error))
        sys.exit(1)


def _globals_of_raiser(error: BaseException) -> dict[str, Any]:
    """Return the globals of the script that raised an error, from the traceback; empty if the script never ran."""
    # The first frame is `main`, whose module has the same name.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    return next((frame.f_globals for frame in frames if frame.f_globals.get("__name__") == "__main__"), {})


if __name__ == "__main__":
    main()
