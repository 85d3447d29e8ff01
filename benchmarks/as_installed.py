"""The program under measurement as an installed wheel has it: every file compiled already, as pip leaves it."""

import compileall
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def app() -> str:
    """The path of `trainfast-tui`. A source tree that Python may not write into would be compiled at every start."""
    for package in ("trainfast_runner", "trainfast_tui"):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            compileall.compile_dir(folder, quiet=1)
    return str(Path(sys.executable).with_name("trainfast-tui"))
