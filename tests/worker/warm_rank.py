"""One rank of a training, with torch and transformers imported."""

import importlib
import runpy
import sys
import types

from trainfast_runner.machine.training_python import WORKER_FOLDER

BOOTSTRAP = str(WORKER_FOLDER / "bootstrap.py")

runpy.run_path(BOOTSTRAP)
importlib.import_module("trainfast_worker.training")


def main(arguments):
    """Train the run directory; the worker ends the process."""
    # Processes that the rank spawns begin with this file, as those of a cold one do.
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__file__ = BOOTSTRAP
    importlib.import_module("trainfast_worker.main").main(*arguments)
