"""The program under measurement as an installed wheel has it: every file compiled already, as pip leaves it."""

import compileall
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def app() -> tuple[str, ...]:
    """The command `trainfast-tui`, or the module that it calls where no script is beside the interpreter.

    A source tree that Python may not write into would be compiled at every start.
    """
    for package in ("trainfast_runner", "trainfast_tui"):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            compileall.compile_dir(folder, quiet=1)
    script = Path(sys.executable).with_name("trainfast-tui")
    return (str(script),) if script.exists() else (sys.executable, "-m", "trainfast_tui.cli")
