"""Print the accelerator that this Python's torch was built for.

`PY torch_build.py` prints `{"torch": version, "torch.version.cuda": ..., "torch.version.hip": ...}` as one JSON line.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any


def torch_build() -> dict[str, str | None]:
    """CUDA and HIP (ROCm) versions of torch's build; None for a platform that it was not built for, and without torch.

    Only torch/version.py is run: importing torch takes seconds, and the distribution's version has no `+cpu` or
    `+cu130` in builds of PyPI, conda or one's own.
    """
    versions = _version_file()
    return {f"torch.version.{name}": _text(versions.get(name)) for name in ("cuda", "hip")}


def _version_file() -> dict[str, Any]:
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / "version.py"
        if file.exists():
            return runpy.run_path(str(file))
    return {}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


if __name__ == "__main__":
    try:
        version: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = None
    print(json.dumps({"torch": version, **torch_build()}))
