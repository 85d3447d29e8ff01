"""Run a script to its argument parser: `python find_flags.py DIRECTORY SCRIPT WORDS...`, or `-m MODULE` for SCRIPT.

The report is in DIRECTORY. A script of its own, so that it starts in any Python, also one without PYTHONPATH.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback

FOLDER = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    """Run the script of the command line; the hooks end the process unless the script ends first."""
    directory, *words = sys.argv[1:]
    is_module = words[0] == "-m"
    if sys.path and os.path.abspath(sys.path[0]) == FOLDER:
        # Python put this script's folder there, as it would have put the other's.
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    sys.path.append(os.path.dirname(FOLDER))

    discovery = importlib.import_module("trainfast_door.discovery").Discovery(directory)
    discovery.install()
    sys.argv = words[1:] if is_module else words
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        discovery.report("its end")
    except SystemExit as left:
        discovery.report("its end" if left.code in (0, None) else "an error")
        raise
    except BaseException:
        traceback.print_exc()
        discovery.report("an error")
        sys.exit(1)


if __name__ == "__main__":
    main()
