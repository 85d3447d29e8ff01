"""The accelerator that this Python's torch was built for.

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
    """The CUDA and HIP (ROCm) versions of torch's build; None for what it was not built for, or without torch.

    torch/version.py alone is run, as `torch.version` is: importing torch takes seconds, and its distribution's version
    says nothing, since a build of PyPI, conda or one's own has no `+cpu` or `+cu130` in it.
    """
    said = _version_file()
    return {f"torch.version.{name}": _text(said.get(name)) for name in ("cuda", "hip")}


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
