"""The file that a training process starts with: `PY bootstrap.py RUN_DIR`, alone or under `torch.distributed.run`.

`PY bootstrap.py standby ORDER` waits for its run. This file loads its own folder as the package `trainfast_worker`,
in a Python with any other packages.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

WORKER_FOLDER = Path(__file__).resolve().parent
"""The folder of the worker."""


def register() -> None:
    """Make this folder importable as `trainfast_worker`, and keep its files from shadowing other modules."""
    if "trainfast_worker" in sys.modules:
        return
    if sys.path and Path(sys.path[0] or ".").resolve().is_relative_to(WORKER_FOLDER):
        del sys.path[0]
    spec = importlib.util.spec_from_file_location(
        "trainfast_worker", WORKER_FOLDER / "__init__.py", submodule_search_locations=[str(WORKER_FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["trainfast_worker"] = package
    spec.loader.exec_module(package)


# Outside the guard, because processes started by forkserver or spawn run this file again and unpickle our classes.
register()

if __name__ == "__main__":
    run_dir = sys.argv[1]
    if run_dir == "standby":
        run_dir = importlib.import_module("trainfast_worker.standby").wait(json.loads(sys.argv[2]))
    importlib.import_module("trainfast_worker.main").main(run_dir)
