"""`trainfast-tui` with the modules of all its commands imported."""

import importlib
import pkgutil
import sys

from trainfast_tui import cli

for module in pkgutil.iter_modules(cli.__path__, f"{cli.__name__}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def main(arguments: list[str]) -> int:
    """Run one command line."""
    sys.argv = ["trainfast-tui", *arguments]
    return cli.main(arguments)
