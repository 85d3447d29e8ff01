"""Print, as one JSON line, the packages of a training Python and the facts of a model.

`PY inspect_model.py '{"model": {...}, "objective": "causal-lm"}' [--count] [--attention]`. Without a flag torch is not
imported, which takes a quarter of the time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import platform
import runpy
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

VERSIONED_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "flash-attn", "numpy")
"""Packages whose versions are asked for, beside those of the catalog."""


def main(arguments: list[str]) -> dict[str, Any]:
    """Return `python`, `versions`, and as asked `config`, `model_type`, `parameters`, `attentions`.

    `error` is there if the model cannot be built.
    """
    from ..exit_now import die_with_parent
    from ..invalid import InvalidInput
    from ..model.model_config import check_family, resolve_config

    die_with_parent()
    flags = {argument for argument in arguments if argument.startswith("--")}
    request = json.loads(next((a for a in arguments if not a.startswith("--")), "{}"))
    answer: dict[str, Any] = {"python": platform.python_version(), "versions": {**_versions(), **torch_build()}}
    if not flags:
        # A configuration does not need these packages; without torch this process takes a quarter of the time.
        hide_packages(("torch", "tensorflow", "jax"))
        logging.disable(logging.WARNING)
    if request.get("model"):
        if answer["versions"]["transformers"] is None:
            answer["error"] = {"message": "this Python has no transformers", "key": "python", "allowed": []}
            return {**answer, "install": "pip install torch transformers tokenizers"}
        try:
            config = resolve_config(request["model"])
            check_family(config, request.get("objective", "causal-lm"))
            answer["model_type"] = config.model_type
            # The plan belongs to the class: a configuration does not store it.
            plan = getattr(config, "base_model_tp_plan", None)
            answer["config"] = {**config.to_dict(), "base_model_tp_plan": plan}
            if "--count" in flags:
                answer["parameters"] = _count(config, request.get("objective", "causal-lm"))
            if "--attention" in flags:
                from ..model.build import attentions

                answer["attentions"] = attentions(config, request.get("objective", "causal-lm"))
        except InvalidInput as error:
            answer["error"] = error.as_fields()
    return answer


def _versions() -> dict[str, str | None]:
    from ..catalog import packages

    versions: dict[str, str | None] = {}
    for name in (*VERSIONED_PACKAGES, *packages()):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _count(config: Any, objective: str) -> int:
    import torch

    from ..model.build import model_class

    with torch.device("meta"):
        model = model_class(objective).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def hide_packages(names: Collection[str]) -> None:
    """Hide installed packages from transformers, which imports those that `importlib.util.find_spec` finds.

    The inspector then takes 2.4 s of CPU, and 8.9 s where it imports torch.
    """
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in names else real(name, package)

    importlib.util.find_spec = find_spec


def torch_build() -> dict[str, str | None]:
    """CUDA and HIP (ROCm) versions of torch's build; None for a platform that it was not built for, and without torch.

    Only torch/version.py is run: importing torch takes seconds, and the distribution's version has no `+cpu` or
    `+cu130` in builds of PyPI, conda or one's own.
    """
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    versions = runpy.run_path(str(file)) if file is not None and file.exists() else {}
    return {f"torch.version.{name}": str(versions[name]) if versions.get(name) else None for name in ("cuda", "hip")}


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "bootstrap.py"))
    print(
        json.dumps(importlib.import_module("trainfast_worker.programs.inspect_model").main(sys.argv[1:]), default=str)
    )
